"""Windows cut from random ranges: buffers split as laid out bring every byte where it belongs, and nothing overlaps."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.export.layout import lay_out
from lockstep.export.schedule import Extent, cut

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)


@st.composite
def tensors(draw):
    """(extents, dtypes) of a few tensors, dealt to one to four ranks."""
    num_ranks = draw(st.integers(1, 4))
    extents, dtypes = [], []
    for _ in range(draw(st.integers(1, 6))):
        bounds = sorted(draw(st.lists(st.integers(0, 40), min_size=num_ranks - 1, max_size=num_ranks - 1)))
        last = max([*bounds, draw(st.integers(1, 40))])
        edges = [0, *bounds, last]
        dtypes.append(draw(st.sampled_from(DTYPES)))
        extents.append(Extent(tuple(itertools.pairwise(edges)), dtypes[-1].itemsize))
    return extents, dtypes


def random_tensor(extent: Extent, dtype: torch.dtype, seed: int) -> torch.Tensor:
    numel = extent.nbytes // extent.itemsize
    return torch.randint(0, 200, (numel,), generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(tensors(), st.sampled_from([16, 48, 200, 10_000]))
def test_parts_and_arenas_put_every_element_where_it_belongs(made, part_bytes):
    extents, dtypes = made
    travels = list(range(len(extents)))
    whole = [random_tensor(extent, dtype, index) for index, (extent, dtype) in enumerate(zip(*made, strict=True))]
    for window in cut(travels, extents, part_bytes=part_bytes):
        layout = lay_out(window, extents, dtypes)
        sent = []
        for part, split in zip(window.parts, layout.parts, strict=True):
            buffer = torch.full((window.nbytes,), 255, dtype=torch.uint8)
            for segment, view in zip(part, split.of(buffer), strict=True):
                view.copy_(whole[segment.travel][segment.start : segment.stop].view(view.dtype))
            sent.append(buffer)
        if layout.arena is None:
            continue
        arena = torch.full((layout.arena.nbytes,), 255, dtype=torch.uint8)
        places = layout.arena.places.of(arena)
        for buffer, split, chosen in zip(sent, layout.parts, layout.arena.of_rank, strict=True):
            for place, view in zip(chosen, split.of(buffer), strict=True):
                places[place].copy_(view)
        for travel, came in zip(layout.arena.travels, layout.arena.tensors.of(arena), strict=True):
            assert torch.equal(came.view(dtypes[travel]), whole[travel])


@pytest.mark.parametrize(("part_bytes", "has_arena"), [(10_000, True), (64, False)])
def test_only_windows_of_whole_tensors_have_an_arena(part_bytes, has_arena):
    extents = [Extent(((0, 10), (10, 20)), 4), Extent(((0, 10), (10, 20)), 4)]
    windows = cut([0, 1], extents, part_bytes=part_bytes)
    found = [lay_out(window, extents, [torch.float32] * 2).arena is not None for window in windows]
    assert any(found) is has_arena


def test_views_of_one_dtype_are_typed_and_of_several_are_bytes():
    extents = [Extent(((0, 3),), 4), Extent(((0, 3),), 2)]
    (window,) = cut([0, 1], extents, part_bytes=1000)
    assert lay_out(window, extents, [torch.float32, torch.bfloat16]).parts[0].dtype is torch.uint8
    (window,) = cut([0], extents, part_bytes=1000)
    assert lay_out(window, extents, [torch.float32, torch.bfloat16]).parts[0].dtype is torch.float32
