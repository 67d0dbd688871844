"""A window of a schedule in; how flat buffers split into its segments and into whole tensors, as sizes, out. Pure.

An adapter is hundreds of small tensors. Cutting a buffer into views one at a time takes longer than moving its bytes;
`split_with_sizes` makes all of them in one call, from sizes that are computed once per plan.

Glossary: *arena* one piece of memory for all tensors that a window brings whole · *place* where one segment lies in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.export.schedule import Extent, Segment, Window, aligned


@dataclass(frozen=True, slots=True)
class Split:
    """Views of a flat buffer of bytes, disjoint and in order."""

    dtype: torch.dtype
    """Of the views; uint8 where what they stand for differs."""
    nbytes: int
    sizes: tuple[int, ...]
    """Elements of views and of the gaps between them."""
    picked: tuple[int, ...] | None
    """Which of the sizes are views; None: there is no gap."""

    def of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        if not self.sizes:
            return []
        views = list(flat[: self.nbytes].view(self.dtype).split_with_sizes(self.sizes))
        return views if self.picked is None else [views[index] for index in self.picked]


@dataclass(frozen=True, slots=True)
class Arena:
    """Where everything of a window belongs that brings all of its tensors whole."""

    nbytes: int
    travels: tuple[int, ...]
    tensors: Split
    """One view per travel."""
    places: Split
    """One view per segment of any rank, by travel and then by rank."""
    of_rank: tuple[tuple[int, ...], ...]
    """By rank: which places its segments have, in the order of its part."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A window and its splits."""

    window: Window
    parts: tuple[Split, ...]
    """By rank: its part into its segments."""
    arena: Arena | None
    """None for a window of one tensor, or of parts of tensors: those are put together one by one."""


def lay_out(window: Window, extents: Sequence[Extent], dtypes: Sequence[torch.dtype]) -> Layout:
    """`dtypes` are those of all travels, on the wire."""
    travels = sorted({segment.travel for part in window.parts for segment in part})
    kinds = {dtypes[travel] for travel in travels}
    dtype = kinds.pop() if len(kinds) == 1 else torch.uint8
    parts = tuple(
        _split([(each.offset, nbytes_of(each, extents)) for each in part], dtype=dtype) for part in window.parts
    )
    return Layout(window, parts, _arena(window, travels, extents, dtype=dtype))


def nbytes_of(segment: Segment, extents: Sequence[Extent]) -> int:
    return (segment.stop - segment.start) * extents[segment.travel].itemsize


def _arena(window: Window, travels: Sequence[int], extents: Sequence[Extent], *, dtype: torch.dtype) -> Arena | None:
    coming = dict.fromkeys(travels, 0)
    for part in window.parts:
        for segment in part:
            coming[segment.travel] += nbytes_of(segment, extents)
    if len(travels) < 2 or any(coming[travel] != extents[travel].nbytes for travel in travels):
        return None
    starts: dict[int, int] = {}
    end = 0
    for travel in travels:
        starts[travel] = end
        end = aligned(end + coming[travel])
    placed = sorted(
        (starts[each.travel] + each.start * extents[each.travel].itemsize, rank, index, nbytes_of(each, extents))
        for rank, part in enumerate(window.parts)
        for index, each in enumerate(part)
    )
    of_rank: list[list[int]] = [[0] * len(part) for part in window.parts]
    for place, (_, rank, index, _) in enumerate(placed):
        of_rank[rank][index] = place
    return Arena(
        end,
        tuple(travels),
        _split([(starts[travel], coming[travel]) for travel in travels], dtype=dtype),
        _split([(offset, nbytes) for offset, _, _, nbytes in placed], dtype=dtype),
        tuple(map(tuple, of_rank)),
    )


def _split(pieces: Sequence[tuple[int, int]], *, dtype: torch.dtype) -> Split:
    """Of (offset, length) pairs in bytes, ascending."""
    sizes: list[int] = []
    picked: list[int] = []
    end = 0
    for offset, nbytes in pieces:
        if offset > end:
            sizes.append((offset - end) // dtype.itemsize)
        picked.append(len(sizes))
        sizes.append(nbytes // dtype.itemsize)
        end = offset + nbytes
    return Split(dtype, end, tuple(sizes), None if len(picked) == len(sizes) else tuple(picked))
