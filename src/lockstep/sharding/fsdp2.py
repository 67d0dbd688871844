"""A model and its plan in, the model sharded by PyTorch's `fully_shard` (DTensor) out; also models that somebody else sharded.

The placements relied on: at most one mesh axis deals a tensor out (`Shard(d)`, as `torch.chunk` deals rows: ceil(rows / ranks)
to each, the last ones fewer or none), every other axis holds copies (`Replicate`, HSDP). What is no DTensor is whole on
every rank. Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from lockstep.dist import World, agree
from lockstep.errors import ModelError
from lockstep.sharding.base import Ranges
from lockstep.sharding.live import LiveModel, LiveSlot, parameter_slots, plan_of, set_sync, unit_names
from lockstep.sharding.plan import ShardingPlan
from lockstep.sharding.skeleton import Slot, skeleton


@dataclass(slots=True)
class RowShard:
    """A `Holding`: a DTensor, or a plain parameter that is whole on every rank."""

    slots: list[LiveSlot]
    """All of them: more than one where weights are tied."""
    trained: nn.Parameter
    ranges: Ranges
    dim: int
    is_owner: bool
    """Is this rank's copy the one that counts? Others hold the same elements, and their range is empty."""
    fill_device: torch.device
    """Where a parameter that is on meta gets its memory."""

    @property
    def layout(self) -> str:
        if not isinstance(self.trained, DTensor):
            return "whole"
        return f"{tuple(self.trained.placements)} on mesh {self.trained.device_mesh.mesh.tolist()}"

    def read(self) -> torch.Tensor:
        if not self.is_owner:
            return self._local().reshape(-1)[:0]
        local = self._local()
        return (local.movedim(self.dim, 0) if self.dim else local).reshape(-1)

    def write(self, values: torch.Tensor) -> None:
        local = self._local()
        if local.is_meta:
            local = torch.empty_like(local, device=self.fill_device)
            self._replace(local)
        if not self.is_owner:
            return
        moved = local.movedim(self.dim, 0) if self.dim else local
        moved.copy_(values.reshape(moved.shape))

    def is_current(self) -> bool:
        return all(live._parameters.get(attr) is self.trained for live, attr in self.slots)

    def _local(self) -> torch.Tensor:
        # The sharded parameter keeps its part also while FSDP2 shows the whole tensor in its slot.
        return self.trained.to_local().detach() if isinstance(self.trained, DTensor) else self.trained.detach()

    def _replace(self, local: torch.Tensor) -> None:
        """One Parameter under all its names: tied weights stay tied. FSDP2 picks it up before its first forward."""
        old = self.trained
        whole = (
            DTensor.from_local(
                local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
            )
            if isinstance(old, DTensor)
            else local
        )
        self.trained = nn.Parameter(whole, requires_grad=old.requires_grad)
        for live, attr in self.slots:
            live._parameters[attr] = self.trained


