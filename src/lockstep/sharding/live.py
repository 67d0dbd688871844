"""A live (wrapped) model and how each of its tensors is held in; what every backend of `ShardedModel` shares out.

*slot* where a parameter hangs: (live module, attribute); *holding* one parameter as this rank holds it: which elements, and
how to read and overwrite them. The backends differ in their holdings and in how they train, not in anything here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.dist import World, data_phase
from lockstep.errors import ModelError
from lockstep.model.lora import reference_policy
from lockstep.names import clean_name
from lockstep.sharding.base import Ranges
from lockstep.sharding.plan import PlannedTensor, ShardingPlan, ShardUnit, assign, buffers_of, volatile_buffers
from lockstep.sharding.skeleton import unwrap, walk

LiveSlot = tuple[nn.Module, str]


class Holding(Protocol):
    """One parameter as this rank holds it."""

    ranges: Ranges
    dim: int
    """The tensor dimension that is dealt out."""

    @property
    def layout(self) -> str:
        """How it is dealt out, in words that are the same on every rank."""
        ...

    @property
    def trained(self) -> nn.Parameter:
        """What an optimizer updates for it."""
        ...

    @property
    def is_owner(self) -> bool:
        """Is this rank's copy the one that counts? Others hold the same elements, and their range is empty."""
        ...

    mirrors: tuple[int, ...]
    """For each rank, whose elements it holds: its own number, or that of the owner that it is a replica of."""

    def read(self) -> torch.Tensor:
        """The elements that lie here, owned or not: 1-D, detached, a view of live memory where `dim` is 0."""
        ...

    def write(self, values: torch.Tensor) -> None:
        """Overwrite them."""
        ...

    def give_memory(self) -> None:
        """Of a parameter on meta; its values are undefined until they are written."""
        ...

    def is_current(self) -> bool:
        """Does its slot still hold what was found there?"""
        ...


