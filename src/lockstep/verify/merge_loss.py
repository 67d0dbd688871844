"""A sharded model with an adapter, and the dtype that an engine serves in; how much of the update survives merging into it, out.

dW = scale * B A is the update; round(W + dW) - round(W) is what of it arrives when the merged weight is stored in a coarser dtype.
In bfloat16 a weight has 8 significant bits: an update below 1/512 of the weight is lost entirely, or arrives as a whole step (PEFT
#2502, CASES B32). Early in training nearly all of an update is that small.

Every rank looks at its own elements of W, a window at a time; only the adapter's two factors of one layer are gathered. Nothing
is written. `sync.mode: auto` decides by it, before the first step on the step that the optimizer would make.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from lockstep.dist import data_phase, sum_over_ranks
from lockstep.export.merge import RowsMerge, merge_elements, merged_row_elements
from lockstep.export.merge_plan import plan_merges
from lockstep.export.peft_state import PeftState
from lockstep.model.lora import ADAPTER
from lockstep.rollout.base import Abilities
from lockstep.sharding.base import ShardedModel
from lockstep.verify.swaps import whole

WINDOW_ELEMENTS = 1 << 22
"""Elements of W looked at at a time: about 100 MB beside the factors."""
SMALL_LOSS = 0.02
"""Relative error of the update up to which a merged export counts as the same policy."""


@dataclass(frozen=True, slots=True)
class LayerLoss:
    """One adapted weight, as sums that add; a zero update has neither error nor cosine (NaN)."""

    name: str
    """Live name of W."""
    wanted2: float
    """|dW|^2"""
    lost2: float
    """|survived - dW|^2"""
    survived2: float
    dot: float
    """<survived, dW>"""
    changed: float
    """Elements of W that the update changes at all."""
    count: float

    @property
    def relative_error(self) -> float:
        """|survived - dW| / |dW|: 0 all arrives, 1 nothing does; above 1 there is more rounding than update."""
        return math.sqrt(self.lost2 / self.wanted2) if self.wanted2 else math.nan

    @property
    def cosine(self) -> float:
        """Between what arrives and the update: 0 where nothing arrives."""
        if not self.wanted2:
            return math.nan
        return self.dot / math.sqrt(self.wanted2 * self.survived2) if self.survived2 else 0.0

    @property
    def share_changed(self) -> float:
        return self.changed / self.count if self.count else 0.0

    def __add__(self, other: LayerLoss) -> LayerLoss:
        return LayerLoss(
            self.name,
            self.wanted2 + other.wanted2,
            self.lost2 + other.lost2,
            self.survived2 + other.survived2,
            self.dot + other.dot,
            self.changed + other.changed,
            self.count + other.count,
        )


@dataclass(frozen=True, slots=True)
class MergeLoss:
    """The same on every rank."""

    served: str
    """The engine's dtype, e.g. "bfloat16"."""
    layers: tuple[LayerLoss, ...]
    unmeasured: tuple[str, ...] = ()
    """Modules that PEFT merges whole (convolutions, DoRA and the like)."""

    @property
    def total(self) -> LayerLoss:
        return sum(self.layers, LayerLoss("all", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))

    @property
    def said(self) -> str:
        """In a sentence, for the log."""
        total = self.total
        return (
            f"merging into {self.served} loses {total.relative_error:.2%} of the update (cosine {total.cosine:.3f}, limit "
            f"{SMALL_LOSS:.0%})"
        )

    def lines(self) -> list[str]:
        """A table: the worst layers first."""
        head = f"{'weight':<58} {'|dW|':>9} {'rel. error':>10} {'cosine':>7} {'changed':>8}"
        rows = sorted(self.layers, key=lambda each: -each.relative_error if each.wanted2 else 0.0)
        return [head, *(_line(each) for each in [self.total, *rows])]


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """What `sync.mode: auto` comes to."""

    mode: Literal["adapter", "merged"]
    why: str
    """For the log."""


def measure_merge_loss(sharded: ShardedModel, *, served: torch.dtype, first_step_lr: float | None = None) -> MergeLoss:
    """Collective. Of the active adapter as it is; with `first_step_lr`, if B is 0 throughout, of what one step of Adam makes.

    Adam's first step moves every element of B by lr, up or down (Kingma and Ba, 2015): signs drawn from a seed stand for the
    gradient's. Raises `IncompleteExport` for an adapter that cannot be merged. Cost: about that of one merged export, unsent.
    """
    PeftState(sharded.module, sharded.skeleton).refresh()
    merges = plan_merges(sharded.skeleton, ADAPTER)
    layers = []
    with torch.no_grad(), data_phase(sharded.world, "measuring the merge loss"):
        for merge in merges.rows.values():
            layers.append(_local_loss(sharded, merge, served, first_step_lr))
    flat = [number for each in layers for number in _numbers(each)]
    summed = sum_over_ranks(flat, sharded.world) if flat else []
    size = len(_numbers(layers[0])) if layers else 1
    parts = [summed[start : start + size] for start in range(0, len(summed), size)]
    return MergeLoss(
        str(served).removeprefix("torch."),
        tuple(LayerLoss(each.name, *numbers) for each, numbers in zip(layers, parts, strict=True)),
        tuple(each.module for each in merges.scratch),
    )


