"""A sharding plan in, what its mixed dtypes need before wrapping out: casts, units of their own, payloads left whole; or an error.

What the backends take, in one unit (torch 2.13; tests ask FSDP itself):

- FSDP1 flattens a unit: one floating dtype, frozen or not, and no integers ("Must flatten tensors with uniform dtype").
- FSDP2 asks for one dtype among the *trainable* parameters of a unit; frozen ones of any dtype may share it, integers too.
  Before torch 2.9 it asks for one dtype among all of them, integers included.

Only adapters are ever cast; a base weight, and what the model wants kept in fp32, keeps its dtype.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from lockstep.errors import ModelError
from lockstep.logs import ON_EVERY_RANK
from lockstep.names import clean_name, is_adapter_name

log = logging.getLogger(__name__)

FSDP2_MIXES_FROZEN = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)
"""torch 2.6 and 2.7 refuse frozen parameters of another dtype at the first forward; 2.9 and newer take them."""

Rule = Literal["align", "split", "refuse"]
"""align: cast adapters to their unit's dtype; split: cast nothing, make units of their own; refuse: an error."""

# PEFT keeps these factors in a ParameterDict, which has no forward and so cannot be a unit.
_IN_A_DICT = frozenset({"lora_embedding_A", "lora_embedding_B", "trainable_tokens_delta"})


class _Tensor(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def is_trainable(self) -> bool: ...
    @property
    def numel(self) -> int: ...


class _Unit(Protocol):
    @property
    def module(self) -> str: ...
    @property
    def parameters(self) -> Sequence[_Tensor]: ...


class _Plan(Protocol):
    """What is read of `lockstep.sharding.plan.ShardingPlan`, which is a layer above."""

    @property
    def units(self) -> Sequence[_Unit]: ...


@dataclass(frozen=True, slots=True)
class OddTensor:
    """A parameter whose dtype is not the majority's of its unit."""

    name: str
    dtype: torch.dtype
    is_trainable: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}, {'trainable' if self.is_trainable else 'frozen'})"


@dataclass(frozen=True, slots=True)
class DtypeFinding:
    """One unit whose parameters are not all of one dtype."""

    unit: str
    """Clean name of the module; empty for the root."""
    majority: torch.dtype
    """Floating dtype of most of the unit's elements, adapters not counted where there is a floating base."""
    odd: tuple[OddTensor, ...]

    def line(self) -> str:
        shown = ", ".join(map(str, self.odd[:4])) + (f" and {len(self.odd) - 4} more" if len(self.odd) > 4 else "")
        return f"{self.unit or '(root)'} is {self.majority}, but for {shown}"


@dataclass(frozen=True, slots=True)
class Cast:
    """An adapter's parameter that changes its dtype before wrapping."""

    name: str
    before: torch.dtype
    after: torch.dtype


@dataclass(frozen=True, slots=True)
class DtypePlan:
    """What is done about mixed dtypes, by clean names."""

    casts: tuple[Cast, ...] = ()
    units: tuple[str, ...] = ()
    """Modules that become units of their own: for `lockstep.sharding.plan.split_units`."""
    ignored: tuple[str, ...] = ()
    """Parameters that stay outside FSDP, whole on every rank: integer payloads on FSDP1."""


def find_mixed_dtypes(plan: _Plan) -> tuple[DtypeFinding, ...]:
    """Every unit with parameters of several dtypes, whatever a backend makes of it. Pure."""
    found = []
    for unit in plan.units:
        majority = _majority(unit.parameters)
        odd = tuple(
            OddTensor(each.name, each.dtype, each.is_trainable) for each in unit.parameters if each.dtype != majority
        )
        if odd:
            found.append(DtypeFinding(unit.module, majority, odd))
    return tuple(found)


def keep_in_fp32(model: nn.Module) -> tuple[str, ...]:
    """Name patterns of the modules that the model, or a part of it, wants kept in fp32 (transformers' two lists)."""
    found: set[str] = set()
    for module in model.modules():
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            found |= set(getattr(module, attribute, None) or ())
    return tuple(sorted(found))


def plan_dtypes(
    plan: _Plan, *, backend: Literal["fsdp1", "fsdp2"], rule: Rule | None = None, keep: Iterable[str] = ()
) -> DtypePlan:
    """Decide about every unit that the backend would not take as it is. Pure.

    By default adapters are aligned on FSDP1 (with a warning: a bf16 adapter loses small updates), odd frozen floats become
    units of their own, and integer payloads stay outside; on FSDP2 the trainable parameters of the rarer dtype are split off
    (before torch 2.9: adapters and frozen floats as on FSDP1, payloads split off).
    `rule="align"` also aligns adapters that FSDP2 would take. `keep` (`keep_in_fp32(model)`) names what is never cast.
    Raises `ModelError` naming the parameters that stay mixed under the rule.
    """
    casts: list[Cast] = []
    units: dict[str, None] = {}
    ignored: list[str] = []
    for unit in plan.units:
        majority = _majority(unit.parameters)
        if backend == "fsdp1":
            ignored += [each.name for each in unit.parameters if not each.dtype.is_floating_point]
        odd = _not_taken(unit, backend, majority, rule)
        if odd and rule == "refuse":
            raise ModelError(_refusal(unit, odd, backend, "give another dtype rule, or load the model in one dtype"))
        aligned = [each for each in odd if _may_cast(each, backend, rule) and not _is_kept(each.name, keep)]
        casts += [Cast(each.name, each.dtype, majority) for each in aligned]
        left = [each for each in odd if each not in aligned]
        if left and rule == "align":
            raise ModelError(_refusal(unit, left, backend, "only adapters are cast; use the rule split for the others"))
        units |= dict.fromkeys(_own_unit(unit, each, left, backend) for each in left)
    _warn_of_low_precision(casts)
    return DtypePlan(tuple(casts), tuple(units), tuple(ignored))


