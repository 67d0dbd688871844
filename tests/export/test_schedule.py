"""Windows bring every element of every travel exactly once, within the part's limit, for any way of dealing elements out."""

import itertools
import random

import pytest

from lockstep.export.schedule import Extent, cut, group
from lockstep.sharding.fsdp2 import row_ranges


def random_extents(rng: random.Random, num_ranks: int) -> list[Extent]:
    extents = []
    for _ in range(rng.randint(1, 6)):
        numel = rng.choice([0, 1, 3, 17, 1000])
        kind = rng.choice(["rows", "anywhere", "one"])
        if kind == "rows":
            ranges = row_ranges(numel, 1, num_ranks)
        elif kind == "one":
            ranges = ((0, numel), *[(numel, numel)] * (num_ranks - 1))
        else:
            bounds = [0, *sorted(rng.randint(0, numel) for _ in range(num_ranks - 1)), numel]
            ranges = tuple(itertools.pairwise(bounds))
        extents.append(Extent(tuple(ranges), rng.choice([1, 2, 4, 8])))
    return extents


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_element_comes_once_from_the_rank_that_holds_it(num_ranks):
    rng = random.Random(num_ranks)
    for _ in range(200):
        extents = random_extents(rng, num_ranks)
        limit = rng.choice([1, 16, 64, 1000, 1 << 20])
        windows = cut(list(range(len(extents))), extents, part_bytes=limit)
        seen: dict[int, list[tuple[int, int, int]]] = {}
        arrived = []
        for window in windows:
            for rank, part in enumerate(window.parts):
                end = 0
                for segment in part:
                    nbytes = (segment.stop - segment.start) * extents[segment.travel].itemsize
                    assert segment.offset >= end and segment.offset % 16 == 0 and nbytes > 0
                    end = segment.offset + nbytes
                    assert segment.travel not in arrived
                    low, high = extents[segment.travel].ranges[rank]
                    assert low <= segment.start < segment.stop <= high
                    seen.setdefault(segment.travel, []).append((segment.start, segment.stop, rank))
                assert end <= window.nbytes <= limit + 15 and (limit < 16 or end <= limit)
            arrived += window.arrived
        assert sorted(arrived) == list(range(len(extents)))
        for travel, extent in enumerate(extents):
            pieces = sorted(seen.get(travel, []))
            assert sum(stop - start for start, stop, _ in pieces) * extent.itemsize == extent.nbytes
            assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))


def test_groups_end_before_they_grow_too_large_and_where_bytes_lie_evenly():
    extents = [Extent(row_ranges(size, 1, 2), 1) for size in (40, 40, 40, 500, 10, 10)]
    deliveries = [[place] for place in range(6)]
    assert group(deliveries, extents, None, group_bytes=100) == [(0, 1), (2,), (3,), (4, 5)]
    assert group(deliveries, extents, [0, 0, 0, 1, 1, 2], group_bytes=100) == [(0, 1, 2), (3, 4), (5,)]
    assert group([], [], None, group_bytes=100) == []
