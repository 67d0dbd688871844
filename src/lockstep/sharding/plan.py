"""A model (on meta or real) and a policy in, a `ShardingPlan` out: which parameters are sharded together, in which order.

Pure: no process group, no memory, nothing is changed. Every parameter belongs to exactly one *unit*, the nearest; the
root is a unit like any other. Ranks compare `fingerprint()` before the first collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.errors import ModelError
from lockstep.names import clean_name
from lockstep.sharding.policy import LayerClasses, MinParams, Modules, ModuleTree, Policy, choose_units, prefixes

__all__ = [
    "LayerClasses",
    "MinParams",
    "Modules",
    "PlannedTensor",
    "Policy",
    "ShardUnit",
    "ShardingPlan",
    "plan_sharding",
    "split_units",
]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One parameter or buffer, under its first clean name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trainable: bool
    aliases: tuple[str, ...] = ()
    """Other clean names of the same tensor (tied weights)."""
    is_contiguous: bool = True
    """FSDP takes only contiguous parameters."""
    is_persistent: bool = True
    """Is it in the state dict? False for buffers that the model computes (rotary tables); True for every parameter."""

    @property
    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def line(self) -> str:
        flags = [
            " trainable" if self.is_trainable else "",
            "" if self.is_persistent else " not persistent",
            "" if self.is_contiguous else " not contiguous",
            f" tied to {list(self.aliases)}" if self.aliases else "",
        ]
        return f"{self.name} {self.dtype} {list(self.shape)}{''.join(flags)}"


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """What is sharded and gathered together."""

    module: str
    """Clean name of the module; empty for the root."""
    parameters: tuple[PlannedTensor, ...]
    buffers: tuple[PlannedTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.parameters)


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """Units in the model's order, the root last."""

    units: tuple[ShardUnit, ...]

    @property
    def parameters(self) -> Iterator[PlannedTensor]:
        return (tensor for unit in self.units for tensor in unit.parameters)

    @property
    def buffers(self) -> Iterator[PlannedTensor]:
        return (tensor for unit in self.units for tensor in unit.buffers)

    @property
    def largest_unit_bytes(self) -> int:
        return max(unit.nbytes for unit in self.units)

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """All names of each parameter that has more than one."""
        return tuple((tensor.name, *tensor.aliases) for tensor in self.parameters if tensor.aliases)

    def lines(self) -> list[str]:
        """One line per unit, parameter and buffer: what ranks compare, and what a disagreement quotes."""
        out = []
        for unit in self.units:
            out.append(f"unit {unit.module or '(root)'}")
            out += [f"parameter {tensor.line()}" for tensor in unit.parameters]
            out += [f"buffer {tensor.line()}" for tensor in unit.buffers]
        return out

    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def table(self, world_size: int) -> str:
        """Units with their sizes, for people."""
        rows = [
            f"{unit.module or '(root)':48} {len(unit.parameters):5} tensors {unit.nbytes / 2**20:9.2f} MiB"
            for unit in self.units
        ]
        total = sum(unit.nbytes for unit in self.units)
        return "\n".join(
            [
                *rows,
                f"total {total / 2**20:.2f} MiB, {total / world_size / 2**20:.2f} MiB on each of {world_size} ranks",
            ]
        )


def plan_sharding(model: nn.Module, policy: Policy | None = None) -> ShardingPlan:
    """Assign every parameter and buffer to its nearest unit. Pure; the meta device is fine.

    The model may carry activation-checkpoint and compile wrappers: every name in the plan is a clean one, and a unit is the
    outermost module of its name. Class names that the model does not contain are a warning; if none is found, the size
    policy takes over, with a warning. A glob that matches nothing is a `ModelError`. Tied parameters stay in one unit.
    """
    tree = ModuleTree(model)
    chosen = choose_units(tree, policy or LayerClasses())
    units_of = {name: unit for unit in chosen for name in tree.names_of(tree.nodes[unit].module)}
    parameters = assign(model.named_parameters(remove_duplicate=False), units_of)
    buffers = assign(buffers_of(model), units_of, volatile=volatile_buffers(model))
    # A module whose every parameter is in a unit further down gathers nothing: it is no unit, and its buffers go to the root.
    units = [name for name in chosen if name in parameters]
    left = [tensor for name, tensors in buffers.items() if name not in units for tensor in tensors]
    whole = [ShardUnit(name, tuple(parameters[name]), tuple(buffers.get(name, ()))) for name in units]
    return ShardingPlan((*whole, ShardUnit("", tuple(parameters.get("", ())), tuple(left))))


