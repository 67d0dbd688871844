"""An export plan in; every travel, whole, one window after another, out: what runs the schedule on this rank.

Reads shards, merges this rank's own elements on the way (`RowsMerge`), casts them once to what travels, and puts together what
comes. While one window is on its way the one before is finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lockstep.export.exchange import Exchange, Pending, Traffic, make_exchange
from lockstep.export.layout import Layout, lay_out, nbytes_of
from lockstep.export.merge import RowsMerge, merge_into
from lockstep.export.schedule import Segment, aligned_bytes, cut
from lockstep.export.what import ExportPlan, Factors
from lockstep.sharding.base import Destination, ShardedModel

PACKED = 8
"""A group of several tensors has at most this fraction of `bucket_bytes`: three of them are held at a time (in the consumer's
hands, finished, under way), and staging for two."""
LONE = 4
"""A lone tensor comes in windows of at most this fraction; itself it is the memory bound's "largest tensor"."""
FACTORS = 16
"""LoRA factors that are gathered ahead have at most this fraction (or what one group needs); staging for them as much twice."""

_KEPT_SEGMENTS = 20_000
"""Plans of at most about so many segments keep their windows: an adapter's."""


def part_limit(plan: ExportPlan, travels: Sequence[int], num_ranks: int, *, is_padded: bool = False) -> int:
    """Most bytes that one rank sends in one window of these travels.

    What all ranks send together is bounded, not each one's share: of a LoRA factor with 16 rows on 1024 ranks, 16 ranks hold
    everything. Where all parts are padded to the longest, it is the padded bytes that are bounded.
    """
    limit = max(plan.bucket_bytes // (LONE if len(travels) == 1 else PACKED), 1)
    held = [aligned_bytes(travels, plan.extents, rank) for rank in range(num_ranks)]
    part = -(-max(held) // -(-max(sum(held), 1) // limit))
    return min(part, limit // num_ranks) if is_padded else part


class Courier:
    """Runs one plan once. Every rank makes the same calls."""

    def __init__(self, sharded: ShardedModel, plan: ExportPlan, to: Destination):
        self._sharded = sharded
        self._plan = plan
        self._main = self._exchange(to)
        # Factors go to every rank, whoever receives the result, and have staging of their own: a window may be under way.
        self._to_all = self._exchange("all")
        self._arriving: dict[int, torch.Tensor] = {}
        self._factors: dict[str, torch.Tensor] = {}
        self.receives = to == "all" or sharded.world.is_main
        self.is_torn = False
        """Inside an exchange: an error now leaves it half done, and this rank cannot take part in any other."""

    @property
    def traffic(self) -> Traffic:
        each = (self._main.traffic, self._to_all.traffic)
        return Traffic(
            sum(one.num_exchanges for one in each),
            sum(one.bytes_sent for one in each),
            sum(one.bytes_received for one in each),
        )

    def arrivals(self) -> Iterator[tuple[int, ...]]:
        """Collective. Travels (their places) that are whole, window by window; `take` gives them on a rank that receives."""
        before: Pending | None = None
        for index in range(len(self._plan.groups)):
            if before is not None and self._is_too_much(index):
                self._finish(self._main, before)
                yield before.arrived
                before = None
            self._gather_factors(index)
            for layout in self._layouts(self._main, index):
                now = self._start(self._main, layout)
                if before is not None:
                    self._finish(self._main, before)
                    yield before.arrived
                before = now
        if before is not None:
            self._finish(self._main, before)
            yield before.arrived

    def drop(self, travels: Sequence[int]) -> None:
        """Let go of travels that have arrived and that nobody takes."""
        for travel in travels:
            self._arriving.pop(travel, None)

    def close(self) -> None:
        """Let go of everything, since the stream and its generators hold each other and may live until a garbage collection."""
        self._arriving.clear()
        self._factors.clear()
        self._main.rest()
        self._to_all.rest()

    def _is_too_much(self, group: int) -> bool:
        """Would this group and the one before it, both on their way, be more than the bucket has room for?"""
        return self._bytes_of(group - 1) + self._bytes_of(group) > self._plan.bucket_bytes // 2

    def _bytes_of(self, group: int) -> int:
        key = ("bytes", group)
        if key not in self._plan.derived:
            self._plan.derived[key] = sum(self._plan.extents[travel].nbytes for travel in self._travels_of(group))
        return self._plan.derived[key]

    def take(self, travel: int) -> torch.Tensor:
        """A travel that has arrived, in its own shape and order of dimensions. Its memory is the taker's."""
        described = self._plan.travels[travel]
        whole = self._whole(travel)
        return whole.movedim(0, described.shard_dim).contiguous() if described.shard_dim else whole

    def _exchange(self, to: Destination) -> Exchange:
        return make_exchange(self._sharded.world, to=to)

    def _travels_of(self, group: int) -> list[int]:
        return [travel for place in self._plan.groups[group] for travel in self._plan.deliveries[place].travels]

    def _layouts(self, exchange: Exchange, group: int | Factors) -> list[Layout]:
        """Of a group, or of a batch of factors; kept with a plan that is small, since cutting takes as long as sending then."""
        key = ("layouts", group, exchange.is_padded)
        if key in self._plan.derived:
            return self._plan.derived[key]
        travels = self._travels_of(group) if isinstance(group, int) else group.travels
        num_ranks = self._sharded.world.size
        limit = part_limit(self._plan, travels, num_ranks, is_padded=exchange.is_padded)
        extents, dtypes = self._plan.extents, [travel.dtype for travel in self._plan.travels]
        layouts = [lay_out(window, extents, dtypes) for window in cut(travels, extents, part_bytes=limit)]
        if len(self._plan.travels) * num_ranks <= _KEPT_SEGMENTS:
            self._plan.derived[key] = layouts
        return layouts

    def _start(self, exchange: Exchange, layout: Layout) -> Pending:
        first = next((segment for part in layout.window.parts for segment in part), None)
        name = self._plan.travels[first.travel].source if first else "nothing"
        receives = self.receives or exchange is self._to_all
        self.is_torn = True
        # Without gradients a shard is there at once, and not by way of autograd.
        with torch.no_grad(), torch.profiler.record_function("export::send"):
            landing = _Landing(self, layout, receives=receives)
            pending = exchange.start(layout.window, landing, phase=f"export of {name}")
        self.is_torn = False
        return pending

    def _finish(self, exchange: Exchange, pending: Pending) -> None:
        self.is_torn = True
        with torch.no_grad(), torch.profiler.record_function("export::receive"):
            exchange.finish(pending)
        pending.works.clear()  # a finished transfer still holds its tensors
        pending.received.clear()
        self.is_torn = False

    def _gather_factors(self, group: int) -> None:
        """Collective. The factors that this group and some after it need; those of groups before are dropped."""
        for batch in self._plan.factors:
            if batch.before_group != group:
                continue
            self._factors.clear()
            for layout in self._layouts(self._to_all, batch):
                self._finish(self._to_all, self._start(self._to_all, layout))
            self._to_all.rest()
            for travel in batch.travels:
                self._factors[self._plan.travels[travel].source] = self._whole(travel)

    def _whole(self, travel: int) -> torch.Tensor:
        """A travel that has come, taken out."""
        described = self._plan.travels[travel]
        whole = self._arriving.pop(travel, None)
        if whole is None:  # it has no elements: nothing ever came
            whole = self.memory(0)
        return (whole if whole.dtype is described.dtype else whole.view(described.dtype)).view(described.shape)

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._sharded.world.device)

    def make_arena(self, layout: Layout) -> list[torch.Tensor]:
        """Memory for all tensors of a window, and its places. Gone once the last of these tensors is."""
        assert layout.arena is not None
        arena = self.memory(layout.arena.nbytes)
        self._arriving.update(zip(layout.arena.travels, layout.arena.tensors.of(arena), strict=True))
        return layout.arena.places.of(arena)

    def place(self, segment: Segment) -> torch.Tensor:
        """The bytes where a segment belongs, of a tensor that arrives bit by bit."""
        extent = self._plan.extents[segment.travel]
        arriving = self._arriving.get(segment.travel)
        if arriving is None:
            arriving = self._arriving[segment.travel] = self.memory(extent.nbytes)
        return arriving[segment.start * extent.itemsize : segment.stop * extent.itemsize]

    def nbytes_of(self, part: Sequence[Segment]) -> int:
        return part[-1].offset + nbytes_of(part[-1], self._plan.extents) if part else 0

    @property
    def rank(self) -> int:
        return self._sharded.world.rank

    def write(self, segments: Sequence[Segment], targets: Sequence[torch.Tensor]) -> None:
        """This rank's elements as they travel: merged if the plan says so, and cast once, last."""
        plain: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        for segment, target in zip(segments, targets, strict=True):
            travel = self._plan.travels[segment.travel]
            place = target if target.dtype is travel.dtype else target.view(travel.dtype)
            if travel.merge is None:
                plain.append(self._values(segment))
                places.append(place)
            else:
                self._merge(place, travel.merge, self._values(segment), segment.start)
        if plain:
            torch._foreach_copy_(places, plain)

    def _values(self, segment: Segment) -> torch.Tensor:
        """This rank's elements of a segment as they lie in the live model."""
        travel = self._plan.travels[segment.travel]
        if travel.is_buffer:
            return self._sharded.buffer(travel.name).reshape(-1)[segment.start : segment.stop]
        first, last = self._plan.extents[segment.travel].ranges[self._sharded.world.rank]
        values = self._sharded.local_flat(travel.name)
        is_all = segment.start == first and segment.stop == last
        return values if is_all else values[segment.start - first : segment.stop - first]

    def _merge(self, place: torch.Tensor, merge: RowsMerge, base: torch.Tensor, start: int) -> None:
        device = self._sharded.world.device
        b, first_row = self._factors.get(merge.b), 0
        if b is None:
            first_row = self._sharded.ranges(merge.b)[self._sharded.world.rank][0] // merge.rank
            b = self._sharded.local_flat(merge.b).reshape(-1, merge.rank).to(device)
        a = self._factors[merge.a]
        merge_into(place, merge, base.to(device), start=start, a=a, b=b, first_row=first_row)


class _Landing:
    """`exchange.Landing` of one window: in an arena where it brings whole tensors, else tensor by tensor."""

    def __init__(self, courier: Courier, layout: Layout, *, receives: bool):
        self._courier = courier
        self._layout = layout
        self._parts = layout.window.parts
        self._places = courier.make_arena(layout) if layout.arena is not None and receives else None

    def nbytes(self, rank: int) -> int:
        return self._courier.nbytes_of(self._parts[rank])

    def target(self, rank: int) -> torch.Tensor | None:
        return self._targets(rank)[0].view(torch.uint8) if len(self._parts[rank]) == 1 else None

    def fill(self, part: torch.Tensor) -> None:
        rank = self._courier.rank
        self._courier.write(self._parts[rank], self._layout.parts[rank].of(part))

    def unpack(self, rank: int, part: torch.Tensor) -> None:
        torch._foreach_copy_(self._targets(rank), self._layout.parts[rank].of(part))

    def keep_own(self) -> None:
        self._courier.write(self._parts[self._courier.rank], self._targets(self._courier.rank))

    def _targets(self, rank: int) -> list[torch.Tensor]:
        """Views alike to those of the rank's part."""
        if self._places is not None:
            assert self._layout.arena is not None
            return [self._places[place] for place in self._layout.arena.of_rank[rank]]
        dtype = self._layout.parts[rank].dtype
        return [self._courier.place(segment).view(dtype) for segment in self._parts[rank]]
