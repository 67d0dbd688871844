"""A checkpoint's files and a range of elements of one of the model's tensors in; those elements, and little else read, out.

A `Reader` never holds more than the rows that cover the range (where a tensor is stored one to one, or row by row), or the
parts of one tensor (where a conversion needs all of them), and nothing once it has answered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from lockstep.errors import ModelError
from lockstep.model.load import ModelFiles, load_whole
from lockstep.model.stored import Built, Direct, Matched, Source, Unbuilt, convert, match_stored

_PLAIN_FLOATS = ("F64", "F32", "F16", "BF16")


class Reader:
    """Reads elements of a model's tensors, by plain name. Use as a context manager: it keeps the files open."""

    def __init__(self, files: ModelFiles, base: nn.Module, wanted: Mapping[str, torch.Tensor], *, attention: str):
        """`base`: the model, PEFT's layers in it or not; `wanted`: its tensors by plain name, on meta.

        Raises `ModelError` for a damaged file, and for an index that names the wrong file for a tensor.
        """
        self._files = files
        self._base = base
        self._wanted = wanted
        self._attention = attention
        self._whole: Mapping[str, torch.Tensor] | None = None
        self._stack = ExitStack()
        self._handles = {path: self._open(path) for path in dict.fromkeys(files.weights.values())}
        held = {path: handle.offset_keys() for path, handle in self._handles.items()}
        self._place = {name: place for place, name in enumerate(name for names in held.values() for name in names)}
        _check_index(files, held)
        self.matched: Matched = match_stored(base, wanted, files.weights, lambda name: self._shape(name))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def place(self, name: str) -> int:
        """Where in the files a tensor stands: reading in ascending order reads them from front to back."""
        return self._place.get(self.matched.sources[name].stored, 0)

    def unbuilt(self) -> dict[str, Unbuilt]:
        """What only a whole load through transformers can give."""
        return {name: source for name, source in self.matched.sources.items() if isinstance(source, Unbuilt)}

    def check(self, name: str) -> None:
        """Raises `ModelError` unless the tensor is in the files, in the model's shape and in a dtype that can be cast."""
        source, empty = self.matched.sources.get(name), self._wanted[name]
        if source is None:
            raise ModelError(f"{name!r} is not in {self._files.path}")
        if isinstance(source, Direct) and self._shape(source.stored) != tuple(empty.shape):
            raise ModelError(
                f"{self._files.path}: {source.stored!r} is stored as {list(self._shape(source.stored))}; "
                f"the model has {list(empty.shape)}"
            )
        if isinstance(source, Built) and source.shape != tuple(empty.shape):
            raise ModelError(
                f"{self._files.path}: {len(source.parts)} tensors, the first {source.stored!r}, make {name!r} "
                f"{list(source.shape)}; the model has {list(empty.shape)}"
            )
        for stored in _stored_names(source):
            kind = self._slice(stored).get_dtype()
            if (kind in _PLAIN_FLOATS) != (empty.dtype.is_floating_point and empty.dtype.itemsize > 1):
                raise ModelError(
                    f"{self._files.path}: {stored!r} is stored as {kind}; the model's {name!r} is {empty.dtype}. Quantised "
                    "weights are not cast: load the model yourself on rank 0, or give a checkpoint in plain floats"
                )

    def read(self, name: str, start: int, stop: int, *, dim: int = 0) -> torch.Tensor:
        """Elements [start, stop) in row-major order of the tensor with `dim` moved to the front; 1-D, in the model's dtype."""
        source, empty = self.matched.sources[name], self._wanted[name]
        if start >= stop:
            return torch.empty(0, dtype=empty.dtype)
        row_numel = max(empty.numel() // empty.shape[dim], 1) if empty.dim() else 1
        first, last = start // row_numel, -(-stop // row_numel)
        if isinstance(source, Built) and source.rows and dim == 0:
            return self._read_by_row(source, empty.dtype, start, stop, row_numel)
        if isinstance(source, Direct) and empty.dim():
            rows = self._take(source.stored, (slice(None),) * dim + (slice(first, last),)).to(empty.dtype)
        else:
            rows, first = self._read_whole(source, name).to(empty.dtype), 0
        flat = (rows.movedim(dim, 0) if dim else rows).reshape(-1)
        return flat[start - first * row_numel : stop - first * row_numel]

    def read_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, in the model's dtype and shape."""
        empty = self._wanted[name]
        return self.read(name, 0, empty.numel()).reshape(empty.shape)

    def _read_by_row(self, source: Built, dtype: torch.dtype, start: int, stop: int, row_numel: int) -> torch.Tensor:
        out = torch.empty(stop - start, dtype=dtype)
        for row in range(start // row_numel, -(-stop // row_numel)):
            begin, end = max(start, row * row_numel), min(stop, (row + 1) * row_numel)
            piece = slice(begin - row * row_numel, end - row * row_numel)
            out[begin - start : end - start] = self._read_row(source, row, dtype)[piece]
        return out

    def _read_row(self, source: Built, row: int, dtype: torch.dtype) -> torch.Tensor:
        parts = [self._take(stored).to(dtype) for _, stored in source.rows[row]]
        return convert(source, parts, self._wanted, self._base, row=row).reshape(-1)

    def _read_whole(self, source: Source, name: str) -> torch.Tensor:
        if isinstance(source, Direct):
            return self._take(source.stored)
        if isinstance(source, Built):
            dtype = self._wanted[name].dtype
            parts = [self._take(stored).to(dtype) for _, stored in source.parts]
            return convert(source, parts, self._wanted, self._base)
        if self._whole is None:
            dtype = self._wanted[name].dtype
            model = load_whole(self._files, dtype=dtype, attention=self._attention, device=torch.device("cpu"))
            self._whole = model.state_dict()
        return self._whole[name]

    def _take(self, stored: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """The one place where bytes are read."""
        if not index:
            return self._handles[self._files.weights[stored]].get_tensor(stored)
        return self._slice(stored)[index]

    def _slice(self, stored: str) -> Any:
        return self._handles[self._files.weights[stored]].get_slice(stored)

    def _shape(self, stored: str) -> tuple[int, ...]:
        return tuple(self._slice(stored).get_shape())

    def _open(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error


def _check_index(files: ModelFiles, held: Mapping[Path, Collection[str]]) -> None:
    sets = {path: frozenset(names) for path, names in held.items()}
    for name, path in files.weights.items():
        if name not in sets[path]:
            where = next((f"it is in {other.name}" for other, names in sets.items() if name in names), "no file has it")
            raise ModelError(
                f"{path} does not hold {name!r}, although the index of {files.path} says so ({where}): index and files are of "
                "different checkpoints; write or copy both anew"
            )


def _stored_names(source: Source) -> list[str]:
    return [name for _, name in source.parts] if isinstance(source, Built) else [source.stored]
