"""The recipe's train section, and the model on its device, in; the section with everything decided that it leaves open, out.

What cannot be had falls back with a warning where the recipe leaves it open (`packing: auto`), and is an error where it does not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from lockstep.config import TrainConfig
from lockstep.data.packing import Packing, check_packing_supported, why_not
from lockstep.dist import World, data_phase, max_over_ranks
from lockstep.errors import ModelError
from lockstep.logs import ON_EVERY_RANK
from lockstep.train.logprobs import packing_fault, packing_gap
from lockstep.types import Sampling

log = logging.getLogger(__name__)

BEST_FIRST: tuple[Packing, ...] = ("shared_prefix", "packed", "padded")


def decide(
    train: TrainConfig,
    module: nn.Module,
    world: World,
    *,
    sampling: Sampling,
    pad_id: int,
    others: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """Collective. The same on every rank. `others`: see `choose_packing`. Raises `ModelError` for a packing that was asked for
    and cannot be had."""
    packing = choose_packing(train.packing, module, world, sampling=sampling, pad_id=pad_id, others=others)
    decided: dict[str, Any] = {"packing": packing}
    offloads = [name for name in ("offload_optimizer", "offload_activations") if getattr(train, name)]
    if offloads and world.device.type == "cpu":
        log.warning(
            "train.%s: this run is on a CPU, whose memory is where everything is already; nothing is moved, and results are the same",
            " and train.".join(offloads),
            extra=ON_EVERY_RANK,
        )
        decided |= dict.fromkeys(offloads, False)
    return train.model_copy(update=decided)


def choose_packing(
    asked: str,
    module: nn.Module,
    world: World,
    *,
    sampling: Sampling,
    pad_id: int,
    others: Mapping[str, Any] | None = None,
) -> Packing:
    """Collective. What was asked for, or of `auto` the fastest that computes what `padded` does, says the model itself.

    `others`: transformers configs of the models that read the same rows (a teacher, a critic), by option; `auto` takes nothing
    that one of them says it cannot do.
    """
    config = cast(Any, module).config
    for mode in BEST_FIRST:
        if asked not in ("auto", mode):
            continue
        if asked != "auto":
            check_packing_supported(config, mode)
        reason = why_not(config, mode) or (_refused_by(others or {}, mode) if asked == "auto" else "")
        reason = reason or _fault(module, world, mode, sampling=sampling, pad_id=pad_id)
        if not reason:
            return mode
        if asked != "auto":
            raise ModelError(f"train.packing: {reason}; use padded, or auto")
        log.warning(
            "train.packing auto: not %s with %s, which takes more time: %s",
            mode,
            config.model_type,
            reason,
            extra=ON_EVERY_RANK,
        )
    raise AssertionError("padded is always possible")


def by_config(train: TrainConfig, module: nn.Module) -> TrainConfig:
    """Not collective. `packing: auto` as far as the model's config decides it: for whoever makes an actor without a recipe."""
    if train.packing != "auto":
        return train
    config = cast(Any, module).config
    return train.model_copy(update={"packing": next(mode for mode in BEST_FIRST if not why_not(config, mode))})


def _refused_by(others: Mapping[str, Any], mode: Packing) -> str:
    found = ((name, why_not(config, mode)) for name, config in others.items())
    return next((f"{name}: {reason}" for name, reason in found if reason), "")


def _fault(module: nn.Module, world: World, mode: Packing, *, sampling: Sampling, pad_id: int) -> str:
    """Collective. All ranks judge by the largest difference that any of them sees."""
    if mode == "padded":
        return ""
    with data_phase(world, "probing the packing"):
        gap = packing_gap(module, mode, sampling=sampling, pad_id=pad_id)
    (worst,) = max_over_ranks([gap if gap == gap else float("inf")], world)
    return packing_fault(module, worst, mode)
