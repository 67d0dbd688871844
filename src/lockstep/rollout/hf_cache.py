"""Keys and values of rows that grow a token at a time, in buffers with room for more; rows and columns are taken out.

transformers' `DynamicLayer` grows by concatenation, which copies the whole cache at every token: 50 of the 360 ms of a
decode step (SmolLM2-135M, 64 rows of 47 tokens, one core). Here a token is written into room that was kept for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """Keys and values [rows, heads, columns, width] of one layer: the written part of buffers with room for more."""

    keys: Tensor
    values: Tensor

    def __init__(self, room: int):
        super().__init__()
        self._room = room

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append columns; returns all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.hold(_empty(key_states, self._room), _empty(value_states, self._room), 0)
        start = self.keys.shape[2]
        stop = start + key_states.shape[2]
        self._key_buffer[:, :, start:stop] = key_states
        self._value_buffer[:, :, start:stop] = value_states
        self.hold(self._key_buffer, self._value_buffer, stop)
        return self.keys, self.values

    def hold(self, key_buffer: Tensor, value_buffer: Tensor, num_columns: int) -> None:
        """Use these buffers, of which `num_columns` are written."""
        self._key_buffer, self._value_buffer = key_buffer, value_buffer
        self.keys, self.values = key_buffer[:, :, :num_columns], value_buffer[:, :, :num_columns]


@dataclass(frozen=True, slots=True)
class Take:
    """What to copy of a cache: rows (repeats allowed) and columns (None: all)."""

    cache: Cache
    rows: Tensor
    columns: Tensor | None = None

    @property
    def num_columns(self) -> int:
        return self.cache.get_seq_length() if self.columns is None else len(self.columns)


def new_cache(room: int) -> Cache:
    """An empty cache with room for `room` columns; its layers come into being as the model asks for them."""
    return Cache(layer_class_to_replicate=partial(GrowingLayer, room))  # pyright: ignore[reportArgumentType]


def join(parts: Sequence[Take], *, room: int) -> Cache:
    """A new cache: the parts' rows below each other, aligned at their last column, with room for `room` more columns.

    What is before a shorter part's first column is zero, and must be masked. The parts keep what they have.
    """
    num_layers = len(parts[0].cache.layers)
    return Cache(layers=[_join_layer(parts, layer, room) for layer in range(num_layers)])


def shrink(take: Take, *, room: int) -> None:
    """Keep only the rows and columns taken, in place. Layer by layer: never more than one layer is there twice."""
    for layer in range(len(take.cache.layers)):
        take.cache.layers[layer] = _join_layer([take], layer, room)


def _join_layer(parts: Sequence[Take], index: int, room: int) -> GrowingLayer:
    layers = [_layer(part.cache, index) for part in parts]
    num_columns = max(part.num_columns for part in parts)
    joined = GrowingLayer(room)
    joined.lazy_initialization(layers[0].keys, layers[0].values)
    joined.hold(
        _join([layer.keys for layer in layers], parts, num_columns, room),
        _join([layer.values for layer in layers], parts, num_columns, room),
        num_columns,
    )
    return joined


def _join(states: Sequence[Tensor], parts: Sequence[Take], num_columns: int, room: int) -> Tensor:
    num_rows = sum(len(part.rows) for part in parts)
    _, heads, _, width = states[0].shape
    buffer = states[0].new_zeros(num_rows, heads, num_columns + room, width)
    row = 0
    for state, part in zip(states, parts, strict=True):
        taken = state.index_select(0, part.rows)
        taken = taken if part.columns is None else taken.index_select(2, part.columns)
        buffer[row : row + len(part.rows), :, num_columns - taken.shape[2] : num_columns] = taken
        row += len(part.rows)
    return buffer


def _layer(cache: Cache, index: int) -> GrowingLayer:
    layer = cache.layers[index]
    assert isinstance(layer, GrowingLayer), f"layer {index} of the cache is a {type(layer).__name__}"
    return layer


def _empty(states: Tensor, room: int) -> Tensor:
    rows, heads, _, width = states.shape
    return torch.empty(rows, heads, room, width, dtype=states.dtype, device=states.device)
