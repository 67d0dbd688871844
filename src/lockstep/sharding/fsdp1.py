"""A model that PyTorch's FSDP1 (`FullyShardedDataParallel`) wraps in; `ShardedModel` over its flat parameters out.

Nothing is ever un-sharded: this rank's part of each flat parameter is read where FSDP1 keeps it, and every rank's ranges
follow from the flat parameter's own account of what it flattened.

*flat parameter* all parameters of one unit in a row, with padding between them (`use_orig_params=True`) and behind them, cut
into one equal part per rank; *part* what one rank has of it.

Private attributes relied on (alike in torch 2.6, 2.9 and 2.13): of a wrapper `_handle`, `_inter_node_pg`, `_sync_gradients`; of a
handle `flat_param`, `process_group`, `uses_sharded_strategy`, `_use_orig_params`, `_fwd_bwd_param_dtype`; of a flat parameter
`_local_shard` (from the first forward on), `_sharded_size`, `_shapes`, `_contiguities`, `_fqns`, `_param_infos`,
`_shared_param_infos`, `_numels_with_padding`, `_is_padding_mask`, `_param_extensions`, `_params`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from lockstep.dist import World
from lockstep.errors import ModelError
from lockstep.sharding.base import Ranges
from lockstep.sharding.fsdp2 import row_shards, spread, whole_ranges, whole_shapes
from lockstep.sharding.live import Holding, LiveModel, LiveSlot, outermost, parameter_slots, plan_of, unit_names
from lockstep.sharding.plan import ShardingPlan, ShardUnit
from lockstep.sharding.precision import Precision
from lockstep.sharding.skeleton import Slot, skeleton, walk

DRIFTING = (
    "torch turns FSDP1's HYBRID_SHARD over one rank into NO_SHARD and then divides gradients by the number of replicas without "
    "adding them up (seen in torch 2.13), so replicas would drift apart: shard over more ranks, or use NO_SHARD, DDP or FSDP2"
)


@dataclass(slots=True)
class FlatShard:
    """A `Holding`: one of the tensors in a flat parameter."""

    wrapper: FullyShardedDataParallel
    flat: Any
    """The wrapper's flat parameter."""
    index: int
    """Which of the flat parameter's tensors it is, padding not counted."""
    ranges: Ranges
    part: slice
    """Where this rank's elements lie in its part of the flat parameter."""
    mirrors: tuple[int, ...]
    is_owner: bool
    dtype: torch.dtype
    """In full precision."""
    dim: int = 0

    @property
    def layout(self) -> str:
        kind = "original parameters kept" if self._keeps_originals else "originals replaced"
        return f"FSDP1 flat parameter of {len(self.flat._shapes)} tensors, part of {self.flat._sharded_size.numel()}, {kind}"

    @property
    def trained(self) -> nn.Parameter:
        return self.flat._params[self.index] if self._keeps_originals else self.flat

    @property
    def _keeps_originals(self) -> bool:
        return cast(Any, self.wrapper)._handle._use_orig_params

    def read(self) -> torch.Tensor:
        return local_part(self.flat)[self.part]

    def write(self, values: torch.Tensor) -> None:
        self.read().copy_(values)

    def give_memory(self) -> None:
        """Flat parameters have theirs."""

    def is_current(self) -> bool:
        handle = cast(Any, self.wrapper)._handle
        if handle is None or handle.flat_param is not self.flat:
            return False
        # A gathered flat parameter may show the dtype that is computed in.
        kept = self.flat._local_shard if hasattr(self.flat, "_local_shard") else self.flat
        if kept.dtype is not self.dtype or self.flat.dtype not in (self.dtype, handle._fwd_bwd_param_dtype):
            return False
        if not handle._use_orig_params:
            return True
        info = self.flat._param_infos[self.index]
        now = info.module._parameters.get(info.param_name)
        # During forward and backward FSDP1 hangs plain views of the gathered parameter there.
        return now is self.flat._params[self.index] or not isinstance(now, nn.Parameter)


