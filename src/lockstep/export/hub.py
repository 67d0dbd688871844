"""A skeleton in; the tensors of the hub checkpoint that a full or merged export carries out: their names, and what makes them.

The names are those of the file that `save_pretrained` of the plain model would write, and transformers itself makes them, on
tensors without values: fused experts come apart, prefixes are put back, of tied weights one name is kept, what is not saved is
left out. Models that are not transformers' keep the plain names of their state dict.

*plain name* a tensor's name in the base model without PEFT · *hub name* its name in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from lockstep.errors import IncompleteExport
from lockstep.export.merge import RowsMerge
from lockstep.export.merge_plan import Merges, plan_merges
from lockstep.export.peft_state import kind_of
from lockstep.model.peft_tree import adapters_of, check_unmerged, join, plain_model, walk_plain
from lockstep.model.strip import stripped_from
from lockstep.names import checkpoint_name
from lockstep.types import TensorSpec

_PLAIN: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
"""Skeleton -> its base model without PEFT: made once, asked for every tensor that is converted."""


@dataclass(frozen=True, slots=True)
class HubTensor:
    """One tensor of the model, or a few that are saved together, and what they become in the checkpoint."""

    sources: tuple[str, ...]
    """Live names whose whole (merged) values are needed. Of tied weights: the name under which the value is the right one."""
    names: tuple[str, ...]
    """The sources' plain names."""
    outputs: tuple[TensorSpec, ...]
    is_plain: bool
    """One source, one output, the same values in the same shape."""


@dataclass(frozen=True, slots=True)
class HubPlan:
    """Everything that a full or merged export carries."""

    tensors: tuple[HubTensor, ...]
    notes: tuple[str, ...]
    """What whoever loads the checkpoint has to know, in sentences."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor of the plain model's state dict."""

    name: str
    live: str
    tensor: torch.Tensor
    value: tuple[object, ...]
    """Equal for two slots exactly when they hold the same values for sure: one tensor, changed by one adapter module."""


def hub_plan(model: nn.Module, *, adapter: str | None, untie: bool = False, merges: Merges | None = None) -> HubPlan:
    """What a full export (`adapter` None: the base as it is) or a merged one carries, in the model's order. Pure.

    `untie`: weights that are tied in the base and differ once merged are exported both, each as PEFT's own forward uses it.
    Raises `IncompleteExport` for such weights otherwise, for an adapter that PEFT merged into the live model, and where
    transformers' own conversion cannot be followed tensor by tensor.
    """
    check_unmerged(model)
    _refuse_kind(model)
    if adapter is not None and merges is None:
        merges = plan_merges(model, adapter)
    slots = _slots(model, adapter, merges or Merges())
    notes = _check_ties(model, slots, untie=untie) if adapter is not None else ()
    notes += _what_is_missing(model)
    plain = _plain_of(model)
    if not isinstance(plain, PreTrainedModel):
        return HubPlan(tuple(_plain_tensor(slot, slot.name) for slot in _first_of_each(slots.values())), notes)
    saved = _saved(plain, slots)
    return HubPlan(_converted(plain, saved), notes)


def hub_tensors(model: nn.Module, *, adapter: str | None, untie: bool = False) -> tuple[HubTensor, ...]:
    """`hub_plan` without its notes."""
    return hub_plan(model, adapter=adapter, untie=untie).tensors