class FSDP2Model(LiveModel):
    """`ShardedModel` over `fully_shard`; also over DDP and over a model that is not wrapped at all (everything is whole)."""

    def __init__(
        self,
        module: nn.Module,
        world: World,
        *,
        plan: ShardingPlan | None = None,
        fill_device: torch.device | None = None,
    ):
        """Not collective. Without `plan`, the units are the modules that `fully_shard` was called on.

        Raises `ModelError` naming a parameter whose placement is not supported.
        """
        self._units = [each for each in module.modules() if isinstance(each, FSDPModule)]
        self.module = module
        self.settle()
        held = row_shards(module, world, fill_device=fill_device or world.device)
        plain = skeleton(module, whole_shapes(held))
        plan = plan or plan_of(plain, unit_names(module, FSDPModule))
        super().__init__(module, plain, plan, world, {tensor.name: held[tensor.name] for tensor in plan.parameters})

    def set_gradient_sync(self, on: bool) -> None:
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(on)
        else:
            set_sync(self.module, on)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Collective."""
        norm = nn.utils.clip_grad_norm_([param for _, param in self.trainable()], max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def settle(self) -> None:
        # After a forward without backward FSDP2 keeps the root gathered: its parameters are then plain tensors (pytorch#131965).
        for unit in self._units:
            unit.reshard()

    def is_current(self) -> bool:
        if super().is_current():
            return True
        self.settle()
        return super().is_current()


def shard_fsdp2(module: nn.Module, plan: ShardingPlan, world: World, *, reshard_after_forward: bool) -> FSDP2Model:
    """Collective. Wrap each unit of the plan, the root last, after all ranks have agreed on the plan. Meta parameters stay meta."""
    agree(world, phase="sharding plan", fingerprint=plan.fingerprint(), describe=plan.lines)
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp_shard",))
    # Submodules before what contains them: fully_shard gives a module's parameters to the first call that covers them.
    for unit in sorted(plan.units, key=lambda unit: -unit.module.count(".") if unit.module else 1):
        target = module.get_submodule(unit.module) if unit.module else module
        fully_shard(target, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return FSDP2Model(module, world, plan=plan)


def row_shards(module: nn.Module, world: World, *, fill_device: torch.device) -> dict[str, RowShard]:
    """How every registered parameter is held, by clean name (tied names share one). The model must be settled."""
    by_param: dict[int, RowShard] = {}
    out: dict[str, RowShard] = {}
    for name, (live, attr) in parameter_slots(module):
        param = cast(nn.Parameter, live._parameters[attr])
        if id(param) not in by_param:
            ranges, dim, is_owner = _layout(name, param, world)
            by_param[id(param)] = RowShard([], param, ranges, dim, is_owner, fill_device)
        held = out[name] = by_param[id(param)]
        if not any(live is other and attr == slot for other, slot in held.slots):
            held.slots.append((live, attr))
    return out


def whole_shapes(held: Mapping[str, RowShard]) -> dict[Slot, nn.Parameter]:
    """For the skeleton: a meta parameter of the whole shape for the slots of every DTensor."""
    out: dict[Slot, nn.Parameter] = {}
    for each in {id(shard): shard for shard in held.values()}.values():
        param = each.trained
        if isinstance(param, DTensor):
            empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
            whole = nn.Parameter(empty, requires_grad=param.requires_grad)
            out.update({(id(live), attr): whole for live, attr in each.slots})
    return out


def _layout(name: str, param: torch.Tensor, world: World) -> tuple[Ranges, int, bool]:
    """(ranges, dimension dealt out, is this rank's copy the one that counts)."""
    if not isinstance(param, DTensor):
        return whole_ranges(param.numel(), world.size), 0, world.is_main
    dim, holders = _holders(name, param, world)
    if len(holders) == 1:
        return whole_ranges(param.numel(), world.size), 0, world.is_main
    dealt = row_ranges(param.shape[dim], param.numel() // max(param.shape[dim], 1), len(holders))
    ranges: list[tuple[int, int]] = []
    for rank in range(world.size):
        last = ranges[-1][1] if ranges else 0
        ranges.append(dealt[holders.index(rank)] if rank in holders else (last, last))
    return tuple(ranges), dim, world.rank in holders


def _holders(name: str, param: DTensor, world: World) -> tuple[int, list[int]]:
    """(dimension dealt out, ranks of the first replica in the order of the mesh). One rank: every rank holds all of it."""
    mesh = param.device_mesh
    axes = [axis for axis, placement in enumerate(param.placements) if type(placement) is Shard]
    others = [placement for placement in param.placements if type(placement) not in (Shard, Replicate)]
    if others or len(axes) > 1:
        raise ModelError(
            f"{name}: placements {tuple(param.placements)} on mesh {mesh.mesh.tolist()}; lockstep reads tensors that one axis "
            "deals out (Shard) and the others copy (Replicate). Tensor parallelism over it is not supported"
        )
    if not axes:
        return 0, [0]
    ranks = [world.rank_of(rank) for rank in _first_replica(mesh, axes[0])]
    if ranks != sorted(ranks):
        raise ModelError(
            f"{name}: the mesh {mesh.mesh.tolist()} deals rows to ranks {ranks}; lockstep needs them ascending: "
            "make the mesh with ascending ranks (init_device_mesh does)"
        )
    return cast(Any, param.placements[axes[0]]).dim, ranks


def _first_replica(mesh: DeviceMesh, axis: int) -> list[int]:
    rows = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.mesh.shape[axis])
    return rows[0].tolist()


def row_ranges(rows: int, row_numel: int, size: int) -> Ranges:
    """Elements of each rank when `rows` are dealt as `torch.chunk` deals them."""
    step = -(-rows // size)
    bounds = [min(rank * step, rows) for rank in range(size + 1)]
    return tuple((bounds[rank] * row_numel, bounds[rank + 1] * row_numel) for rank in range(size))


def whole_ranges(numel: int, size: int) -> Ranges:
    """Every rank holds everything: the first one's counts."""
    return ((0, numel), *[(numel, numel)] * (size - 1))
