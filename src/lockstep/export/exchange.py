"""One window of a schedule and a way to fill its parts in; the parts of all ranks, written where they belong, out.

Two ways to move the same bytes, behind one interface. *Messages*: each rank sends its part straight to whoever receives, into
the finished tensor where the part is of one tensor; nothing is padded, and a rank that receives nothing holds nothing. On
gloo this takes about half the time and none of the flat copies that its collectives make inside. *Collective*: one all-gather
of equally long parts, which is what NCCL is best at.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from lockstep.dist import World, lost_ranks_named
from lockstep.export.schedule import Segment, Window
from lockstep.sharding.base import Destination

# torch 2.13 renamed all_gather_into_tensor and warns of the old name; 2.12 and before have no other.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

Write = Callable[[Sequence[Segment], Sequence[torch.Tensor]], None]
"""(segments, their bytes): write this rank's elements of each segment there."""
Place = Callable[[Segment], torch.Tensor]
"""Segment -> the bytes of the whole tensor where it belongs."""


@dataclass(slots=True)
class Traffic:
    """What one rank moved, padding included."""

    num_exchanges: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(slots=True)
class Pending:
    """A window under way. What it needs stays alive until `wait` has returned."""

    window: Window
    phase: str
    """What a rank that is lost meanwhile was waited for in."""
    works: list[tuple[int | None, dist.Work]] = field(default_factory=list)
    """(the rank at the other end of a message, what is under way)."""
    received: dict[int, torch.Tensor] = field(default_factory=dict)
    """By rank: parts that were not received in place."""
    sent: torch.Tensor | None = None


class Exchange(Protocol):
    """Moves windows. Every rank starts the same windows in the same order, and waits for each."""

    traffic: Traffic
    is_padded: bool
    """Are all parts as long as the longest?"""

    def start(self, window: Window, *, write: Write, place: Place, phase: str) -> Pending:
        """Collective. Fill this rank's part and send it; memory for what comes is taken here."""
        ...

    def finish(self, pending: Pending, *, place: Place) -> None:
        """Collective. When this returns, every segment of the window is in place on a rank that receives."""
        ...

    def rest(self) -> None:
        """Let go of staging: nothing is under way, and it will be a while until something is."""
        ...


class Staging:
    """Two buffers for each purpose, taken in turn: one window is on its way while the next is filled."""

    def __init__(self, device: torch.device):
        self._device = device
        self._kept: dict[tuple[str, int], torch.Tensor] = {}
        self._turn = 0

    def next_window(self) -> None:
        self._turn ^= 1

    def clear(self) -> None:
        self._kept.clear()

    def take(self, purpose: str, nbytes: int) -> torch.Tensor:
        key = (purpose, self._turn)
        if key not in self._kept or self._kept[key].numel() < nbytes:
            self._kept.pop(key, None)  # the shorter one goes first
            self._kept[key] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._kept[key][:nbytes]


def fill(target: torch.Tensor, part: Sequence[Segment], write: Write, itemsize: Callable[[Segment], int]) -> None:
    """Write every segment of a part to its offset."""
    write(part, [target[each.offset : each.offset + _nbytes(each, itemsize)] for each in part])


def unpack(received: torch.Tensor, part: Sequence[Segment], place: Place) -> None:
    """Copy every segment of a part to where it belongs: hundreds of small ones in one call."""
    if not part:
        return
    targets = [place(segment) for segment in part]
    sources = [received[each.offset : each.offset + to.numel()] for each, to in zip(part, targets, strict=True)]
    torch._foreach_copy_(targets, sources)


def _nbytes(segment: Segment, itemsize: Callable[[Segment], int]) -> int:
    return (segment.stop - segment.start) * itemsize(segment)


def _length(part: Sequence[Segment], itemsize: Callable[[Segment], int]) -> int:
    """Bytes of a part without its padding."""
    return part[-1].offset + _nbytes(part[-1], itemsize) if part else 0


def make_exchange(world: World, *, to: Destination, itemsize: Callable[[Segment], int]) -> Exchange:
    """What moves bytes fastest between these ranks."""
    kind = Messages if world.device.type == "cpu" else Collective
    return kind(world, to=to, itemsize=itemsize)


class _Mover:
    """What both ways have: counts, and staging that is used again."""

    def __init__(self, world: World, *, to: Destination, itemsize: Callable[[Segment], int]):
        self.traffic = Traffic()
        self._world = world
        self._to = to
        self._itemsize = itemsize
        self._staging = Staging(world.device)

    def rest(self) -> None:
        self._staging.clear()

    def _receives(self, rank: int) -> bool:
        return self._to == "all" or rank == 0