def apply_dtypes(model: nn.Module, dtype_plan: DtypePlan) -> tuple[Cast, ...]:
    """Cast in place, before wrapping; the same Parameter objects stay. Returns what was cast (nothing the second time).

    Raises `ModelError` for a name that the model does not have.
    """
    params = {clean_name(name): param for name, param in model.named_parameters(remove_duplicate=False)}
    missing = [cast.name for cast in dtype_plan.casts if cast.name not in params]
    if missing:
        raise ModelError(f"the dtype plan names {missing[0]!r}, which is not in the model: plan again for this model")
    todo = [cast for cast in dtype_plan.casts if params[cast.name].dtype != cast.after]
    for cast in todo:
        params[cast.name].data = params[cast.name].data.to(cast.after)
    return tuple(todo)


def _majority(tensors: Sequence[_Tensor]) -> torch.dtype:
    floats = [tensor for tensor in tensors if tensor.dtype.is_floating_point]
    base = [tensor for tensor in floats if not is_adapter_name(tensor.name)]
    counts: dict[torch.dtype, int] = {}
    for tensor in base or floats or tensors:
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel
    return max(counts, key=counts.__getitem__, default=torch.float32)


def _not_taken(unit: _Unit, backend: str, majority: torch.dtype, rule: Rule | None) -> list[_Tensor]:
    """The parameters for which the backend (or the rule "align") wants something done."""
    floats = [each for each in unit.parameters if each.dtype.is_floating_point]
    if backend == "fsdp1":
        return [each for each in floats if each.dtype != majority]
    if not FSDP2_MIXES_FROZEN:
        return [each for each in unit.parameters if each.dtype != majority]
    if rule == "align":
        adapters = [each for each in floats if is_adapter_name(each.name) and each.dtype != majority]
        others = [each for each in floats if not is_adapter_name(each.name)]
        return adapters + _rarer([each for each in others if each.is_trainable])
    return _rarer([each for each in unit.parameters if each.is_trainable])


def _rarer(tensors: Sequence[_Tensor]) -> list[_Tensor]:
    """Those whose dtype is not that of most elements, adapters counted like everything else."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors:
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel
    return [tensor for tensor in tensors if tensor.dtype != max(counts, key=counts.__getitem__)]


def _may_cast(tensor: _Tensor, backend: str, rule: Rule | None) -> bool:
    return is_adapter_name(tensor.name) and (rule == "align" or (rule is None and _is_uniform(backend)))


def _is_uniform(backend: str) -> bool:
    """Do frozen parameters count as well?"""
    return backend == "fsdp1" or not FSDP2_MIXES_FROZEN


def _is_kept(name: str, keep: Iterable[str]) -> bool:
    """Does a pattern (a module's name, a dotted end of one, perhaps with *) match the module that the parameter is in?"""
    dotted = f".{name}."
    return any(fnmatch.fnmatchcase(dotted, f"*.{pattern}.*") for pattern in keep)


def _own_unit(unit: _Unit, tensor: _Tensor, odd: Sequence[_Tensor], backend: str) -> str:
    """The module around an odd parameter, if everything of this unit in it is odd alike."""
    module = tensor.name.rpartition(".")[0]
    inside = [each for each in unit.parameters if each.name.startswith(f"{module}.")]
    mixed = {
        each.dtype for each in inside if each.dtype.is_floating_point and (_is_uniform(backend) or each.is_trainable)
    }
    if module == unit.module or len(mixed) > 1 or not _IN_A_DICT.isdisjoint(tensor.name.split(".")):
        raise ModelError(
            _refusal(unit, odd, backend, f"{tensor.name!r} has no module of its own to split off; load it in one dtype")
        )
    return module


def _refusal(unit: _Unit, odd: Sequence[_Tensor], backend: str, advice: str) -> str:
    shown = DtypeFinding(
        unit.module,
        _majority(unit.parameters),
        tuple(OddTensor(each.name, each.dtype, each.is_trainable) for each in odd),
    )
    what = "parameters" if _is_uniform(backend) else "trainable parameters"
    return f"{backend} takes {what} of one dtype in a unit: {shown.line()}; {advice}"


def _warn_of_low_precision(casts: Sequence[Cast]) -> None:
    low = [cast for cast in casts if cast.after.itemsize < cast.before.itemsize]
    if low:
        log.warning(
            "%d adapter tensors, the first %r, go from %s to %s to share a unit: updates smaller than its steps are lost. "
            "FSDP2 (torch 2.9 or newer), or the dtype rule split, keeps them",
            len(low),
            low[0].name,
            low[0].before,
            low[0].after,
            extra=ON_EVERY_RANK,
        )