class LiveModel:
    """The part of `ShardedModel` that does not depend on the backend."""

    _casts_buffers = False
    """Does the backend itself change the buffers' dtype later on?"""

    def __init__(
        self,
        module: nn.Module,
        skeleton: nn.Module,
        plan: ShardingPlan,
        world: World,
        holdings: Mapping[str, Holding],
        *,
        empty: Collection[str] = (),
    ):
        """`holdings`: one for every parameter of the plan, by its first name.

        `empty`: names of parameters whose memory has no values in it yet; those on meta are found here.
        """
        self.module = module
        self.skeleton = skeleton
        self.plan = plan
        self.world = world
        self._holdings = dict(holdings)
        self._unfilled = {
            tensor.name
            for tensor in plan.parameters
            if not {tensor.name, *tensor.aliases}.isdisjoint(empty) or holdings[tensor.name].read().is_meta
        }
        self._buffers = {
            f"{name}.{attr}" if name else attr: (live, attr) for name, live in walk(module) for attr in live._buffers
        }
        self._contents = _Contents(module, plan)
        self._saved_buffers = [each for each in plan.buffers if each.is_persistent]

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        out: dict[int, tuple[str, nn.Parameter]] = {}
        for tensor in self.plan.parameters:
            if tensor.is_trainable:
                param = self._holdings[tensor.name].trained
                out.setdefault(id(param), (tensor.name, param))
        return list(out.values())

    def adapter_off(self) -> AbstractContextManager[None]:
        model = unwrap(self.module)
        if not callable(getattr(model, "disable_adapter", None)):  # asked by name: only `model.lora` imports peft
            raise ModelError(
                f"the reference policy is the model with its adapter off, and {type(model).__name__} is no PeftModel; "
                "use get_peft_model, or compute the reference with a model of your own"
            )
        return reference_policy(cast(Any, model))

    def clip_grad_norm(self, max_norm: float) -> float:
        """Collective. What several ranks hold alike counts once, wherever the wrappers stand (FSDP1's own wants one at the root)."""
        grads = dict(self._gradients())
        counted = [grad for grad, is_owner in grads.items() if is_owner]
        squares = torch.zeros((), dtype=torch.float32, device=self.world.device)
        for norm in torch._foreach_norm([grad.float() for grad in counted]) if counted else ():
            squares += norm.to(squares.device).square()
        if self.world.size > 1:
            with data_phase(self.world, "norm of gradients"):
                dist.all_reduce(squares, group=self.world.data)
        norm = math.sqrt(squares.item())
        if norm > max_norm and grads:
            torch._foreach_mul_(list(grads), max_norm / (norm + 1e-6))
        return norm

    def _gradients(self) -> Iterator[tuple[torch.Tensor, bool]]:
        """This rank's part of every gradient, once, and whether this rank counts it."""
        seen: set[int] = set()
        for tensor in self.plan.parameters:
            held = self._holdings[tensor.name]
            grad = held.trained.grad
            if tensor.is_trainable and grad is not None and id(held.trained) not in seen:
                seen.add(id(held.trained))
                yield grad.to_local() if isinstance(grad, DTensor) else grad, held.is_owner

    def gathered(self, part: nn.Module) -> AbstractContextManager[None]:
        """Nothing to do, unless the backend says otherwise."""
        return nullcontext()

    def _holders(self, part: nn.Module) -> list[nn.Module]:
        """The live modules, wrappers and all, of the units that hold a live module's parameters; in plan order."""
        path = next(name for name, live in walk(self.module) if live is unwrap(part))
        places = outermost(self.module)
        out = []
        for unit in self.plan.units:
            names = (name for tensor in unit.parameters for name in (tensor.name, *tensor.aliases))
            if any(name.startswith(f"{path}.") for name in names):
                parent, key = places[unit.module][0] if unit.module else (None, "")
                out.append(self.module if parent is None else cast(nn.Module, parent._modules[key]))
        return out

    def compute_dtypes(self) -> frozenset[torch.dtype]:
        own = {tensor.dtype for tensor in self.plan.parameters if tensor.dtype.is_floating_point}
        return frozenset(own | {dtype for dtype in self._cast_to() if dtype is not None})

    def _cast_to(self) -> Iterator[torch.dtype | None]:
        """What the backend casts gathered parameters to, unit by unit."""
        return iter(())

    def settle(self) -> None:
        """Nothing to do, unless the backend says otherwise."""

    def ranges(self, name: str) -> Ranges:
        return self._holdings[name].ranges

    def shard_dim(self, name: str) -> int:
        return self._holdings[name].dim

    def local_flat(self, name: str) -> torch.Tensor:
        held = self._holdings[name]
        return held.read() if held.is_owner else held.read()[:0]

    def write_local(self, name: str, values: torch.Tensor) -> None:
        start, stop = self.ranges(name)[self.world.rank]
        if tuple(values.shape) != (stop - start,):
            raise ValueError(
                f"{name}: this rank holds elements {start}..{stop}, so {stop - start} values in 1-D are due; "
                f"{list(values.shape)} came"
            )
        held = self._holdings[name]
        with torch.no_grad():
            held.give_memory()
            if held.is_owner:
                held.write(values)
        self._unfilled.discard(name)

    def unfilled(self) -> list[str]:
        left = (
            [tensor.name for tensor in self.plan.parameters if tensor.name in self._unfilled] if self._unfilled else []
        )
        return left + [tensor.name for tensor in self.plan.buffers if self.buffer(tensor.name).is_meta]

    def copy_to_replicas(self) -> None:
        """Collective; for loading. Give what several ranks hold alike (replicas, unsharded parameters) the first one's values.

        `write_local` reaches the first replica only. Nothing travels where every element is held once.
        """
        copied = [held for held in self._holdings.values() if len(set(held.mirrors)) < self.world.size]
        with torch.no_grad(), data_phase(self.world, "copying to replicas"):
            for held in copied:
                for owner in sorted(set(held.mirrors)):
                    _copy_from(held, owner, self.world)

    def buffer(self, name: str) -> torch.Tensor:
        live, attr = self._buffers[name]
        return cast(torch.Tensor, live._buffers[attr])

    def is_current(self) -> bool:
        return (
            self._contents.is_current()
            and all(self._is_as_planned(each) for each in self._saved_buffers)
            and all([holding.is_current() for holding in self._holdings.values()])
        )

    def _is_as_planned(self, planned: PlannedTensor) -> bool:
        buffer = self.buffer(planned.name)
        if not isinstance(buffer, torch.Tensor):
            return False
        return (self._casts_buffers or buffer.dtype is planned.dtype) and tuple(buffer.shape) == planned.shape

    def layout_lines(self) -> list[str]:
        """One line per parameter: how it is dealt out. Equal on every rank, or the ranks do not fit together."""
        return [f"layout {name}: {holding.layout} {holding.ranges}" for name, holding in self._holdings.items()]


