"""A live (wrapped) model and how each of its tensors is held in; what every backend of `ShardedModel` shares out.

*slot* where a parameter hangs: (live module, attribute); *holding* one parameter as this rank holds it: which elements, and
how to read and overwrite them. The backends differ in their holdings and in how they train, not in anything here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.dist import World
from lockstep.errors import ModelError
from lockstep.model.lora import reference_policy
from lockstep.names import clean_name
from lockstep.sharding.base import Ranges
from lockstep.sharding.plan import PlannedTensor, ShardingPlan, ShardUnit
from lockstep.sharding.skeleton import unwrap, walk

LiveSlot = tuple[nn.Module, str]
_GROWING = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)
"""Containers that get new entries, of which an old plan knows nothing (PEFT's, one per adapter)."""


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

    def read(self) -> torch.Tensor:
        """This rank's elements, 1-D, detached."""
        ...

    def write(self, values: torch.Tensor) -> None:
        """Overwrite them."""
        ...

    def is_current(self) -> bool:
        """Does its slot still hold what was found there?"""
        ...


class LiveModel:
    """The part of `ShardedModel` that does not depend on the backend."""

    def __init__(
        self, module: nn.Module, skeleton: nn.Module, plan: ShardingPlan, world: World, holdings: Mapping[str, Holding]
    ):
        """`holdings`: one for every parameter of the plan, by its first name."""
        self.module = module
        self.skeleton = skeleton
        self.plan = plan
        self.world = world
        self._holdings = dict(holdings)
        self._buffers = {
            f"{name}.{attr}" if name else attr: (live, attr) for name, live in walk(module) for attr in live._buffers
        }
        self._edges = _edges(module)
        self._containers = _containers(module)

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

    def settle(self) -> None:
        """Nothing to do, unless the backend says otherwise."""

    def ranges(self, name: str) -> Ranges:
        return self._holdings[name].ranges

    def shard_dim(self, name: str) -> int:
        return self._holdings[name].dim

    def local_flat(self, name: str) -> torch.Tensor:
        return self._holdings[name].read()

    def write_local(self, name: str, values: torch.Tensor) -> None:
        start, stop = self.ranges(name)[self.world.rank]
        if tuple(values.shape) != (stop - start,):
            raise ValueError(
                f"{name}: this rank holds elements {start}..{stop}, so {stop - start} values in 1-D are due; "
                f"{list(values.shape)} came"
            )
        with torch.no_grad():
            self._holdings[name].write(values)

    def buffer(self, name: str) -> torch.Tensor:
        live, attr = self._buffers[name]
        return cast(torch.Tensor, live._buffers[attr])

    def is_current(self) -> bool:
        return (
            all(children.get(key) is child for children, key, child in self._edges)
            and all(len(entries) == num for entries, num in self._containers)
            and all(holding.is_current() for holding in self._holdings.values())
        )

    def layout_lines(self) -> list[str]:
        """One line per parameter: how it is dealt out. Equal on every rank, or the ranks do not fit together."""
        return [f"layout {name}: {holding.layout} {holding.ranges}" for name, holding in self._holdings.items()]


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


def unit_names(module: nn.Module, kind: type | tuple[type, ...]) -> list[str]:
    """Clean names of the modules of a class (a backend's own), in the model's order; the root is not among them."""
    names = [clean_name(name) for name, each in module.named_modules() if isinstance(each, kind)]
    return [name for name in dict.fromkeys(names) if name]


def plan_of(skeleton: nn.Module, units: Sequence[str]) -> ShardingPlan:
    """The plan of a model that is wrapped already: each parameter belongs to the nearest of these modules (the root always).

    A parameter that two units share belongs to the root, as in `plan_sharding`; a module that no parameter is left for is none.
    """
    parameters = _by_unit(skeleton.named_parameters(remove_duplicate=False), units, set())
    kept = [name for name in units if name in parameters]
    buffers = _by_unit(skeleton.named_buffers(remove_duplicate=False), kept, _volatile(skeleton))
    return ShardingPlan(
        tuple(ShardUnit(name, tuple(parameters.get(name, ())), tuple(buffers.get(name, ()))) for name in [*kept, ""])
    )


def _by_unit(
    named: Iterator[tuple[str, torch.Tensor]], units: Sequence[str], volatile: set[str]
) -> dict[str, list[PlannedTensor]]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    known = set(units)
    out: dict[str, list[PlannedTensor]] = {}
    for key, tensor in tensors.items():
        owners = {_nearest(name, known) for name in names[key]}
        planned = PlannedTensor(
            name=names[key][0],
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            is_trainable=tensor.requires_grad,
            aliases=tuple(names[key][1:]),
            is_contiguous=tensor.is_contiguous(),
            is_persistent=any(name not in volatile for name in names[key]),
        )
        out.setdefault(owners.pop() if len(owners) == 1 else "", []).append(planned)
    return out


def _volatile(skeleton: nn.Module) -> set[str]:
    """Names of the buffers that are not in the state dict."""
    return {
        f"{name}.{attr}" if name else attr
        for name, module in skeleton.named_modules(remove_duplicate=False)
        for attr in module._non_persistent_buffers_set
    }


def _nearest(name: str, units: set[str]) -> str:
    parts = name.split(".")[:-1]
    prefixes = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in units), "")


def _edges(module: nn.Module) -> list[tuple[Mapping[str, Any], str, Any]]:
    """(the parent's children, key, child) throughout the tree."""
    return [(each._modules, key, child) for each in module.modules() for key, child in each._modules.items()]


def _containers(module: nn.Module) -> list[tuple[Mapping[str, Any], int]]:
    """Entries of every growing container, and how many there are."""
    growing = [each for each in module.modules() if isinstance(each, _GROWING)]
    return [(entries, len(entries)) for each in growing for entries in (each._modules, each._parameters)]