class FSDP1Model(LiveModel):
    """`ShardedModel` over FSDP1, whoever wrapped the model: any sharding strategy, original parameters kept or not."""

    evens_out: Literal["tensor", "unit"] = "unit"
    _casts_buffers = True  # to MixedPrecision's buffer_dtype, before the first forward

    def __init__(
        self, module: nn.Module, world: World, *, plan: ShardingPlan | None = None, empty: Collection[str] = ()
    ):
        """Not collective. Without `plan`, the units are the wrapped modules. Raises `ModelError` naming what is not supported.

        `empty`: names of parameters that have memory and no values, which nothing here could see.
        """
        self._wrappers = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        held: dict[Slot, FlatShard] = {}
        whole: dict[Slot, nn.Parameter] = {}
        for wrapper in self._wrappers:
            if cast(Any, wrapper)._handle is not None:
                _read_flat(wrapper, world, held, whole)
        # What FSDP1 was told to ignore is whole on every rank. Its kept originals hang in slots too, and are in `held`.
        plain = {
            name: shard
            for name, shard in row_shards(module, world, fill_device=world.device).items()
            if not any((id(live), attr) in held for live, attr in shard.slots)
        }
        copy = skeleton(module, whole | whole_shapes(plain))
        plan = plan or plan_of(copy, unit_names(module, FullyShardedDataParallel))
        lives = dict(walk(module))
        holdings: dict[str, Holding] = {}
        for tensor in plan.parameters:
            path, _, attr = tensor.name.rpartition(".")
            flat = held.get((id(lives[path]), attr))
            if flat is None and tensor.name not in plain:
                raise ModelError(
                    f"{tensor.name} is shared by modules of two FSDP1 units, and only one of them gathers it: put both into one unit, "
                    "or untie them"
                )
            holdings[tensor.name] = plain[tensor.name] if flat is None else flat
        super().__init__(module, copy, plan, world, holdings, empty=empty)

    @contextmanager
    def gathered(self, part: nn.Module) -> Iterator[None]:
        """Collective. After a forward without backward FSDP1 keeps the root's memory in any case."""
        with ExitStack() as opened:
            for unit in self._holders(part):
                if isinstance(unit, FullyShardedDataParallel):
                    opened.enter_context(unit.summon_full_params(unit, recurse=False, writeback=False))
            yield

    def _cast_to(self) -> Iterator[torch.dtype | None]:
        return (wrapper.mixed_precision.param_dtype for wrapper in self._wrappers)

    def set_gradient_sync(self, on: bool) -> None:
        for wrapper in self._wrappers:  # what `no_sync()` does, which is a context manager
            cast(Any, wrapper)._sync_gradients = on


def wrap_fsdp1(
    module: nn.Module,
    units: Sequence[ShardUnit],
    world: World,
    *,
    mesh: DeviceMesh | None,
    precision: Precision,
    reshard_after_forward: bool,
    use_orig_params: bool,
    cpu_offload: bool,
    ignored: Sequence[str],
) -> FSDP1Model:
    """Collective. Wrap these units, in this order, the root last; the wrapped root is the result's `module`.

    A unit's parameters on meta get (uninitialised) memory just before it is wrapped, so that no more than one unit is whole;
    the result knows them as unfilled. Buffers on meta stay there.
    """
    places = outermost(module)
    slots = dict(parameter_slots(module))
    is_hybrid = mesh is not None and mesh.ndim == 2
    names = ("HYBRID_SHARD" if reshard_after_forward else "_HYBRID_SHARD_ZERO2") if is_hybrid else None
    names = names or ("FULL_SHARD" if reshard_after_forward else "SHARD_GRAD_OP")
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[names],
        "device_mesh": mesh if is_hybrid else None,
        "process_group": mesh.get_group() if mesh is not None and not is_hybrid else None,
        "mixed_precision": _mixed_precision(precision),
        "cpu_offload": CPUOffload(offload_params=True) if cpu_offload else None,
        "use_orig_params": use_orig_params,
        "device_id": world.device,
    }
    left = [cast(nn.Parameter, owner._parameters[attr]) for owner, attr in (slots[name] for name in ignored)]
    assert not units[-1].module, "the root comes last"
    empty: list[str] = []
    wrapped = module
    with _meta_buffers_aside(module):
        for unit in units:
            empty += _give_memory(unit, slots, world.device)
            parent, key = places[unit.module][0] if unit.module else (module, "")
            target = cast(nn.Module, parent._modules[key]) if unit.module else module
            with warnings.catch_warnings():
                # One rank has nothing to shard; torch says so for every unit.
                warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
                wrapped = FullyShardedDataParallel(target, ignored_states=left or None, **options)
            for parent, key in places.get(unit.module, ()):
                parent._modules[key] = wrapped
    return FSDP1Model(wrapped, world, empty=empty)


def is_wrapped_by_fsdp1(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel)


def _mixed_precision(precision: Precision) -> MixedPrecision | None:
    dtypes = (precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype)
    if dtypes == (None, None, None):
        return None
    return MixedPrecision(*dtypes, cast_root_forward_inputs=precision.cast_forward_inputs)


