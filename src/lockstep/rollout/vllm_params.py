"""vLLM's model and an update's tensor list in; where each of those tensors ends up among vLLM's own parameters out.

vLLM keeps several checkpoint tensors in one parameter (q, k and v; gate and up), pads vocabularies, and wraps modules that
take LoRA. Writing is left to its own `load_weights`; this says where to look afterwards, so that what is served can be read
back. Nothing here imports vllm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.errors import TransportError
from lockstep.types import TensorSpec


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tensors of an update are."""

    views: Mapping[str, Tensor]
    """By checkpoint name: rows of a parameter, of the tensor's own shape. They can be read back."""
    elsewhere: tuple[str, ...]
    """Checkpoint names whose place is not known: vLLM's loader puts them where it sees fit. Verified on arrival only."""
    untouched: tuple[str, ...]
    """vLLM's names of the parameters that no view covers; a tied one under its first name."""


def live_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by vLLM's name without LoRA's wrapping; tied ones under each of their names."""
    return {
        ".".join(part for part in name.split(".") if part != "base_layer"): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def packed_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that were emptied when they were packed for a kernel: they cannot be written."""
    return [name for name, parameter in live_parameters(model).items() if parameter.numel() == 0]


def find_places(model: nn.Module, specs: Sequence[TensorSpec]) -> Places:
    """See `Places`. Raises `TransportError` where a tensor and its parameter differ in dtype, or tied tensors come twice."""
    live = live_parameters(model)
    by_name = {_renamed(model, spec.name): spec for spec in specs}
    views: dict[str, Tensor] = {}
    for name, spec in by_name.items():
        if name in live and (view := _rows(live[name], 0, spec)) is not None:
            views[spec.name] = view
    touched = {id(live[name]) for name, spec in by_name.items() if spec.name in views}
    for name, parts in _fused(model, live, by_name).items():
        found = _split(live[name], [by_name[part] for part in parts])
        views |= found
        if found:
            touched.add(id(live[name]))
    _check_dtypes(specs, views)
    _check_ties(views)
    untouched = {id(parameter): name for name, parameter in reversed(live.items()) if id(parameter) not in touched}
    return Places(views, tuple(spec.name for spec in specs if spec.name not in views), tuple(untouched.values()))


def _renamed(model: nn.Module, name: str) -> str:
    """vLLM's name of a checkpoint tensor before anything is fused; the name itself where vLLM renames nothing."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name
    return mapper.get_rename_mapper()._map_name(name) or name


def _fused(model: nn.Module, live: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, list[str]]:
    """Fused parameter -> its parts in order. Raises `TransportError` where the update has some of them: vLLM's loader would
    report the parameter as loaded."""
    given = set(names)
    mapping: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
    found: dict[str, list[str]] = {}
    for name in live:
        prefix, _, kind = name.rpartition(".")
        head, _, module = prefix.rpartition(".")
        parts = [f"{head}.{part}.{kind}" for part in mapping.get(module, ())]
        missing = [part for part in parts if part not in given]
        if missing and len(missing) < len(parts):
            raise TransportError(f"the update leaves out {missing}, parts of vLLM's {name}; send all of {parts}")
        if len(parts) > 1 and not missing:
            found[name] = parts
    return found


def _split(fused: Tensor, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Parts one after the other along the first dimension; nothing where their sizes do not add up to the parameter's."""
    if any(not spec.shape for spec in specs) or sum(spec.shape[0] for spec in specs) != fused.shape[0]:
        return {}
    views, first = {}, 0
    for spec in specs:
        view = _rows(fused, first, spec)
        if view is None:
            return {}
        views[spec.name] = view
        first += spec.shape[0]
    return views


def _rows(parameter: Tensor, first: int, spec: TensorSpec) -> Tensor | None:
    """Rows [first, first + n) of the parameter as a tensor of the shape of `spec`; None if it has no such rows."""
    if not spec.shape or not parameter.ndim:
        return parameter.data if tuple(parameter.shape) == spec.shape else None
    last = first + spec.shape[0]
    if tuple(parameter.shape[1:]) != spec.shape[1:] or parameter.shape[0] < last:
        return None
    return parameter.data[first:last]


def _check_dtypes(specs: Sequence[TensorSpec], views: Mapping[str, Tensor]) -> None:
    for spec in specs:
        if spec.name in views and views[spec.name].dtype != spec.dtype:
            raise TransportError(
                f"tensor {spec.name!r} comes as {spec.dtype}, vLLM's parameter is {views[spec.name].dtype}; nothing is cast "
                "silently: export in the engine's dtype, or start the engine in the exported one"
            )


def _check_ties(views: Mapping[str, Tensor]) -> None:
    seen: dict[tuple[int, int], str] = {}
    for name, view in views.items():
        place = (view.data_ptr(), view.numel())
        if view.numel() and place in seen:
            raise TransportError(f"tied tensors {[seen[place], name]} are one in the engine; list them under one name")
        seen[place] = name


def describe_base(model: nn.Module) -> dict[str, Any]:
    """JSON-able facts about the base's parameters: how many, dtypes, which are packed."""
    live = live_parameters(model)
    return {
        "num_parameters": len({id(parameter) for parameter in live.values()}),
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in live.values()}),
        "packed": packed_parameters(model)[:3],
    }
