"""A live model and its skeleton in; what PEFT currently says of its adapters (scales, active, merged) out, and kept up to date.

A skeleton is copied once; scales and active adapters can change without any parameter being replaced. They are read anew before
every export, so that no export uses an old scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from lockstep.errors import IncompleteExport
from lockstep.sharding.skeleton import walk

_STATE = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters")


class PeftState:
    """Pairs every PEFT layer of the live model with its copy in the skeleton."""

    def __init__(self, module: nn.Module, skeleton: nn.Module):
        self._root = skeleton
        live = dict(walk(module))
        self._pairs = [
            (live[name], copy)
            for name, copy in skeleton.named_modules()
            if isinstance(copy, BaseTunerLayer | AuxiliaryTrainingWrapper)
        ]

    @property
    def configs(self) -> Mapping[str, PeftConfig]:
        """PEFT's configurations by adapter; empty for a model without any."""
        return getattr(self._root, "peft_config", {})

    def refresh(self) -> bool:
        """Bring the skeleton up to the live model's state; True if anything had changed."""
        changed = False
        for live, copy in self._pairs:
            for key in _STATE:
                now = live.__dict__.get(key)
                if now != copy.__dict__.get(key):
                    setattr(copy, key, _own(now))
                    changed = True
        return changed

    def adapter(self, asked: str | None) -> str:
        """The adapter that is meant. Raises `IncompleteExport` for one that does not exist, or when None is not clear."""
        there = sorted(self.configs)
        if not there:
            raise IncompleteExport("the model has no adapter; FullExport() exports a model without one")
        if asked is None:
            active = sorted({name for _, copy in self._pairs for name in _listed(copy.__dict__.get("_active_adapter"))})
            asked = there[0] if len(there) == 1 else active[0] if len(active) == 1 else None
            if asked is None:
                raise IncompleteExport(
                    f"which adapter? The model has {there}, of which {active} are active: name one, as in "
                    "MergedExport(adapter='...')"
                )
        if asked not in there:
            raise IncompleteExport(f"adapter {asked!r} does not exist; the model has {there}")
        return asked


def _own(value: Any) -> Any:
    return type(value)(value) if isinstance(value, dict | list) else value


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