def to_hub(model: nn.Module, tensor: HubTensor, values: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors, made of the sources' whole values, in the order of `tensor.outputs`.

    They may share memory with `values`. Raises `IncompleteExport` when shapes or names are not those that were planned.
    """
    if tensor.is_plain:
        made = {tensor.outputs[0].name: values[0]}
    else:
        made = _revert(_plain_of(model), dict(zip(tensor.names, values, strict=True)))
    for spec in tensor.outputs:
        came = made.get(spec.name)
        if came is None or tuple(came.shape) != spec.shape or len(made) != len(tensor.outputs):
            shape = None if came is None else list(came.shape)
            raise IncompleteExport(f"{spec.name}: planned {list(spec.shape)}, made {shape} of {list(tensor.sources)}")
    return [(spec.name, made[spec.name].contiguous()) for spec in tensor.outputs]


def plain_names(model: nn.Module, adapter: str | None = None) -> dict[str, str]:
    """Live name -> plain name of every parameter and persistent buffer of the base model, aliases of tied ones too."""
    return {slot.live: slot.name for slot in _slots(model, adapter, Merges()).values()}


def _refuse_kind(model: nn.Module) -> None:
    for adapter in adapters_of(model):
        kind = kind_of(model, adapter)
        if kind.is_adaption_prompt:
            raise IncompleteExport(
                f"adapter {adapter!r} is {kind.name}: PEFT put it around attention modules in a way in which the base's names "
                "cannot be followed; export the adapter, or the base from a model without it"
            )


def _plain_of(model: nn.Module) -> nn.Module:
    if model not in _PLAIN:
        plain = plain_model(model)
        if plain is model:
            return model
        _PLAIN[model] = plain
    return _PLAIN[model]


def _slots(model: nn.Module, adapter: str | None, merges: Merges) -> dict[str, _Slot]:
    """Plain name -> slot, of what the plain model's state dict holds."""
    slots = {}
    dropped = {name for merge in merges.scratch for name in merge.dropped}
    specs = {
        merge.dequantised.name: torch.empty(merge.dequantised.shape, dtype=merge.dequantised.dtype, device="meta")
        for merge in merges.scratch
        if merge.dequantised is not None
    }
    for module in walk_plain(model, adapter):
        buffers = {
            name: buffer
            for name, buffer in module.module._buffers.items()
            if name not in module.module._non_persistent_buffers_set
        }
        for attr, tensor in (module.module._parameters | buffers).items():
            live, name = join(module.live, attr), join(module.name, attr)
            if tensor is not None and live not in dropped:
                value = (id(tensor), *_change(model, merges, live))
                slots[name] = _Slot(name, live, specs.get(live, tensor), value)
    return slots


def _change(model: nn.Module, merges: Merges, live: str) -> tuple[object, ...]:
    """What a merge does to a tensor, comparable: adapters that share one set of trained tokens do the same."""
    merge = merges.of(live)
    if merge is None:
        return ()
    names = (merge.a, merge.b) if isinstance(merge, RowsMerge) else merge.inputs
    changed_by = [name for name in names if name != live]
    return tuple(id(_tensor(model, name)) for name in changed_by)


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    path, _, attr = name.rpartition(".")
    return getattr(model.get_submodule(path), attr)


def _check_ties(model: nn.Module, slots: Mapping[str, _Slot], *, untie: bool) -> tuple[str, ...]:
    """Weights that are tied in the base must still be equal once merged. Notes on those that are exported apart."""
    groups: dict[int, list[str]] = {}
    for slot in _slots(model, None, Merges()).values():
        if slot.name in slots:
            groups.setdefault(id(slot.tensor), []).append(slot.name)
    notes = []
    for names in groups.values():
        first = names[0]
        other = next((name for name in names if slots[name].value != slots[first].value), None)
        if other is None:
            continue
        if not untie:
            raise IncompleteExport(
                f"{first!r} and {other!r} are tied in the base model, and with the adapter merged they differ: a checkpoint of the tied "
                "model cannot hold both. Export the adapter, train both alike (PEFT: ensure_weight_tying=True), or pass "
                "MergedExport(untie=True) and load the result with tie_word_embeddings=False"
            )
        notes.append(
            f"{other} is exported apart from {first}, to which it is tied in the base model: load with tie_word_embeddings=False"
        )
    return tuple(notes)


def _what_is_missing(model: nn.Module) -> tuple[str, ...]:
    """A note on each lot of stages that were taken out: whoever serves the export needs them from the original checkpoint."""
    return tuple(
        f"{', '.join(map(checkpoint_name, report.removed))} stripped before training: {report.num_saved} tensors of the whole "
        "model are not in this export, which is a part of its checkpoint; take them from the original one"
        for report in stripped_from(model)
    )


def _first_of_each(slots: Iterable[_Slot]) -> list[_Slot]:
    return list({slot.value: slot for slot in reversed(list(slots))}.values())[::-1]


def _saved(plain: PreTrainedModel, slots: Mapping[str, _Slot]) -> dict[str, _Slot]:
    """The slots that `save_pretrained` keeps: without what the model says it does not save, and of equal ones one."""
    ignored = set(plain._keys_to_ignore_on_save or ())
    kept = {name: slot for name, slot in slots.items() if name not in ignored}
    stand_ins: dict[tuple[object, ...], torch.Tensor] = {}
    for slot in kept.values():
        stand_ins.setdefault(slot.value, torch.zeros(1))
    if len(stand_ins) == len(kept):
        return kept
    try:
        left = remove_tied_weights_from_state_dict({name: stand_ins[slot.value] for name, slot in kept.items()}, plain)
    except RuntimeError as error:
        raise IncompleteExport(
            f"transformers cannot save {type(plain).__name__}, so it has no checkpoint names: {error}"
        ) from error
    return {name: slot for name, slot in kept.items() if name in left}


def _converted(plain: PreTrainedModel, saved: Mapping[str, _Slot]) -> tuple[HubTensor, ...]:
    """The whole conversion once, without values; then what it makes of each tensor that it does more to than rename."""
    state = {name: slot.tensor.detach() for name, slot in saved.items()}  # one object per name, also for tied weights
    whole = _revert(plain, state)
    source = {id(tensor): name for name, tensor in state.items()}
    renamed = {source[id(tensor)]: name for name, tensor in whole.items() if id(tensor) in source}
    made = {name: tensor for name, tensor in whole.items() if id(tensor) not in source}
    groups = _group(plain, {name: state[name] for name in saved if name not in renamed}, made)
    tensors = []
    for name, slot in saved.items():
        if name in renamed:
            tensors.append(_plain_tensor(slot, renamed[name]))
        elif name in groups:
            names, outputs = groups[name]
            lives = tuple(saved[each].live for each in names)
            specs = tuple(TensorSpec(key, tuple(value.shape), value.dtype) for key, value in outputs.items())
            tensors.append(HubTensor(lives, names, specs, False))
    return tuple(tensors)


_Group = tuple[tuple[str, ...], dict[str, torch.Tensor]]


def _group(
    plain: PreTrainedModel, sources: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]
) -> dict[str, _Group]:
    """First source's name -> (sources, outputs) of the smallest groups that are converted alone as in the whole.

    Tensors of one module, then of its parent and so on, are tried together until every wanted output is made exactly once.
    """
    groups: dict[str, _Group] = {}
    left, missing = dict(sources), dict(wanted)
    for depth in range(max((name.count(".") for name in sources), default=0) + 2):
        by_parent: dict[str, list[str]] = {}
        for name in left:
            parts = name.split(".")
            by_parent.setdefault(".".join(parts[: max(0, len(parts) - depth)]), []).append(name)
        tried = {tuple(names): _try(plain, {name: left[name] for name in names}) for names in by_parent.values()}
        makers: dict[str, int] = {}
        for outputs in tried.values():
            for name in outputs:
                makers[name] = makers.get(name, 0) + 1
        for names, outputs in tried.items():
            if outputs and all(
                makers[key] == 1 and _is_same(missing.get(key), value) for key, value in outputs.items()
            ):
                groups[names[0]] = (names, outputs)
                missing = {key: value for key, value in missing.items() if key not in outputs}
                left = {name: value for name, value in left.items() if name not in names}
        if not left and not missing:
            return groups
    raise IncompleteExport(
        f"transformers' conversion of {type(plain).__name__} cannot be followed tensor by tensor: sources {sorted(left)[:3]}, outputs "
        f"{sorted(missing)[:3]}. Export the adapter instead"
    )


def _try(plain: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the conversion makes of some tensors alone; nothing where it needs others beside them."""
    try:
        return _revert(plain, state)
    except (RuntimeError, ValueError, KeyError, IndexError):
        return {}  # a larger group is tried next, and the last one raises


def _is_same(left: torch.Tensor | None, right: torch.Tensor) -> bool:
    return left is not None and left.shape == right.shape and left.dtype == right.dtype


def _revert(plain: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    assert isinstance(plain, PreTrainedModel)
    return revert_weight_conversion(plain, state)


def _plain_tensor(slot: _Slot, name: str) -> HubTensor:
    spec = TensorSpec(name, tuple(slot.tensor.shape), slot.tensor.dtype)
    return HubTensor((slot.live,), (slot.name,), (spec,), True)