class Messages(_Mover):
    """Point to point; for gloo."""

    is_padded = False

    def start(self, window: Window, *, write: Write, place: Place, phase: str) -> Pending:
        self.traffic.num_exchanges += 1
        self._staging.next_window()
        pending = Pending(window, phase)
        if self._receives(self._world.rank):
            self._post_receives(pending, place)
        mine = window.parts[self._world.rank]
        receivers = [rank for rank in range(self._world.size) if rank != self._world.rank and self._receives(rank)]
        if mine and receivers:
            self._send(pending, mine, receivers, write)
        if mine and self._receives(self._world.rank):
            self._keep_own(pending, mine, write, place)
        return pending

    def finish(self, pending: Pending, *, place: Place) -> None:
        timeout = datetime.timedelta(seconds=self._world.timeout_s)
        for peer, work in pending.works:
            with lost_ranks_named(self._world, pending.phase, peer):
                work.wait(timeout)
        for rank, part in pending.received.items():
            unpack(part, pending.window.parts[rank], place)

    def _post_receives(self, pending: Pending, place: Place) -> None:
        parts = pending.window.parts
        sizes = [_length(part, self._itemsize) for part in parts]
        room = self._staging.take("receive", sum(sizes[r] for r in range(len(parts)) if len(parts[r]) > 1))
        for rank, part in enumerate(parts):
            if rank == self._world.rank or not part:
                continue
            if len(part) == 1:
                target = place(part[0])
            else:
                target, room = room[: sizes[rank]], room[sizes[rank] :]
                pending.received[rank] = target
            with lost_ranks_named(self._world, pending.phase, rank):
                work = dist.irecv(target, src=_global(self._world, rank), group=self._world.data)
            pending.works.append((rank, _started(work)))
            self.traffic.bytes_received += sizes[rank]

    def _send(self, pending: Pending, mine: Sequence[Segment], receivers: Sequence[int], write: Write) -> None:
        size = _length(mine, self._itemsize)
        pending.sent = self._staging.take("send", size)
        fill(pending.sent, mine, write, self._itemsize)
        for rank in receivers:
            with lost_ranks_named(self._world, pending.phase, rank):
                work = dist.isend(pending.sent, dst=_global(self._world, rank), group=self._world.data)
            pending.works.append((rank, _started(work)))
            self.traffic.bytes_sent += size

    def _keep_own(self, pending: Pending, mine: Sequence[Segment], write: Write, place: Place) -> None:
        if pending.sent is not None:
            unpack(pending.sent, mine, place)
            return
        write(mine, [place(segment) for segment in mine])


class Collective(_Mover):
    """One all-gather, or one gather to a single rank, of parts padded to the longest; for NCCL."""

    is_padded = True

    def start(self, window: Window, *, write: Write, place: Place, phase: str) -> Pending:
        self.traffic.num_exchanges += 1
        self._staging.next_window()
        pending = Pending(window, phase, sent=self._staging.take("send", window.nbytes))
        assert pending.sent is not None
        fill(pending.sent, window.parts[self._world.rank], write, self._itemsize)
        receives = self._receives(self._world.rank)
        whole = self._staging.take("receive", window.nbytes * self._world.size) if receives else None
        if whole is not None:
            pending.received = dict(enumerate(whole.chunk(self._world.size)))
            self.traffic.bytes_received += window.nbytes * (self._world.size - 1)
        if self._to == "all":
            assert whole is not None
            work = getattr(dist, _ALL_GATHER)(whole, pending.sent, group=self._world.data, async_op=True)
            self.traffic.bytes_sent += window.nbytes * (self._world.size - 1)
        else:
            parts = list(pending.received.values()) if receives else None
            work = dist.gather(pending.sent, parts, dst=_global(self._world, 0), group=self._world.data, async_op=True)
            self.traffic.bytes_sent += 0 if receives else window.nbytes
        pending.works.append((None, _started(work)))
        return pending

    def finish(self, pending: Pending, *, place: Place) -> None:
        with lost_ranks_named(self._world, pending.phase):
            for _, work in pending.works:
                work.wait()
        for rank, part in pending.received.items():
            unpack(part, pending.window.parts[rank], place)


def _global(world: World, rank: int) -> int:
    return rank if world.ranks is None else world.ranks[rank]


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
