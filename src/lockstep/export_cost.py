"""A `ShardingPlan` and a number of ranks in, what each kind of export would move and hold out. Pure.

Counted is payload: each rank sends what it holds of every tensor, in the wire dtype, and nothing twice; padding of unequal
parts (less than a row of each tensor) is left out. A merged export also moves LoRA factors, in their own dtype: where a rank
holds the same rows of W and B (linear layers on FSDP2) only A, to every rank; else A and B.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from lockstep.model.lora import lora_layers
from lockstep.names import clean_name, is_adapter_name
from lockstep.sharding.plan import PlannedTensor, ShardingPlan
from lockstep.sharding.sizes import Backend, held_numels

Kind = Literal["adapter", "merged", "full"]
_Held = tuple[PlannedTensor, tuple[int, ...]]
"""A tensor, and the elements of it that each rank holds."""


@dataclass(frozen=True, slots=True)
class ExportCost:
    """One kind of export to one kind of destination."""

    kind: Kind
    to: Literal["all", "rank 0"]
    num_tensors: int
    nbytes: int
    """Of the exported tensors, in the wire dtype."""
    received_max: int
    """Bytes that the rank which receives most gets from others."""
    received_total: int
    """The same, summed over ranks."""
    num_collectives: int
    """One per bucket, factors included; the agreement before the first is not counted."""
    extra_bytes: int
    """Most bytes gathered at a time on a receiving rank: a bucket and the largest tensor; on FSDP1 a bucket and the largest unit."""


@dataclass(frozen=True, slots=True)
class _Load:
    """Tensors that travel together, in bytes on the wire."""

    num_tensors: int
    nbytes: int
    largest: int
    """Of one tensor, whole."""
    shares: tuple[int, ...]
    """What each rank holds of them; they add up to `nbytes`."""

    def received(self, *, only_first: bool) -> list[int]:
        """What each rank gets from the others."""
        return [0 if only_first and rank else self.nbytes - own for rank, own in enumerate(self.shares)]


def merged_by_rows(model: nn.Module) -> frozenset[str]:
    """Clean names of the LoRA layers whose W and B have the same rows: PEFT layers over `nn.Linear`."""
    return frozenset(
        clean_name(name) for name, layer in lora_layers(model) if isinstance(layer.get_base_layer(), nn.Linear)
    )


def export_costs(
    plan: ShardingPlan,
    *,
    world_size: int,
    backend: Backend,
    bucket_bytes: int,
    wire_dtype: torch.dtype | None,
    by_rows: Collection[str],
) -> tuple[ExportCost, ...]:
    """Adapter and merged (where there is an adapter) and full, each to all ranks and to rank 0."""

    held = _held(plan, world_size, backend)

    def load(which: Callable[[PlannedTensor], bool], dtype: torch.dtype | None) -> _Load:
        return _load([entry for entry in held if which(entry[0])], dtype, world_size)

    def travels(tensor: PlannedTensor) -> bool:
        return is_adapter_name(tensor.name) and not (backend == "fsdp2" and _stays(tensor.name, by_rows))

    adapter = load(lambda tensor: is_adapter_name(tensor.name), wire_dtype)
    base = load(lambda tensor: not is_adapter_name(tensor.name), wire_dtype)
    nothing = load(lambda tensor: False, None)
    kinds: list[tuple[Kind, _Load, _Load]] = [("full", base, nothing)]
    if adapter.num_tensors:
        kinds = [("adapter", adapter, nothing), ("merged", base, load(travels, None)), *kinds]
    return tuple(
        _cost(
            kind, to, weights, factors, bucket_bytes, plan.largest_unit_bytes if backend == "fsdp1" else weights.largest
        )
        for kind, weights, factors in kinds
        for to in ("all", "rank 0")
    )


def _stays(name: str, by_rows: Collection[str]) -> bool:
    """Is it a B (or DoRA's magnitude), which has the rows of its W, of a layer that is merged by rows?"""
    parts = name.split(".")
    places = [parts.index(part) for part in ("lora_B", "lora_magnitude_vector") if part in parts]
    return bool(places) and ".".join(parts[: places[0]]) in by_rows


def _held(plan: ShardingPlan, world_size: int, backend: Backend) -> list[_Held]:
    out: list[_Held] = []
    for unit in plan.units:
        by_rank = [held_numels(unit, rank, world_size, backend) for rank in range(world_size)]
        out += zip(unit.parameters, zip(*by_rank, strict=True), strict=True)
    return out


def _load(held: Sequence[_Held], dtype: torch.dtype | None, world_size: int) -> _Load:
    """`dtype` is what floats travel in; None: their own."""
    shares = [0] * world_size
    sizes = []
    for tensor, numels in held:
        itemsize = (dtype if dtype and tensor.dtype.is_floating_point else tensor.dtype).itemsize
        sizes.append(tensor.numel * itemsize)
        shares = [share + numel * itemsize for share, numel in zip(shares, numels, strict=True)]
    return _Load(len(sizes), sum(sizes), max(sizes, default=0), tuple(shares))


def _cost(
    kind: Kind, to: Literal["all", "rank 0"], weights: _Load, factors: _Load, bucket_bytes: int, besides: int
) -> ExportCost:
    # A's are needed on every rank that merges rows, also when only rank 0 receives the result.
    received = [
        sum(each)
        for each in zip(weights.received(only_first=to == "rank 0"), factors.received(only_first=False), strict=True)
    ]
    return ExportCost(
        kind=kind,
        to=to,
        num_tensors=weights.num_tensors,
        nbytes=weights.nbytes,
        received_max=max(received),
        received_total=sum(received),
        num_collectives=sum(-(-each.nbytes // bucket_bytes) for each in (weights, factors)),
        extra_bytes=min(bucket_bytes, weights.nbytes) + besides,
    )