@contextmanager
def _meta_buffers_aside(module: nn.Module) -> Iterator[None]:
    """FSDP1 would give them memory without values; `fill` finds them on meta afterwards, as it should."""
    aside = [
        (live, name, buffer)
        for live in module.modules()
        for name, buffer in live._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    for live, name, _ in aside:
        live._buffers[name] = None
    try:
        yield
    finally:
        for live, name, buffer in aside:
            live._buffers[name] = buffer


def _give_memory(unit: ShardUnit, slots: Mapping[str, LiveSlot], device: torch.device) -> list[str]:
    """Names of those that were on meta."""
    given: list[str] = []
    for tensor in unit.parameters:
        owner, attr = slots[tensor.name]
        old = cast(nn.Parameter, owner._parameters[attr])
        if old.is_meta:
            made = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
            for name in (tensor.name, *tensor.aliases):
                owner, attr = slots[name]
                owner._parameters[attr] = made
            given.append(tensor.name)
    return given


def local_part(flat: Any) -> torch.Tensor:
    """This rank's part of a flat parameter, in full precision: it stays where it is while the unit is gathered."""
    part = flat._local_shard if hasattr(flat, "_local_shard") else flat.data
    return part.detach()


def _read_flat(
    wrapper: FullyShardedDataParallel, world: World, held: dict[Slot, FlatShard], whole: dict[Slot, nn.Parameter]
) -> None:
    """Add the wrapper's tensors to `held` and their whole shapes to `whole`, by slot; tied slots share one entry."""
    handle = cast(Any, wrapper)._handle
    flat = handle.flat_param
    _refuse_odd(flat)
    offsets = _offsets(flat)
    holders = _holders(wrapper, world)
    dtype = local_part(flat).dtype
    for index, (info, shape) in enumerate(zip(flat._param_infos, flat._shapes, strict=True)):
        slot = (id(info.module), info.param_name)
        held[slot] = _shard(wrapper, index, (offsets[index], shape.numel()), holders, world)
        trains = flat._params[index].requires_grad if handle._use_orig_params else flat.requires_grad
        whole[slot] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=trains)
    for shared in flat._shared_param_infos:
        slot, first = (id(shared.module), shared.param_name), (id(shared.prim_module), shared.prim_param_name)
        held[slot], whole[slot] = held[first], whole[first]


def _shard(
    wrapper: FullyShardedDataParallel, index: int, place: tuple[int, int], holders: list[int], world: World
) -> FlatShard:
    """`place`: (offset in the flat parameter, number of elements). `holders`: the ranks of the first replica, in order."""
    offset, numel = place
    handle = cast(Any, wrapper)._handle
    flat = handle.flat_param
    if len(holders) == 1:
        everything, mirrors = slice(offset, offset + numel), (0,) * world.size
        ranges = whole_ranges(numel, world.size)
        return FlatShard(wrapper, flat, index, ranges, everything, mirrors, world.is_main, local_part(flat).dtype)
    part: int = flat._sharded_size.numel()
    bounds: list[int] = [min(max(position * part - offset, 0), numel) for position in range(len(holders) + 1)]
    dealt: Ranges = tuple(pairwise(bounds))
    start, stop = dealt[handle.rank]
    begin = offset + start - handle.rank * part if start < stop else 0
    mirrors = tuple(rank % len(holders) for rank in range(world.size))
    return FlatShard(
        wrapper,
        flat,
        index,
        spread(dealt, holders, world.size),
        slice(begin, begin + stop - start),
        mirrors,
        world.rank in holders,
        local_part(flat).dtype,
    )


def _offsets(flat: Any) -> list[int]:
    """Where each tensor begins in the flat parameter; padding lies between them too."""
    ends = list(accumulate(flat._numels_with_padding))
    begins = [end - numel for end, numel in zip(ends, flat._numels_with_padding, strict=True)]
    return [begin for begin, is_padding in zip(begins, flat._is_padding_mask, strict=True) if not is_padding]


def _holders(wrapper: FullyShardedDataParallel, world: World) -> list[int]:
    """This world's ranks that hold the first replica, in the order of their parts; one rank: every rank holds everything."""
    handle = cast(Any, wrapper)._handle
    if not handle.uses_sharded_strategy:
        if hasattr(wrapper, "_inter_node_pg") and cast(Any, wrapper)._inter_node_pg.size() > 1:
            raise ModelError(DRIFTING)
        return [0]
    group = dist.get_process_group_ranks(handle.process_group)
    if world.ranks is not None and not set(group) <= set(world.ranks):
        raise ModelError(
            f"FSDP1 shards one unit over the ranks {group}, others over {list(world.ranks)}: lockstep needs one process group "
            "for the whole model"
        )
    mine = [world.rank_of(rank) for rank in group]
    size = len(mine)
    if mine != list(range(mine[0], mine[0] + size)) or mine[0] % size:
        raise ModelError(
            f"FSDP1 shards {wrapper._get_name()} over the ranks {mine}; lockstep needs blocks of neighbours (the last axis of "
            "a mesh made by init_device_mesh, or the ranks of one node)"
        )
    return list(range(size))


def _refuse_odd(flat: Any) -> None:
    for name, is_contiguous, extension in zip(flat._fqns, flat._contiguities, flat._param_extensions, strict=True):
        if extension is not None:
            raise ModelError(f"{name}: FSDP1 over tensor parallelism is not supported")
        if not is_contiguous:
            raise ModelError(
                f"{name} is not contiguous, and FSDP1 flattened it in memory order; make it contiguous before wrapping"
            )