def _copy_from(held: Holding, owner: int, world: World) -> None:
    """Collective: the ranks that mirror this owner get its elements. All others take part, and throw them away."""
    start, stop = held.ranges[owner]
    mine = held.read()
    if start == stop or mine.is_meta:
        return
    values = mine.contiguous() if owner == world.rank else mine.new_empty(stop - start)
    moved = values.to(world.device)  # under CPU offload shards are on the CPU, and NCCL is not
    dist.broadcast(moved, world.ranks[owner] if world.ranks else owner, world.data)
    if held.mirrors[world.rank] == owner != world.rank:
        held.write(moved)


def set_sync(module: nn.Module, on: bool) -> None:
    """Without FSDP: only DDP reduces gradients by itself."""
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = on


def parameter_slots(module: nn.Module) -> Iterator[tuple[str, LiveSlot]]:
    """(clean name, slot) of every registered parameter, tied ones once per name, in the model's order."""
    for name, live in walk(module):
        for attr, param in live._parameters.items():
            if param is not None and attr != "_flat_param":  # FSDP1's own, not one of the model's
                yield f"{name}.{attr}" if name else attr, (live, attr)


def outermost(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """By clean name of every module below the root: (live parent, key) of the outermost live module of that name.

    Several for a module that hangs in several places.
    """
    first: dict[str, tuple[nn.Module, str]] = {}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    modules = dict(module.named_modules(remove_duplicate=False))
    for name, each in modules.items():
        path, _, key = name.rpartition(".")
        if name:
            first.setdefault(clean_name(name), (modules[path], key))
            places.setdefault(id(each), []).append((modules[path], key))
    first.pop("", None)  # below a wrapper at the root
    return {name: places[id(parent._modules[key])] for name, (parent, key) in first.items()}


def unit_names(module: nn.Module, kind: type | tuple[type, ...]) -> list[str]:
    """Clean names of the modules of a class (a backend's own), in the model's order; the root is not among them."""
    names = [clean_name(name) for name, each in module.named_modules() if isinstance(each, kind)]
    return [name for name in dict.fromkeys(names) if name]


def plan_of(skeleton: nn.Module, units: Sequence[str]) -> ShardingPlan:
    """The plan of a model that is wrapped already: each parameter belongs to the nearest of these modules (the root always).

    A parameter that two units share belongs to the root, as in `plan_sharding`; a module that no parameter is left for is none.
    """
    parameters = assign(skeleton.named_parameters(remove_duplicate=False), {name: name for name in units})
    kept = {name: name for name in units if name in parameters}
    buffers = assign(buffers_of(skeleton), kept, volatile_buffers(skeleton))
    return ShardingPlan(
        tuple(ShardUnit(name, tuple(parameters.get(name, ())), tuple(buffers.get(name, ()))) for name in [*kept, ""])
    )


class _Contents:
    """What all live modules, wrappers too, had in them when the plan was made: nothing may be added, removed or replaced.

    Known parameters are their holdings' business. Asked before every export, of thousands of modules: plain tuples, no calls.
    """

    def __init__(self, module: nn.Module, plan: ShardingPlan):
        lives = dict(walk(module))
        known: dict[int, set[str]] = {}
        for tensor in plan.parameters:
            for name in (tensor.name, *tensor.aliases):
                path, _, attr = name.rpartition(".")
                known.setdefault(id(lives[path]), set()).add(attr)
        modules = list(module.modules())
        self._children = [(each._modules, dict(each._modules)) for each in modules]
        self._parameters = [
            (each._parameters, len(each._parameters), {"_flat_param", *known.get(id(each), ())}) for each in modules
        ]
        self._buffers = [(each._buffers, len(each._buffers), each, _saved_buffers(each)) for each in modules]
        named = [(each._parameters, name) for each in modules for name in each._parameters]
        named += [(each._buffers, name) for each in modules for name in each._buffers]
        self._nothing: list[tuple[Mapping[str, Any], str]] = [pair for pair in named if pair[0][pair[1]] is None]

    def is_current(self) -> bool:
        # FSDP1 takes parameters off their modules while it has them gathered; modules make themselves caches, which are not saved.
        return (
            all([now == then for now, then in self._children])
            and all([len(now) == num or _has_only(now, names) for now, num, names in self._parameters])
            and all([len(now) == num or _saved_buffers(each) == saved for now, num, each, saved in self._buffers])
            and all([now.get(name) is None for now, name in self._nothing])
        )


def _has_only(parameters: Mapping[str, nn.Parameter | None], names: Collection[str]) -> bool:
    return all(param is None or name in names for name, param in parameters.items())


def _saved_buffers(module: nn.Module) -> frozenset[str]:
    """Names of those that a state dict has."""
    named = module._buffers.items()
    return frozenset(
        name for name, each in named if each is not None and name not in module._non_persistent_buffers_set
    )
