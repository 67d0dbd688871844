"""A model and its plan in, the model sharded by PyTorch's `fully_shard` (DTensor) out; also models that somebody else sharded.

The placements relied on: at most one mesh axis deals a tensor out (`Shard(d)`, as `torch.chunk` deals rows: ceil(rows / ranks)
to each, the last ones fewer or none), every other axis holds copies (`Replicate`, HSDP). What is no DTensor is whole on
every rank. Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from lockstep.dist import World, agree
from lockstep.errors import ModelError
from lockstep.sharding.base import Ranges
from lockstep.sharding.live import LiveModel, LiveSlot, outermost, parameter_slots, plan_of, set_sync, unit_names
from lockstep.sharding.plan import ShardingPlan
from lockstep.sharding.precision import Precision
from lockstep.sharding.skeleton import Slot, skeleton


@dataclass(slots=True)
class RowShard:
    """A `Holding`: a DTensor, or a plain parameter that is whole on every rank."""

    slots: list[LiveSlot]
    """All of them: more than one where weights are tied."""
    trained: nn.Parameter
    ranges: Ranges
    dim: int
    mirrors: tuple[int, ...]
    is_owner: bool
    fill_device: torch.device
    """Where a parameter that is on meta gets its memory."""
    _dtype: torch.dtype = field(init=False)
    """This and `_shape`: of the whole tensor when the plan was made. `Module.to` and `.data =` change them and leave the object."""
    _shape: torch.Size = field(init=False)

    def __post_init__(self) -> None:
        self._dtype, self._shape = self.trained.dtype, self.trained.shape

    @property
    def layout(self) -> str:
        if not isinstance(self.trained, DTensor):
            return "whole"
        return f"{tuple(self.trained.placements)} on mesh {self.trained.device_mesh.mesh.tolist()}"

    def read(self) -> torch.Tensor:
        local = self._local()
        return (local.movedim(self.dim, 0) if self.dim else local).reshape(-1)

    def write(self, values: torch.Tensor) -> None:
        local = self._local()
        moved = local.movedim(self.dim, 0) if self.dim else local
        moved.copy_(values.reshape(moved.shape))

    def give_memory(self) -> None:
        local = self._local()
        if local.is_meta:
            self._replace(torch.empty_like(local, device=self.fill_device))

    def is_current(self) -> bool:
        # Asked of every parameter before every export: no generator, no tuple.
        param = self.trained
        for live, attr in self.slots:
            if live._parameters.get(attr) is not param:
                return False
        return param.dtype is self._dtype and param.shape == self._shape

    def _local(self) -> torch.Tensor:
        # The sharded parameter keeps its part also while FSDP2 shows the whole tensor in its slot. `to_local()` would make a view that
        # autograd knows of, hundreds of times in an export.
        return (self.trained._local_tensor if isinstance(self.trained, DTensor) else self.trained).detach()

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

    evens_out: Literal["tensor", "unit"] = "tensor"

    def __init__(
        self,
        module: nn.Module,
        world: World,
        *,
        plan: ShardingPlan | None = None,
        fill_device: torch.device | None = None,
        keeps_gathered: bool = False,
    ):
        """Not collective. Without `plan`, the units are the modules that `fully_shard` was called on. `keeps_gathered`: what a
        forward has gathered stays so until the last micro-batch's backward, as fully_shard's reshard_after_forward=False asks for
        one forward and backward; otherwise every micro-batch gathers the frozen base again.

        Raises `ModelError` naming a parameter whose placement is not supported.
        """
        self._units = [each for each in module.modules() if isinstance(each, FSDPModule)]
        self._keeps_gathered = keeps_gathered
        self.module = module
        self.settle()
        held = row_shards(module, world, fill_device=fill_device or world.device)
        plain = skeleton(module, whole_shapes(held))
        plan = plan or plan_of(plain, unit_names(module, FSDPModule))
        super().__init__(module, plain, plan, world, {tensor.name: held[tensor.name] for tensor in plan.parameters})

    def _cast_to(self) -> Iterator[torch.dtype | None]:
        return (unit._get_fsdp_state()._mp_policy.param_dtype for unit in self._units)

    def set_gradient_sync(self, on: bool) -> None:
        for unit in self._units:
            unit.set_requires_gradient_sync(on, recurse=False)
            if self._keeps_gathered:
                unit.set_reshard_after_backward(on, recurse=False)
        set_sync(self.module, on)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Collective."""
        if not all(isinstance(param, DTensor) for _, param in self.trainable()):
            return super().clip_grad_norm(max_norm)  # torch does not add a DTensor's norm to a whole tensor's
        norm = nn.utils.clip_grad_norm_([param for _, param in self.trainable()], max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def settle(self) -> None:
        # After a forward without backward FSDP2 keeps the root gathered: its parameters are then plain tensors (pytorch#131965).
        for unit in self._units:
            unit.reshard()

    @contextmanager
    def gathered(self, part: nn.Module) -> Iterator[None]:
        """Collective, unless the last forward left it gathered; all units are shards afterwards."""
        for unit in self._holders(part):
            if isinstance(unit, FSDPModule):
                unit.unshard()
        try:
            yield
        finally:
            self.settle()

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        # PEFT switches `requires_grad` of whatever stands in the slots. Units that stay gathered after a forward would be switched
        # off as shards and on again as whole tensors: the shards would never train again.
        self.settle()
        with super().adapter_off():
            try:
                yield
            finally:
                self.settle()

    def is_current(self) -> bool:
        if super().is_current():
            return True
        self.settle()
        return super().is_current()


def shard_fsdp2(module: nn.Module, plan: ShardingPlan, world: World, *, reshard_after_forward: bool) -> FSDP2Model:
    """Collective. Wrap each unit of the plan, the root last, after all ranks have agreed on the plan. Meta parameters stay meta."""
    agree(world, phase="sharding plan", fingerprint=plan.fingerprint(), describe=plan.lines)
    # Submodules before what contains them: fully_shard gives a module's parameters to the first call that covers them.
    units = sorted((unit.module for unit in plan.units), key=lambda name: -name.count(".") if name else 1)
    return wrap_fsdp2(module, units, world, reshard_after_forward=reshard_after_forward)


def wrap_fsdp2(
    module: nn.Module,
    units: Sequence[str],
    world: World,
    *,
    mesh: DeviceMesh | None = None,
    precision: Precision | None = None,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> FSDP2Model:
    """Collective (it may make a mesh). Wrap these modules (clean names), in this order; the root is the empty name."""
    if mesh is None:
        mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp_shard",))
    places = outermost(module)
    precision = precision or Precision()
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            output_dtype=precision.output_dtype,
            cast_forward_inputs=precision.cast_forward_inputs,
        ),
    }
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")
    for name in units:
        parent, key = places[name][0] if name else (module, "")
        fully_shard(cast(nn.Module, parent._modules[key]) if name else module, **options)
    fill_device = torch.device("cpu") if cpu_offload else world.device
    return FSDP2Model(module, world, fill_device=fill_device, keeps_gathered=not reshard_after_forward)


