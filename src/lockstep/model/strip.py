"""A model and the dotted names of stages that are not trained in, the model without them and a report of what that freed out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.errors import ModelError

DECLARED = "_lockstep_strip_modules"
"""Attribute of a model, or of its class, in which it lists the stages that training does not need."""

_RECORD = "_lockstep_stripped"
"""Attribute of a model from which something was taken: the reports, so that an export can say that it is a part of the whole."""

_PEFT_PREFIX = "base_model.model."
# Their entries are numbered or looped over: taking one out renames the others, or leaves a hole in the forward.
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class StripReport:
    """What was taken out."""

    removed: tuple[str, ...]
    """Names of the modules that are gone, as they were in the model."""
    parameters: tuple[str, ...]
    """Names of the parameters and buffers that nothing in the model holds any more."""
    num_params: int
    nbytes: int
    """Bytes freed: of those parameters and buffers (on meta: what they would take)."""
    kept: tuple[str, ...] = ()
    """Names, below what was removed, of parameters and buffers that the rest of the model shares: they stay there."""
    num_saved: int = 0
    """How many of those freed a checkpoint of the whole model holds: tied ones once, non-persistent buffers not."""

    def line(self) -> str:
        shared = (
            f"; {len(self.kept)} tensors are shared with the rest and stay, the first {self.kept[0]!r}"
            if self.kept
            else ""
        )
        return (
            f"stripped {', '.join(self.removed) or 'nothing'}: {self.num_params:,} parameters, "
            f"{self.nbytes / 2**20:,.1f} MiB freed{shared}"
        )


def strip(model: nn.Module, names: Sequence[str] | None = None) -> StripReport:
    """Take modules out of a model, in place and before sharding. All of the names, or none if one is wrong.

    `names` are dotted module names ("talker", "a.b"; a PEFT model also takes the base model's). None: what the model declares
    in `_lockstep_strip_modules`, which may be nothing. The attribute is None afterwards, so that the model's own
    `if self.talker is not None` goes on working, and a model with `has_talker` is told. What is shared with the rest of the model stays.
    Raises `ModelError` for a name that is no module (naming near ones), was stripped before, or is an entry of a list.
    """
    if isinstance(names, str):
        raise ModelError(f"strip takes a list of module names; the text {names!r} came, give [{names!r}]")
    sharded = next((name for name, param in model.named_parameters() if _is_sharded(param)), None)
    if sharded is not None:
        raise ModelError(f"strip: {sharded} is sharded already; strip before sharding")
    wanted = (getattr(model, DECLARED, None) or ()) if names is None else names
    found = list(dict.fromkeys(_resolve(model, name) for name in wanted))
    outermost = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    before, saved = _tensors(model), {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    for name in outermost:
        _take_out(model, name)
    report = _report(outermost, before, _tensors(model), saved)
    if outermost:
        model.__dict__[_RECORD] = (*model.__dict__.get(_RECORD, ()), report)
    return report


def _is_sharded(param: nn.Parameter) -> bool:
    return isinstance(param, DTensor) or type(param).__name__ == "FlatParameter"


def stripped_from(model: nn.Module) -> list[StripReport]:
    """Reports of everything that `strip` took out of the model, or of a module in it, before it was wrapped or after."""
    return [report for module in model.modules() for report in module.__dict__.get(_RECORD, ())]


def _resolve(model: nn.Module, name: str) -> str:
    """The module's name in this model. Changes nothing."""
    known = {each for each, _ in model.named_modules(remove_duplicate=False) if each}
    full = next((each for each in (name, _PEFT_PREFIX + name) if each in known), None)
    if full is not None:
        parent = model.get_submodule(full.rpartition(".")[0])
        if isinstance(parent, _LISTS):
            raise ModelError(f"strip: {name!r} is an entry of a {type(parent).__name__}; give the whole list's name")
        return full
    if any(_is_stripped(model, each) for each in (name, _PEFT_PREFIX + name)):
        raise ModelError(
            f"strip: {name!r} has been stripped already, or the model never made it: take it out of the list"
        )
    if name in dict(model.named_parameters(remove_duplicate=False)):
        raise ModelError(f"strip: {name!r} is a parameter; expected a module, such as {name.rpartition('.')[0]!r}")
    near = difflib.get_close_matches(name, [each.removeprefix(_PEFT_PREFIX) for each in known], n=4, cutoff=0.5)
    stages = [each for each, _ in model.named_children()]
    raise ModelError(f"strip: the model has no module {name!r}; near it there are {near or stages}")


def _is_stripped(model: nn.Module, name: str) -> bool:
    """Is the name, or what it is in, a slot that holds None?"""
    module: nn.Module | None = model
    for part in name.split("."):
        if part not in module._modules:
            return False
        module = module._modules[part]
        if module is None:
            return True
    return False


def _take_out(model: nn.Module, name: str) -> None:
    parent_name, _, leaf = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    parent._modules[leaf] = None
    # Qwen-Omni asks this flag before it speaks.
    if leaf == "talker" and hasattr(parent, "has_talker"):
        parent.__dict__["has_talker"] = False


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _report(
    removed: Iterable[str], before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], saved: set[int]
) -> StripReport:
    left = {id(tensor) for tensor in after.values()}
    gone = {name: tensor for name, tensor in before.items() if name not in after}
    freed = {name: tensor for name, tensor in gone.items() if id(tensor) not in left}
    unique = {id(tensor): tensor for tensor in freed.values()}
    return StripReport(
        removed=tuple(removed),
        parameters=tuple(freed),
        num_params=sum(tensor.numel() for tensor in unique.values() if isinstance(tensor, nn.Parameter)),
        nbytes=sum(tensor.nbytes for tensor in unique.values()),
        kept=tuple(name for name in gone if name not in freed),
        num_saved=len(unique.keys() & saved),
    )
