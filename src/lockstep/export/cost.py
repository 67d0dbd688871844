"""A model on meta, its `ShardingPlan` and a number of ranks in; what each kind of export would move and hold, out. Pure.

The figures come from the very plan that an export would run (`plan_export`), made for a model that no rank holds: which layers
are merged where, which factors go ahead, in how many exchanges. Counted is payload: the alignment of small tensors in a packed
part (below 16 bytes each) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, cast

import torch
from torch import nn

from lockstep.dist import World
from lockstep.errors import IncompleteExport
from lockstep.export.courier import part_limit
from lockstep.export.plan import plan_export
from lockstep.export.schedule import num_windows
from lockstep.export.what import AdapterExport, Export, ExportPlan, FullExport, MergedExport
from lockstep.sharding.base import Ranges, ShardedModel
from lockstep.sharding.plan import ShardingPlan
from lockstep.sharding.sizes import Backend, held_numels
from lockstep.types import WeightKind


@dataclass(frozen=True, slots=True)
class ExportCost:
    """One kind of export to one kind of destination."""

    kind: WeightKind
    to: Literal["all", "rank 0"]
    num_tensors: int = 0
    nbytes: int = 0
    """Of the exported tensors, in the wire dtype."""
    received_max: int = 0
    """Bytes that the rank which receives most gets from others."""
    received_total: int = 0
    """The same, summed over ranks."""
    num_exchanges: int = 0
    """Factors included; the agreement before the first is not counted."""
    extra_bytes: int = 0
    """Most bytes held at a time on a receiving rank: a bucket and what is put together meanwhile (the largest tensor; on FSDP1
    the largest unit)."""
    refused: str = ""
    """Why this export cannot be; everything else is then 0."""


class PlannedModel:
    """As much of a `ShardedModel` as planning an export asks for, of a model that exists on meta only."""

    def __init__(self, model: nn.Module, plan: ShardingPlan, *, world_size: int, backend: Backend):
        self.module = self.skeleton = model
        self.plan = plan
        self.world = World(size=world_size)
        self.evens_out: Literal["tensor", "unit"] = "tensor" if backend == "fsdp2" else "unit"
        self._ranges: dict[str, Ranges] = {}
        for unit in plan.units:
            by_rank = [held_numels(unit, rank, world_size, backend) for rank in range(world_size)]
            for tensor, numels in zip(unit.parameters, zip(*by_rank, strict=True), strict=True):
                self._ranges[tensor.name] = _cumulative(numels)

    def ranges(self, name: str) -> Ranges:
        return self._ranges[name]

    def shard_dim(self, name: str) -> int:
        return 0

    def is_current(self) -> bool:
        return True

    def unfilled(self) -> list[str]:
        """Values are never asked for."""
        return []


def export_costs(
    model: nn.Module,
    plan: ShardingPlan,
    *,
    world_size: int,
    backend: Backend,
    bucket_bytes: int,
    wire_dtype: torch.dtype | None,
) -> tuple[ExportCost, ...]:
    """Adapter and merged (where there is an adapter) and full, each to all ranks and to rank 0. `model` is on meta."""
    planned = cast(ShardedModel, PlannedModel(model, plan, world_size=world_size, backend=backend))
    kinds: list[tuple[WeightKind, Export]] = [("full", FullExport())]
    if getattr(model, "peft_config", None):
        kinds = [("adapter", AdapterExport()), ("merged", MergedExport()), *kinds]
    costs = []
    for kind, what in kinds:
        try:
            made = plan_export(planned, what, bucket_bytes=bucket_bytes, dtype=wire_dtype)
        except IncompleteExport as error:
            costs += [ExportCost(kind, to, refused=str(error)) for to in ("all", "rank 0")]
            continue
        costs += [_cost(made, to, planned) for to in ("all", "rank 0")]
    return tuple(costs)


def _cost(plan: ExportPlan, to: Literal["all", "rank 0"], planned: ShardedModel) -> ExportCost:
    size = planned.world.size
    groups = [[t for place in places for t in plan.deliveries[place].travels] for places in plan.groups]
    factors = [list(batch.travels) for batch in plan.factors]
    weights = _held(plan, [travel for group in groups for travel in group], size)
    ahead = _held(plan, [travel for batch in factors for travel in batch], size)
    # Factors are needed on every rank that merges rows, also when only rank 0 receives the result.
    received = [
        (sum(weights) - weights[rank] if to == "all" or rank == 0 else 0) + sum(ahead) - ahead[rank]
        for rank in range(size)
    ]
    meanwhile = groups if planned.evens_out == "unit" else [list(each.travels) for each in plan.deliveries]
    return ExportCost(
        kind=plan.kind,
        to=to,
        num_tensors=len(plan.specs),
        nbytes=plan.nbytes,
        received_max=max(received),
        received_total=sum(received),
        num_exchanges=sum(
            num_windows(travels, plan.extents, part_bytes=part_limit(plan, travels, size))
            for travels in groups + factors
        ),
        extra_bytes=min(plan.bucket_bytes, plan.nbytes)
        + max((sum(_held(plan, each, size)) for each in meanwhile), default=0),
    )


def _held(plan: ExportPlan, travels: Sequence[int], size: int) -> list[int]:
    """Bytes on the wire that each rank holds of some travels."""
    held = [0] * size
    for travel in travels:
        extent = plan.extents[travel]
        for rank, (start, stop) in enumerate(extent.ranges):
            held[rank] += (stop - start) * extent.itemsize
    return held


def _cumulative(numels: Sequence[int]) -> Ranges:
    return tuple(pairwise(accumulate(numels, initial=0)))
