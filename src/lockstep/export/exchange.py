"""One window of a schedule and a way to fill its parts in; the parts of all ranks, written where they belong, out.

Two ways to move the same bytes, behind one interface. *Messages*: each rank sends its part straight to whoever receives, into
the finished tensor where the part is of one tensor; nothing is padded, and a rank that receives nothing holds nothing. On
gloo this takes about half the time and none of the flat copies that its collectives make inside. *Collective*: one all-gather
of equally long parts, which is what NCCL is best at.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from lockstep.dist import World, lost_ranks_named
from lockstep.export.schedule import Window
from lockstep.sharding.base import Destination

# torch 2.13 renamed all_gather_into_tensor and warns of the old name; 2.12 and before have no other.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class Landing(Protocol):
    """What a window carries, and where it belongs: the exchange moves bytes and asks this for their places."""

    def nbytes(self, rank: int) -> int:
        """Length of a rank's part without padding; 0 if it sends nothing."""
        ...

    def target(self, rank: int) -> torch.Tensor | None:
        """The bytes where a rank's part belongs as it is, in one piece; None if it has to be unpacked."""
        ...

    def fill(self, part: torch.Tensor) -> None:
        """Write this rank's part."""
        ...

    def unpack(self, rank: int, part: torch.Tensor) -> None:
        """Copy a rank's part to where it belongs."""
        ...

    def keep_own(self) -> None:
        """Write this rank's elements straight to where they belong."""
        ...


@dataclass(slots=True)
class Traffic:
    """What one rank moved, padding included."""

    num_exchanges: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(slots=True)
class Pending:
    """A window under way. What it needs stays alive until `wait` has returned."""

    landing: Landing
    arrived: tuple[int, ...]
    """What is whole once the window has come."""
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

    def start(self, window: Window, landing: Landing, *, phase: str) -> Pending:
        """Collective. Fill this rank's part and send it."""
        ...

    def finish(self, pending: Pending) -> None:
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


def make_exchange(world: World, *, to: Destination) -> Exchange:
    """What moves bytes fastest between these ranks."""
    kind = Messages if world.device.type == "cpu" else Collective
    return kind(world, to=to)


class _Mover:
    """What both ways have: counts, and staging that is used again."""

    def __init__(self, world: World, *, to: Destination):
        self.traffic = Traffic()
        self._world = world
        self._to = to
        self._staging = Staging(world.device)

    def rest(self) -> None:
        self._staging.clear()

    def _receives(self, rank: int) -> bool:
        return self._to == "all" or rank == 0


class Messages(_Mover):
    """Point to point; for gloo."""

    is_padded = False

    def start(self, window: Window, landing: Landing, *, phase: str) -> Pending:
        self.traffic.num_exchanges += 1
        self._staging.next_window()
        pending = Pending(landing, window.arrived, phase)
        is_kept = self._receives(self._world.rank)
        if is_kept:
            self._post_receives(pending)
        receivers = [rank for rank in range(self._world.size) if rank != self._world.rank and self._receives(rank)]
        if landing.nbytes(self._world.rank):
            if receivers:
                self._send(pending, receivers)
            if is_kept:
                self._keep_own(pending)
        return pending

    def finish(self, pending: Pending) -> None:
        timeout = datetime.timedelta(seconds=self._world.timeout_s)
        for peer, work in pending.works:
            with lost_ranks_named(self._world, pending.phase, peer):
                work.wait(timeout)
        for rank, part in pending.received.items():
            pending.landing.unpack(rank, part)

    def _post_receives(self, pending: Pending) -> None:
        sizes = [0 if rank == self._world.rank else pending.landing.nbytes(rank) for rank in range(self._world.size)]
        targets = {rank: pending.landing.target(rank) for rank, size in enumerate(sizes) if size}
        room = self._staging.take("receive", sum(sizes[rank] for rank, target in targets.items() if target is None))
        for rank, target in targets.items():
            if target is None:
                target, room = room[: sizes[rank]], room[sizes[rank] :]
                pending.received[rank] = target
            with lost_ranks_named(self._world, pending.phase, rank):
                work = dist.irecv(target, src=_global(self._world, rank), group=self._world.data)
            pending.works.append((rank, _started(work)))
            self.traffic.bytes_received += sizes[rank]

    def _send(self, pending: Pending, receivers: Sequence[int]) -> None:
        size = pending.landing.nbytes(self._world.rank)
        pending.sent = self._staging.take("send", size)
        pending.landing.fill(pending.sent)
        for rank in receivers:
            with lost_ranks_named(self._world, pending.phase, rank):
                work = dist.isend(pending.sent, dst=_global(self._world, rank), group=self._world.data)
            pending.works.append((rank, _started(work)))
            self.traffic.bytes_sent += size

    def _keep_own(self, pending: Pending) -> None:
        if pending.sent is not None:
            pending.landing.unpack(self._world.rank, pending.sent)
        else:
            pending.landing.keep_own()


class Collective(_Mover):
    """One all-gather, or one gather to a single rank, of parts padded to the longest; for NCCL."""

    is_padded = True

    def start(self, window: Window, landing: Landing, *, phase: str) -> Pending:
        self.traffic.num_exchanges += 1
        self._staging.next_window()
        sent = self._staging.take("send", window.nbytes)
        pending = Pending(landing, window.arrived, phase, sent=sent)
        if landing.nbytes(self._world.rank):
            landing.fill(sent)
        receives = self._receives(self._world.rank)
        whole = self._staging.take("receive", window.nbytes * self._world.size) if receives else None
        if whole is not None:
            pending.received = dict(enumerate(whole.chunk(self._world.size)))
            self.traffic.bytes_received += window.nbytes * (self._world.size - 1)
        if self._to == "all":
            assert whole is not None
            work = getattr(dist, _ALL_GATHER)(whole, sent, group=self._world.data, async_op=True)
            self.traffic.bytes_sent += window.nbytes * (self._world.size - 1)
        else:
            parts = list(pending.received.values()) if receives else None
            work = dist.gather(sent, parts, dst=_global(self._world, 0), group=self._world.data, async_op=True)
            self.traffic.bytes_sent += 0 if receives else window.nbytes
        pending.works.append((None, _started(work)))
        return pending

    def finish(self, pending: Pending) -> None:
        with lost_ranks_named(self._world, pending.phase):
            for _, work in pending.works:
                work.wait()
        for rank, part in pending.received.items():
            if pending.landing.nbytes(rank):
                pending.landing.unpack(rank, part)


def _global(world: World, rank: int) -> int:
    return rank if world.ranks is None else world.ranks[rank]


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
