"""A live model and its skeleton in; what PEFT currently says of its adapters (scales, active, merged) out, and kept up to date.

A skeleton is copied once; scales and active adapters can change without any parameter being replaced. They are read anew before
every export, so that no export uses an old scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peft import PeftConfig
from peft.tuners.adalora.layer import AdaLoraLayer
from peft.tuners.lora import LoraLayer
from peft.tuners.lycoris_utils import LycorisLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from lockstep.errors import IncompleteExport
from lockstep.sharding.skeleton import walk

_INITS_THAT_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""How values of LoraConfig.init_lora_weights begin for which PEFT takes something out of the base weight at injection."""

_STATE = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters")


@dataclass(frozen=True, slots=True)
class Kind:
    """What an adapter is, as its configuration says."""

    name: str
    """PEFT's, such as "LORA"."""
    is_prompt: bool
    """Virtual tokens before the input (prompt and prefix tuning and the like); the base's modules stay as they are."""
    is_adaption_prompt: bool


def kind_of(model: nn.Module, adapter: str) -> Kind:
    config: Any = getattr(model, "peft_config", {})[adapter]
    kind = getattr(config.peft_type, "value", config.peft_type)
    return Kind(str(kind), bool(config.is_prompt_learning), bool(config.is_adaption_prompt))


def check_as_configured(model: nn.Module, adapter: str) -> None:
    """An adapter file says nothing about scales: whoever loads it computes them from the configuration.

    Raises `IncompleteExport` naming a layer whose scale in the skeleton is another, and for adapters whose tensors PEFT computes
    when it saves.
    """
    kind = kind_of(model, adapter)
    if kind.is_prompt:
        raise IncompleteExport(
            f"adapter {adapter!r} is {kind.name}: PEFT computes its file from a prompt encoder when it saves, so it cannot be "
            "streamed; save it with save_pretrained"
        )
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer | LycorisLayer) or adapter not in layer.scaling:
            continue
        live, configured = layer.scaling[adapter], _configured_scale(model, layer, adapter)
        if not math.isclose(live, configured, rel_tol=1e-6):
            raise IncompleteExport(
                f"{name}: adapter {adapter!r} is scaled by {live} in the model and by {configured} as configured, which is what a "
                "receiver of the adapter would use; MergedExport carries the scale, or reset it (set_scale(adapter, 1))"
            )


def _configured_scale(model: nn.Module, layer: Any, adapter: str) -> float:
    config: Any = getattr(model, "peft_config", {})[adapter]
    key = "alpha" if isinstance(layer, LycorisLayer) else "lora_alpha"
    alpha, rank = getattr(layer, key)[adapter], layer.r[adapter]
    if alpha not in (getattr(config, key), *(getattr(config, "alpha_pattern", None) or {}).values()):
        alpha = getattr(config, key)  # the configuration was changed after the layer was made
    if isinstance(layer, AdaLoraLayer):
        return float(alpha if alpha > 0 else rank)
    uses_root = getattr(config, "use_rslora", False)
    return float(alpha / math.sqrt(rank)) if uses_root else float(alpha / rank)


def changes_the_base(config: PeftConfig) -> bool:
    """Did PEFT change base weights when it put this adapter in (PiSSA and its like)?"""
    init = getattr(config, "init_lora_weights", None)
    return isinstance(init, str) and init.lower().startswith(_INITS_THAT_CHANGE_THE_BASE)


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
