"""Which elements of which tensors each rank holds, in; the collectives that bring them together, as data, out. Pure.

Glossary: *travel* a tensor on its way, known by its place in a list · *part* what one rank sends in one collective: its own
elements of several travels, one after another · *window* the parts of all ranks, equally long: one collective.

Every rank computes the same windows from the same ranges, so nothing about them is communicated. Inside a group the ranks'
parts are cut from one byte stream each, so that FSDP1, where one rank holds whole matrices and another rank the others,
pads no more than FSDP2, where each holds rows of all. Between groups all ranks start together: what has arrived on one
rank only never grows beyond a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.sharding.base import Ranges

_ALIGN = 16
"""Every segment starts at a multiple of this many bytes: any dtype can be viewed there."""

_COUNTED_RANKS = 64


@dataclass(frozen=True, slots=True)
class Extent:
    """What the schedule has to know of a travel."""

    ranges: Ranges
    """Elements that each rank holds."""
    itemsize: int
    """Bytes of one element on the wire."""

    def nbytes_on(self, rank: int) -> int:
        start, stop = self.ranges[rank]
        return (stop - start) * self.itemsize

    @property
    def nbytes(self) -> int:
        return sum(self.nbytes_on(rank) for rank in range(len(self.ranges)))


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements `start:stop` of a travel, at `offset` bytes of a rank's part."""

    travel: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Window:
    """One collective."""

    parts: tuple[tuple[Segment, ...], ...]
    """By rank."""
    nbytes: int
    """Length of every part; what a rank does not fill is padding."""
    arrived: tuple[int, ...]
    """Travels that are whole once this window has come."""


def cut(travels: Sequence[int], extents: Sequence[Extent], *, part_bytes: int) -> list[Window]:
    """Windows that bring `travels` (places in `extents`) together, no part longer than `part_bytes` (at least one element)."""
    num_ranks = len(extents[travels[0]].ranges)
    streams = [list(_stream(travels, extents, rank, max(part_bytes, _ALIGN))) for rank in range(num_ranks)]
    num_windows = max(map(len, streams))
    last = {segment.travel: index for parts in streams for index, part in enumerate(parts) for segment in part}
    for parts in streams:
        for index, part in enumerate(parts):
            for segment in part:
                last[segment.travel] = max(last[segment.travel], index)
    # A travel without elements has come with the first window.
    arrived: list[list[int]] = [[] for _ in range(max(num_windows, 1))]
    for travel in travels:
        arrived[last.get(travel, 0)].append(travel)
    return [
        _window(tuple(tuple(parts[index]) if index < len(parts) else () for parts in streams), extents, arrived[index])
        for index in range(max(num_windows, 1))
    ]


def aligned_bytes(travels: Sequence[int], extents: Sequence[Extent], rank: int) -> int:
    """Length of a rank's part if all of these travels went in one window."""
    return sum(aligned(extents[each].nbytes_on(rank)) for each in travels)


def num_windows(travels: Sequence[int], extents: Sequence[Extent], *, part_bytes: int) -> int:
    """How many windows `cut` makes, without making them. On very many ranks the one that holds most stands for all."""
    held = [aligned_bytes(travels, extents, rank) for rank in range(len(extents[0].ranges))]
    limit = max(part_bytes, _ALIGN)
    if max(held) <= limit:
        return 1
    ranks = range(len(held)) if len(held) <= _COUNTED_RANKS else [held.index(max(held))]
    return max(sum(1 for _ in _stream(travels, extents, rank, limit)) for rank in ranks)


def _window(parts: tuple[tuple[Segment, ...], ...], extents: Sequence[Extent], arrived: list[int]) -> Window:
    ends = [
        segment.offset + (segment.stop - segment.start) * extents[segment.travel].itemsize
        for part in parts
        for segment in part[-1:]
    ]
    return Window(parts, aligned(max(ends, default=0)), tuple(arrived))


def _stream(travels: Sequence[int], extents: Sequence[Extent], rank: int, limit: int) -> Iterator[list[Segment]]:
    """One rank's elements of all travels, in order, cut into parts of at most `limit` bytes."""
    part: list[Segment] = []
    offset = 0
    for travel in travels:
        itemsize = extents[travel].itemsize
        start, stop = extents[travel].ranges[rank]
        while start < stop:
            room = (limit - offset) // itemsize
            if room <= 0:
                yield part
                part, offset = [], 0
                continue
            end = min(stop, start + room)
            part.append(Segment(travel, start, end, offset))
            offset = aligned(offset + (end - start) * itemsize)
            start = end
    if part:
        yield part


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def group(
    deliveries: Sequence[Sequence[int]], extents: Sequence[Extent], units: Sequence[int] | None, *, group_bytes: int
) -> list[tuple[int, ...]]:
    """Put deliveries (travels that are needed together) into groups of at most `group_bytes`; places of deliveries, in order.

    A delivery larger than that has a group to itself. `units` (the unit of each delivery) is given where bytes lie evenly
    on the ranks only over a whole unit, as in FSDP1's flat parameters: a group then ends only where a unit does.
    """
    groups: list[tuple[int, ...]] = []
    current: list[int] = []
    held = 0
    for place, travels in enumerate(deliveries):
        added = sum(extents[travel].nbytes for travel in travels)
        may_end = units is None or (place > 0 and units[place] != units[place - 1])
        if current and may_end and held + added > group_bytes:
            groups.append(tuple(current))
            current, held = [], 0
        current.append(place)
        held += added
    return [*groups, tuple(current)] if current else groups