def split_units(plan: ShardingPlan, modules: Sequence[str]) -> ShardingPlan:
    """The plan with further units for these modules (clean names), nested in the units that had their parameters.

    Each stands behind the unit that it was cut from, or before the root. Raises `ModelError` for a module without parameters
    in the plan, or one that has them in several units.
    """
    for module in modules:
        holders = [unit for unit in plan.units if any(is_below(tensor.name, module) for tensor in unit.parameters)]
        if len(holders) != 1 or holders[0].module == module:
            where = [unit.module or "(root)" for unit in holders]
            raise ModelError(
                f"cannot make {module!r} a unit: expected parameters of it in one unit around it, found {where}"
            )
        plan = _split_one(plan, holders[0], module)
    return plan


def is_below(name: str, module: str) -> bool:
    """Is `name` a part of the module? Everything is below the root, whose name is empty."""
    return not module or name.startswith(f"{module}.")


def _split_one(plan: ShardingPlan, holder: ShardUnit, module: str) -> ShardingPlan:
    def parts(inside: bool, name: str) -> ShardUnit:
        return ShardUnit(
            name,
            tuple(tensor for tensor in holder.parameters if is_below(tensor.name, module) == inside),
            tuple(tensor for tensor in holder.buffers if is_below(tensor.name, module) == inside),
        )

    outer, inner = parts(False, holder.module), parts(True, module)
    pair = (outer, inner) if holder.module else (inner, outer)
    # An outer unit that nothing is left of is none any more, unless it is the root.
    pair = tuple(unit for unit in pair if unit.parameters or not unit.module)
    units = [each for unit in plan.units for each in (pair if unit is holder else (unit,))]
    return ShardingPlan(tuple(units))


def assign(
    named: Iterable[tuple[str, torch.Tensor]], units: Mapping[str, str], volatile: Container[str] = ()
) -> dict[str, list[PlannedTensor]]:
    """Tensors by unit. What two units share (buffers may) belongs to the root, which outlives both.

    `units`: name of the unit that a module is, by each of the module's names. `volatile`: buffers that are not persistent.
    """
    names: dict[int, dict[str, None]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for live, tensor in named:
        names.setdefault(id(tensor), {})[clean_name(live)] = None
        tensors[id(tensor)] = tensor
    out: dict[str, list[PlannedTensor]] = {}
    for key, tensor in tensors.items():
        owners = {units.get(nearest_unit(name, units), "") for name in names[key]}
        planned = _describe(tensor, list(names[key]), is_persistent=any(name not in volatile for name in names[key]))
        out.setdefault(owners.pop() if len(owners) == 1 else "", []).append(planned)
    return out


def nearest_unit(name: str, units: Container[str]) -> str:
    """The innermost of these modules that a tensor is in; empty: the root."""
    return next((prefix for prefix in reversed(prefixes(name)[:-1]) if prefix in units), "")


def _describe(tensor: torch.Tensor, names: list[str], *, is_persistent: bool) -> PlannedTensor:
    return PlannedTensor(
        name=names[0],
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        is_trainable=tensor.requires_grad,
        aliases=tuple(names[1:]),
        is_contiguous=tensor.is_contiguous(),
        is_persistent=is_persistent,
    )


def buffers_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Like `named_buffers(remove_duplicate=False)`, but in every process in the same order: Gemma-3 of transformers 5.1
    registers its rotary tables in the order of a set, which differs from rank to rank."""
    for name, module in model.named_modules(remove_duplicate=False):
        for leaf, buffer in sorted(module._buffers.items()):
            if buffer is not None:
                yield (f"{name}.{leaf}" if name else leaf), buffer


def volatile_buffers(model: nn.Module) -> set[str]:
    """Clean names of the buffers that are not in the state dict."""
    return {
        clean_name(f"{live}.{leaf}" if live else leaf)
        for live, module in model.named_modules(remove_duplicate=False)
        for leaf in module._non_persistent_buffers_set
    }
