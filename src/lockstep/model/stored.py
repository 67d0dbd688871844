"""The names in a checkpoint's files and a model's own plain names in; for every tensor of the model, how it is made of stored ones, out.

Most are stored one to one. Others are renamed or put together (fused experts are stored one file tensor per expert): how, is
transformers' own knowledge (`conversion_mapping`), asked for here tensor by tensor and never written down again.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

ShapeOf = Callable[[str], tuple[int, ...]]
"""Stored name -> shape in the file."""


@dataclass(frozen=True, slots=True)
class Direct:
    """One stored tensor is the model's, shape and all."""

    stored: str


@dataclass(frozen=True, slots=True)
class Built:
    """A conversion of transformers makes the tensor (and perhaps others) out of these."""

    name: str
    """Plain name of the tensor that this is a way to."""
    layer: str
    """Plain name that transformers calls the conversion by: the first tensor that it makes."""
    parts: tuple[tuple[str, str], ...]
    """(pattern of the conversion that it matched, stored name), in the order in which they are put together."""
    converter: Any
    """transformers' `WeightConverter`; copied before each use."""
    shape: tuple[int, ...]
    """What the conversion makes of the stored shapes; not yet compared with the model's."""
    rows: tuple[tuple[tuple[str, str], ...], ...] = ()
    """Where each row (dim 0) has parts of its own, those of each row; empty where only all parts together make the tensor."""

    @property
    def stored(self) -> str:
        return self.parts[0][1]


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """transformers has a conversion for the tensor, which does not work tensor by tensor; only a whole load gives it."""

    stored: str
    reason: str


Source = Direct | Built | Unbuilt


@dataclass(frozen=True, slots=True)
class Matched:
    """What each tensor of the model is made of."""

    sources: dict[str, Source]
    """By plain name. A name that was asked for and is not here has nothing in the files."""
    unused: tuple[str, ...]
    """Stored names that nothing in the model is made of, without those that the model's class says to pass over."""


def match_stored(
    base: nn.Module, wanted: Mapping[str, torch.Tensor], stored: Collection[str], shape_of: ShapeOf
) -> Matched:
    """Pair the plain names in `wanted` (with meta tensors: their shapes and dtypes) with what is stored.

    Pure but for `shape_of`. A model that is not transformers' own is taken name by name.
    """
    names, groups, unused = _rename(base, wanted, stored)
    sources: dict[str, Source] = {plain: Direct(name) for plain, name in names.items()}
    for layer, (converter, parts) in groups.items():
        sources |= _build(converter, layer, tuple(parts), view=_View(base, wanted), shape_of=shape_of)
    passed_over = [re.compile(text) for text in getattr(base, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return Matched(sources, tuple(name for name in unused if not any(each.search(name) for each in passed_over)))


def convert(
    built: Built,
    tensors: Sequence[torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    base: nn.Module,
    *,
    row: int | None = None,
) -> torch.Tensor:
    """The tensor of the model from all its parts, or (with `row`) that row as a tensor of one row, from the row's parts. Pure."""
    parts = built.parts if row is None else built.rows[row]
    return _run(built.converter, built.layer, parts, tensors, _View(base, wanted))[built.name]


class _View:
    """What transformers' operations ask of a model, under plain names whatever PEFT put in between."""

    def __init__(self, base: nn.Module, wanted: Mapping[str, torch.Tensor]):
        self.config = getattr(base, "config", None)
        self._wanted = wanted

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._wanted[name]


_Group = tuple[WeightConverter, list[tuple[str, str]]]


def _rename(
    base: nn.Module, wanted: Mapping[str, torch.Tensor], stored: Collection[str]
) -> tuple[dict[str, str], dict[str, _Group], list[str]]:
    """(plain name -> stored name, first plain name -> conversion and its parts, stored names that match nothing).

    The order of the steps is that of transformers' `convert_and_load_state_dict_in_model`.
    """
    if not isinstance(base, PreTrainedModel):
        own = {name: name for name in stored if name in wanted}
        return own, {}, [name for name in stored if name not in wanted]
    transforms = get_model_conversion_mapping(base)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, known = base.base_model_prefix, dict(wanted)
    names: dict[str, str] = {}
    groups: dict[str, _Group] = {}
    unused: list[str] = []
    for name in sorted(stored, key=dot_natural_key):
        plain, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if plain not in wanted and name in wanted:
            plain, pattern = rename_source_key(name, [], [], prefix, known)
        if plain not in wanted:
            unused.append(name)
        elif pattern is None:
            names.setdefault(plain, name)
        else:
            groups.setdefault(plain, (by_pattern[pattern], []))[1].append((pattern, name))
    return names, groups, unused


def _build(
    converter: WeightConverter, layer: str, parts: tuple[tuple[str, str], ...], *, view: _View, shape_of: ShapeOf
) -> dict[str, Source]:
    """Ways to every tensor that a conversion makes, found out by running it on the meta device."""
    empty = [torch.empty(shape_of(name), device="meta") for _, name in parts]
    try:
        made = _run(converter, layer, parts, empty, view)
    except (ValueError, RuntimeError, KeyError, IndexError, AttributeError, TypeError) as error:
        return {layer: Unbuilt(parts[0][1], f"{type(error).__name__}: {error}")}
    return {
        name: Built(name, layer, parts, converter, tuple(tensor.shape), _rows(converter, parts, tensor))
        for name, tensor in made.items()
    }


def _run(
    converter: WeightConverter,
    layer: str,
    parts: Sequence[tuple[str, str]],
    tensors: Sequence[torch.Tensor],
    view: _View,
) -> dict[str, torch.Tensor]:
    fresh = copy.copy(converter)
    fresh.collected_tensors, fresh.layer_targets = defaultdict(list), defaultdict(set)
    for (pattern, name), tensor in zip(parts, tensors, strict=True):
        fresh.add_tensor(layer, name, pattern, tensor)  # type: ignore[arg-type]
    made = fresh.convert(layer, model=view, config=view.config)  # type: ignore[arg-type]
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def _rows(
    converter: WeightConverter, parts: Sequence[tuple[str, str]], made: torch.Tensor
) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Parts of each row, where the conversion stacks one part per row and then only joins along other dimensions."""
    first, *others = converter.operations
    stacks = isinstance(first, MergeModulelist) and first.dim == 0
    if not stacks or not all(isinstance(each, Concatenate) and each.dim > 0 for each in others):
        return ()
    by_pattern: dict[str, list[tuple[str, str]]] = {}
    for pattern, name in parts:
        by_pattern.setdefault(pattern, []).append((pattern, name))
    if made.dim() == 0 or any(len(each) != made.shape[0] for each in by_pattern.values()):
        return ()
    return tuple(tuple(each[row] for each in by_pattern.values()) for row in range(made.shape[0]))
