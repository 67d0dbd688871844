"""A model (on meta or real) and a policy in, a `ShardingPlan` out: which parameters are sharded together, in which order.

Pure: no process group, no memory, nothing is changed. Every parameter belongs to exactly one *unit*, the nearest; the
root is a unit like any other. Ranks compare `fingerprint()` before the first collective.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.errors import ModelError
from lockstep.names import clean_name

log = logging.getLogger(__name__)

_DEFAULT_MIN_PARAMS = 1_000_000


@dataclass(frozen=True, slots=True)
class LayerClasses:
    """One unit per module of these classes; empty: the model's own `_no_split_modules`, sub-models included."""

    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MinParams:
    """One unit per lowest module that has at least so many parameters: never nested."""

    num_params: int = _DEFAULT_MIN_PARAMS


@dataclass(frozen=True, slots=True)
class Modules:
    """One unit per module whose name matches one of these globs; the only policy that may nest units."""

    globs: tuple[str, ...]


Policy = LayerClasses | MinParams | Modules


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One parameter or buffer, under its first live name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trainable: bool
    aliases: tuple[str, ...] = ()
    """Other live names of the same tensor (tied weights)."""

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
        tied = f" tied to {list(self.aliases)}" if self.aliases else ""
        return (
            f"{clean_name(self.name)} {self.dtype} {list(self.shape)}{' trainable' if self.is_trainable else ''}{tied}"
        )


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """What is sharded and gathered together."""

    module: str
    """Live name of the module; empty for the root."""
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

    def lines(self) -> list[str]:
        """One line per unit, parameter and buffer: what ranks compare, and what a disagreement quotes."""
        out = []
        for unit in self.units:
            out.append(f"unit {clean_name(unit.module) or '(root)'}")
            out += [f"parameter {tensor.line()}" for tensor in unit.parameters]
            out += [f"buffer {tensor.line()}" for tensor in unit.buffers]
        return out

    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def table(self, world_size: int) -> str:
        """Units with their sizes, for people."""
        rows = [
            f"{clean_name(unit.module) or '(root)':48} {len(unit.parameters):5} tensors {unit.nbytes / 2**20:9.2f} MiB"
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

    Class names that the model does not contain are a warning; if none is found, the size policy takes over, with a
    warning. A glob that matches nothing is a `ModelError`. A parameter that two units share goes to the root.
    """
    chosen = _choose(model, policy or LayerClasses())
    owner = _owners(model, chosen)
    parameters = _assign(model.named_parameters(remove_duplicate=False), owner)
    buffers = _assign(model.named_buffers(remove_duplicate=False), owner)
    units = [ShardUnit(name, tuple(parameters.get(name, ())), tuple(buffers.get(name, ()))) for name in [*chosen, ""]]
    return ShardingPlan(tuple(units))


def _choose(model: nn.Module, policy: Policy) -> list[str]:
    """Live names of the modules that become units, in the model's order."""
    match policy:
        case LayerClasses(names):
            return _by_class(model, names)
        case MinParams(num_params):
            return _by_size(model, num_params)
        case Modules(globs):
            return _by_glob(model, globs)


def _by_class(model: nn.Module, names: Sequence[str]) -> list[str]:
    wanted = set(names) or _no_split_classes(model)
    found = [
        (name, type(module).__name__)
        for name, module in model.named_modules()
        if name and type(module).__name__ in wanted
    ]
    missing = sorted(wanted - {cls for _, cls in found})
    if not found:
        log.warning(
            "no module of class %s in the model; taking units of at least %d parameters",
            sorted(wanted),
            _DEFAULT_MIN_PARAMS,
        )
        return _by_size(model, _DEFAULT_MIN_PARAMS)
    if missing:
        log.warning("classes %s are not in the model; units are made of %s", missing, sorted(wanted - set(missing)))
    return _outermost([name for name, _ in found])


def _no_split_classes(model: nn.Module) -> set[str]:
    return {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}


def _outermost(names: list[str]) -> list[str]:
    """Drop a name below another one: nested units gather in different orders on different ranks (verl PR #6512)."""
    kept: list[str] = []
    for name in names:
        if not any(name.startswith(other + ".") for other in kept):
            kept.append(name)
    return kept


def _by_size(model: nn.Module, num_params: int) -> list[str]:
    def reaches(module: nn.Module) -> bool:
        return sum(param.numel() for param in module.parameters()) >= num_params

    return [
        name
        for name, module in model.named_modules()
        if name and reaches(module) and not any(map(reaches, module.children()))
    ]


def _by_glob(model: nn.Module, globs: Sequence[str]) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    for glob in globs:
        if not fnmatch.filter(map(clean_name, names), glob):
            raise ModelError(f"sharding: glob {glob!r} matches no module; names there are, for example, {names[:6]}")
    return [name for name in names if any(fnmatch.fnmatchcase(clean_name(name), glob) for glob in globs)]


def _owners(model: nn.Module, chosen: list[str]) -> dict[int, str]:
    """Unit of every tensor, by identity. What two units share belongs to the root, which outlives both."""
    units = set(chosen)
    owner: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        parts = name.split(".")[:-1]
        prefixes = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
        nearest = next((prefix for prefix in prefixes if prefix in units), "")
        if owner.setdefault(id(tensor), nearest) != nearest:
            owner[id(tensor)] = ""
    return owner


def _assign(named: Iterator[tuple[str, torch.Tensor]], owner: dict[int, str]) -> dict[str, list[PlannedTensor]]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    out: dict[str, list[PlannedTensor]] = {}
    for key, tensor in tensors.items():
        first, *others = names[key]
        planned = PlannedTensor(first, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tuple(others))
        out.setdefault(owner[key], []).append(planned)
    return out