def choose_mode(loss: MergeLoss | None, abilities: Abilities) -> ModeChoice:
    """`loss`: None where nothing was measured (no merged update is possible, or none of its layers can be looked at).

    Raises `ValueError` for an engine that takes neither.
    """
    takes_adapter, takes_merged = "adapter" in abilities.kinds, "merged" in abilities.kinds
    if not takes_adapter and not takes_merged:
        raise ValueError(f"the engine takes {sorted(abilities.kinds)}; sync.mode=auto needs adapter or merged updates")
    lost = "" if loss is None or not loss.total.wanted2 else loss.said
    if not takes_merged:
        return ModeChoice("adapter", "the engine takes adapters and no merged weights")
    if not takes_adapter:
        warning = f"; {lost}" if lost else ""
        return ModeChoice("merged", f"the engine takes merged weights and no adapters{warning}")
    if not lost or loss is None:
        return ModeChoice("adapter", "what merging would lose is not known, and an adapter loses nothing")
    if loss.unmeasured:
        return ModeChoice("adapter", f"what merging {loss.unmeasured[0]} would lose is not known")
    if loss.total.relative_error > SMALL_LOSS:
        return ModeChoice("adapter", lost)
    return ModeChoice("merged", f"{lost}, and a merged model generates without the adapter's extra work")


def _line(each: LayerLoss) -> str:
    norm = math.sqrt(each.wanted2)
    return f"{each.name[-58:]:<58} {norm:>9.2e} {each.relative_error:>10.3f} {each.cosine:>7.3f} {each.share_changed:>8.2%}"


def _numbers(each: LayerLoss) -> list[float]:
    return [each.wanted2, each.lost2, each.survived2, each.dot, each.changed, each.count]


def _local_loss(sharded: ShardedModel, merge: RowsMerge, served: torch.dtype, first_step_lr: float | None) -> LayerLoss:
    """Collective: gathers A and B. Of this rank's elements of W."""
    a, b = (whole(sharded, name, sharded.local_flat(name)) for name in (merge.a, merge.b))
    if first_step_lr is not None and not bool(b.any()):
        b = _first_step(b, first_step_lr)
    name = _planned_name(sharded, merge.base)
    base, start = sharded.local_flat(name), sharded.ranges(name)[sharded.world.rank][0]
    if sharded.shard_dim(name):  # ranks hold columns: one of them looks at the whole
        base = whole(sharded, name, base).reshape(-1)[: None if sharded.world.is_main else 0]
        start = 0
    total = LayerLoss(merge.base, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for first, last in _windows(base.numel(), start, merged_row_elements(merge)):
        total += _window_loss(merge, base[first:last], start + first, (a, b), served)
    return total


def _window_loss(
    merge: RowsMerge, base: Tensor, start: int, factors: tuple[Tensor, Tensor], served: torch.dtype
) -> LayerLoss:
    a, b = factors
    exact = replace(merge, base_dtype=torch.float32, lora_dtype=torch.float32)
    wanted = merge_elements(exact, torch.zeros_like(base, dtype=torch.float32), start=start, a=a.float(), b=b.float())
    merged = merge_elements(merge, base, start=start, a=a, b=b).to(served)
    survived = merged.double() - base.to(served).double()
    wanted = wanted.double()
    sums = torch.stack(
        [
            wanted.square().sum(),
            (survived - wanted).square().sum(),
            survived.square().sum(),
            (survived * wanted).sum(),
            survived.count_nonzero().double(),
        ]
    )
    numbers: list[float] = [*sums.tolist(), float(base.numel())]
    return LayerLoss(merge.base, *numbers)


def _windows(numel: int, start: int, row: int) -> Iterator[tuple[int, int]]:
    """Cuts of this rank's elements at whole rows of W, so that no row of the delta is computed twice."""
    step = max(WINDOW_ELEMENTS // row, 1) * row
    edges: list[int] = [0, *range(step - start % row, numel, step), numel]
    for first, last in pairwise(edges):
        if last > first:
            yield first, last


def _first_step(b: Tensor, lr: float) -> Tensor:
    signs = torch.randint(0, 2, b.shape, generator=torch.Generator().manual_seed(b.numel()))
    return (signs.to(b.device) * 2 - 1).to(b.dtype) * lr


def _planned_name(sharded: ShardedModel, live: str) -> str:
    names: Sequence[str] = [tensor.name for tensor in sharded.plan.parameters if live in (tensor.name, *tensor.aliases)]
    return names[0]