def is_wrapped_by_fsdp2(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def row_shards(module: nn.Module, world: World, *, fill_device: torch.device) -> dict[str, RowShard]:
    """How every registered parameter is held, by clean name (tied names share one). The model must be settled."""
    by_param: dict[int, RowShard] = {}
    out: dict[str, RowShard] = {}
    for name, (live, attr) in parameter_slots(module):
        param = cast(nn.Parameter, live._parameters[attr])
        if id(param) not in by_param:
            ranges, dim, mirrors = _layout(name, param, world)
            is_owner = mirrors[world.rank] == world.rank
            by_param[id(param)] = RowShard([], param, ranges, dim, mirrors, is_owner, fill_device)
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


def _layout(name: str, param: torch.Tensor, world: World) -> tuple[Ranges, int, tuple[int, ...]]:
    """(ranges, dimension dealt out, for each rank whose elements it holds)."""
    rows = _rows(name, param, world) if isinstance(param, DTensor) else None
    if rows is None:
        return whole_ranges(param.numel(), world.size), 0, (0,) * world.size
    dim, table = rows
    holders = table[0]
    dealt = row_ranges(param.shape[dim], param.numel() // max(param.shape[dim], 1), len(holders))
    mirrors = {rank: holders[position] for row in table for position, rank in enumerate(row)}
    return spread(dealt, holders, world.size), dim, tuple(mirrors[rank] for rank in range(world.size))


def _rows(name: str, param: DTensor, world: World) -> tuple[int, list[list[int]]] | None:
    """(dimension dealt out, the world's ranks: a row for each replica, in the order of the parts). None: all of it everywhere."""
    mesh = param.device_mesh
    here = sorted(mesh.mesh.flatten().tolist())
    if here != (list(world.ranks) if world.ranks else list(range(world.size))):
        raise ModelError(
            f"{name} is spread over the ranks {here}, other parameters over others: lockstep needs one mesh for the whole model"
        )
    axes = [axis for axis, placement in enumerate(param.placements) if type(placement) is Shard]
    others = [placement for placement in param.placements if type(placement) not in (Shard, Replicate)]
    if others or len(axes) > 1:
        raise ModelError(
            f"{name}: placements {tuple(param.placements)} on mesh {mesh.mesh.tolist()}; lockstep reads tensors that one axis "
            "deals out (Shard) and the others copy (Replicate). Tensor parallelism over it is not supported"
        )
    if not axes or mesh.mesh.shape[axes[0]] == 1:
        return None
    table = mesh.mesh.movedim(axes[0], -1).reshape(-1, mesh.mesh.shape[axes[0]]).tolist()
    rows = [[world.rank_of(rank) for rank in row] for row in table]
    if rows[0] != sorted(rows[0]):
        raise ModelError(
            f"{name}: the mesh {mesh.mesh.tolist()} deals rows to ranks {rows[0]}; lockstep needs them ascending: "
            "make the mesh with ascending ranks (init_device_mesh does)"
        )
    return cast(Any, param.placements[axes[0]]).dim, rows


def row_ranges(rows: int, row_numel: int, size: int) -> Ranges:
    """Elements of each rank when `rows` are dealt as `torch.chunk` deals them."""
    step = -(-rows // size)
    bounds = [min(rank * step, rows) for rank in range(size + 1)]
    return tuple((bounds[rank] * row_numel, bounds[rank + 1] * row_numel) for rank in range(size))


def spread(dealt: Ranges, holders: Sequence[int], size: int) -> Ranges:
    """The ranges of all ranks, when these (ascending) have the dealt parts and the others' copies do not count."""
    ranges: list[tuple[int, int]] = []
    for rank in range(size):
        last = ranges[-1][1] if ranges else 0
        ranges.append(dealt[holders.index(rank)] if rank in holders else (last, last))
    return tuple(ranges)


def whole_ranges(numel: int, size: int) -> Ranges:
    """Every rank holds everything: the first one's counts."""
    return ((0, numel), *[(numel, numel)] * (size - 1))
