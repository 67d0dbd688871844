"""A `ShardingPlan` and a number of ranks in, exact bytes out: what each rank holds of each tensor under FSDP2 and FSDP1.

Pure functions; the figures equal those of a really sharded model, and tests hold them to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lockstep.sharding.plan import PlannedTensor, ShardingPlan, ShardUnit

Backend = Literal["fsdp1", "fsdp2"]

# FSDP1 with use_orig_params starts every parameter of a flat parameter at a multiple of so many bytes.
_FSDP1_ALIGNMENT = 16


def shard_bytes(plan: ShardingPlan, rank: int, world_size: int, backend: Backend) -> int:
    """Bytes of parameters that a rank holds between steps.

    FSDP2 deals rows of dim 0, ceil(rows / ranks) to each, the last ranks fewer or none. FSDP1 (use_orig_params=True) lays the
    parameters of a unit behind each other and cuts that into equal parts. Integer payloads, which FSDP1 cannot flatten, are
    whole on every rank.
    """
    return sum(unit_shard_bytes(unit, rank, world_size, backend) for unit in plan.units)


def unit_shard_bytes(unit: ShardUnit, rank: int, world_size: int, backend: Backend) -> int:
    """The same for one unit."""
    if backend == "fsdp2":
        return sum(rows_of_rank(tensor, rank, world_size) * _row_bytes(tensor) for tensor in unit.parameters)
    return _flat_bytes(unit, world_size) // world_size + _payload_bytes(unit)


def rows_of_rank(tensor: PlannedTensor, rank: int, world_size: int) -> int:
    """Rows of dim 0 that FSDP2 gives to a rank; a scalar counts as one row."""
    rows = tensor.shape[0] if tensor.shape else 1
    step = -(-rows // world_size)
    return min((rank + 1) * step, rows) - min(rank * step, rows)


def held_numels(unit: ShardUnit, rank: int, world_size: int, backend: Backend) -> list[int]:
    """Elements that a rank holds of each of a unit's parameters, in order."""
    if backend == "fsdp2":
        return [rows_of_rank(tensor, rank, world_size) * _row_numel(tensor) for tensor in unit.parameters]
    shares = []
    for group in _flat_groups(unit):
        shard = _flat_numel(group, world_size) // world_size
        offset = 0
        for tensor in group:
            low, high = max(offset, rank * shard), min(offset + tensor.numel, (rank + 1) * shard)
            shares.append((tensor.name, max(high - low, 0)))
            offset = _aligned(offset + tensor.numel, tensor)
    held = dict(shares)
    # What FSDP1 leaves whole on every rank counts for the first one, so that the ranks' shares add up to the tensor.
    return [held.get(tensor.name, tensor.numel if rank == 0 else 0) for tensor in unit.parameters]


def _row_numel(tensor: PlannedTensor) -> int:
    return tensor.numel // max(tensor.shape[0] if tensor.shape else 1, 1)


def _row_bytes(tensor: PlannedTensor) -> int:
    return _row_numel(tensor) * tensor.dtype.itemsize


def _flat_groups(unit: ShardUnit) -> list[list[PlannedTensor]]:
    """One flat parameter per dtype. FSDP1 refuses a unit of several dtypes; the sum still tells what it would take."""
    groups: dict[str, list[PlannedTensor]] = {}
    for tensor in unit.parameters:
        if tensor.dtype.is_floating_point:
            groups.setdefault(str(tensor.dtype), []).append(tensor)
    return list(groups.values())


def _flat_bytes(unit: ShardUnit, world_size: int) -> int:
    return sum(_flat_numel(group, world_size) * group[0].dtype.itemsize for group in _flat_groups(unit))


def _flat_numel(group: Sequence[PlannedTensor], world_size: int) -> int:
    """Elements of the whole flat parameter: each parameter padded to the alignment, the sum to a multiple of the ranks."""
    total = 0
    for tensor in group:
        total = _aligned(total, tensor) + tensor.numel
    return -(-total // world_size) * world_size


def _aligned(numel: int, tensor: PlannedTensor) -> int:
    step = max(_FSDP1_ALIGNMENT // tensor.dtype.itemsize, 1)
    return -(-numel // step) * step


def _payload_bytes(unit: ShardUnit) -> int:
    return sum(tensor.nbytes for tensor in unit.parameters if not tensor.dtype.is_floating_point)


def gathered_bytes(unit: ShardUnit, world_size: int, backend: Backend) -> int:
    """Bytes of a unit while it is whole on a rank, in memory of its own, its padding included (on one rank too: FSDP2 copies)."""
    if backend == "fsdp2":
        return world_size * unit_shard_bytes(unit, 0, world_size, backend)
    return _flat_bytes(unit, world_size)


def gradient_bytes(unit: ShardUnit, rank: int, world_size: int, backend: Backend) -> int:
    """Bytes of a unit's gradients on a rank, once they are reduced.

    FSDP1's gradient is that of the flat parameter: where one tensor in it is trained, the frozen ones have their share too.
    """
    if backend == "fsdp2":
        trained = (tensor for tensor in unit.parameters if tensor.is_trainable)
        return sum(rows_of_rank(tensor, rank, world_size) * _row_bytes(tensor) for tensor in trained)
    return whole_gradient_bytes(unit, world_size, backend) // world_size


def whole_gradient_bytes(unit: ShardUnit, world_size: int, backend: Backend) -> int:
    """The same before they are reduced: in backward, and between the micro-batches of an update, on every rank."""
    if backend == "fsdp2":
        return sum(tensor.nbytes for tensor in unit.parameters if tensor.is_trainable)
    trains = any(tensor.is_trainable for tensor in unit.parameters)
    return _flat_bytes(unit, world_size) if trains else 0
