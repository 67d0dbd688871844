"""Environment variables in, a `World` and agreed collectives out: start-up, agreement between ranks, sums over ranks.

Ranks talk over two channels. The *data group* (NCCL on CUDA, gloo on CPU) is what FSDP uses. The *control group* (always
gloo) carries only fixed-size messages made here, so that a disagreement can be reported instead of corrupting or hanging a
data collective. The *store* remembers the last phase every rank announced: it names whoever is missing.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist

from lockstep.config import DistConfig
from lockstep.errors import LockstepError, RankMissing, RanksDisagree, said_by
from lockstep.host_memory import return_large_blocks
from lockstep.rendezvous import meet, whole_number
from lockstep.types import Stat

log = logging.getLogger(__name__)

_PHASE_KEY = "lockstep/phase/{rank}"
_GAVE_UP_KEY = "lockstep/gave-up/{phases}/{rank}"
_ROLL_CALL_S = 2.0
"""How long a rank that lost somebody waits for the others to have noticed too: who has not is whom they all miss."""
_LONG_LINE = 200
"""Characters up to which a line that differs is told whole; of a longer one, this many before and after the difference:"""
_SHOWN_BEFORE, _SHOWN_AFTER = 60, 100
_STORE_IS_GONE = "the store that the ranks met in does not answer: whoever hosts it (rank 0, or the launcher) is gone"


@dataclass(slots=True)
class World:
    """The trainer's ranks as this one sees them. `size == 1` needs no process group and makes every collective trivial."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    agree_timeout_s: float = 60.0
    """How long ranks that do the same amount of work wait for each other."""
    timeout_s: float = 600.0
    """How long they wait after work that differs between ranks: rollouts, rewards, files."""
    control: dist.ProcessGroup | None = None
    """gloo group for agreement and for sums of metrics; None when size is 1."""
    store: dist.Store | None = None
    data: dist.ProcessGroup | None = None
    """What tensors travel over; None: the default process group."""
    ranks: tuple[int, ...] | None = None
    """Global ranks of this world's ranks, in order, where they differ (a mesh over a part of the job); None: the same."""
    num_agreements: int = 0
    """How many agreements this rank has entered: part of each, so that ranks out of step notice."""
    num_phases: int = 0
    """How many phases this rank has announced: a rank that has announced fewer is behind."""
    phase: str = "start-up"
    """The phase announced last."""
    is_exporting: bool = False
    """A weight stream is open here. Another one inside it would meet ranks that are not in the consumer's loop."""
    is_torn: bool = False
    """This rank failed inside an exchange of tensors and left it half done: it cannot take part in anything, and has to end."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def rank_of(self, global_rank: int) -> int:
        """This world's number of a rank of the default process group."""
        return global_rank if self.ranks is None else self.ranks.index(global_rank)


def device_for(name: str, local_rank: int) -> torch.device:
    """ "auto" takes CUDA where there is one. Raises `LockstepError` if "cuda" is asked for and absent."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LockstepError(
            "run.device is cuda, but torch sees no CUDA device; use run.device=cpu or a CUDA build of torch"
        )
    if local_rank >= torch.cuda.device_count():
        raise LockstepError(
            f"local rank {local_rank} has no CUDA device of its own: this host has {torch.cuda.device_count()}; "
            "start at most one rank per device"
        )
    return torch.device("cuda", local_rank)


def start(device: str, limits: DistConfig) -> World:
    """Collective. Join the ranks that the environment names (RANK, WORLD_SIZE, LOCAL_RANK; MASTER_ADDR/PORT or LOCKSTEP_STORE).

    Without RANK this process is the only rank, and FSDP still gets a process group of one. Raises `LockstepError` when the
    rendezvous fails: the address is taken, or a rank does not come within `limits.timeout_s`.
    """
    rank, size = whole_number("RANK", 0), whole_number("WORLD_SIZE", 1)
    local_rank = whole_number("LOCAL_RANK", rank)
    where = device_for(device, local_rank)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        return_large_blocks()
    timeout = datetime.timedelta(seconds=limits.timeout_s)
    store = meet(rank, size, limits.timeout_s)
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend, store=dist.PrefixStore("data", store), rank=rank, world_size=size, timeout=timeout
        )
        control = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
    except (RuntimeError, ValueError) as error:
        raise LockstepError(
            f"rank {rank} of {size} could not join the others within {limits.timeout_s:.0f} s: {error}. "
            "Check that every rank was started with the same WORLD_SIZE and a RANK of its own"
        ) from error
    world = World(rank, size, local_rank, where, limits.agree_timeout_s, limits.timeout_s, control, store)
    joined.append((dist.group.WORLD, world))
    return world


joined: list[tuple[object, World]] = []
"""Every world that this process is in, with the default process group that it lives on (`worlds.current_world` looks here)."""


def stop(world: World) -> None:
    """Leave the process groups. Not collective: a rank that ends on an error must not wait for the others."""
    if dist.is_initialized():
        dist.destroy_process_group()
    world.control = None
    joined.clear()


def announce(world: World, phase: str) -> None:
    """Tell the store where this rank is, so that an error elsewhere can say it. Costs one store write.

    Every rank announces the same phases in the same order. Raises `RankMissing` when the store is gone, with rank 0.
    """
    world.num_phases, world.phase = world.num_phases + 1, phase
    if world.store is None or world.size == 1:
        return
    try:
        world.store.set(_PHASE_KEY.format(rank=world.rank), f"{world.num_phases} {phase}")
    except RuntimeError as error:
        raise RankMissing(f"rank {world.rank} came to {phase!r}, but {_STORE_IS_GONE}: {error}") from error


def agree(
    world: World, *, phase: str, fingerprint: str, describe: Callable[[], Sequence[str]], timeout_s: float | None = None
) -> None:
    """Collective. Return only if every rank came to `phase` with the same `fingerprint`.

    `describe()` gives the lines that the fingerprint is over; it is called only when the ranks differ, and the first line
    in which two ranks differ is in the `RanksDisagree` that every rank raises. A rank that does not come within `timeout_s`
    is named in `RankMissing`, with the phase it announced last. Cost on the happy path: one store write and one
    all-gather of 32 bytes per rank, a quarter of a millisecond between two processes of one machine.
    """
    if world.size > 1:
        limit = world.agree_timeout_s if timeout_s is None else timeout_s
        _agree(world, phase=phase, fingerprint=fingerprint, describe=lambda: ["", *describe()], timeout_s=limit)


def _agree(
    world: World, *, phase: str, fingerprint: str, describe: Callable[[], Sequence[str]], timeout_s: float
) -> None:
    """`agree` for several ranks. The first line of `describe()` goes behind the name of the agreement."""
    world.num_agreements += 1
    announce(world, phase)
    mine = hashlib.sha256(f"{world.num_agreements}\n{phase}\n{fingerprint}".encode()).digest()
    every = gather_bytes(world, mine, phase=phase, timeout_s=timeout_s)
    if all(other == mine for other in every):
        return
    more, *lines = describe()
    lines = [f"agreement {world.num_agreements}: {phase}{more}", *lines]
    raise RanksDisagree(_first_difference(exchange_lines(world, lines, phase=phase, timeout_s=timeout_s), phase))


def gather_bytes(world: World, message: bytes, *, phase: str, timeout_s: float) -> list[bytes]:
    """Collective. Every rank's message (of equal length) on every rank. Raises `RankMissing`; on a torn rank, `LockstepError`."""
    if world.size == 1:
        return [message]
    if world.is_torn:
        raise LockstepError(
            f"rank {world.rank} came to {phase!r} after it had failed inside an exchange of tensors; it has to end with that error"
        )
    mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    out = [torch.empty_like(mine) for _ in range(world.size)]
    with _naming_who_is_missing(world, phase, timeout_s):
        work = dist.all_gather(out, mine, group=world.control, async_op=True)
        assert work is not None
        work.wait(datetime.timedelta(seconds=timeout_s))
    return [bytes(part.numpy().tobytes()) for part in out]


def exchange_lines(world: World, lines: Sequence[str], *, phase: str, timeout_s: float) -> list[list[str]]:
    """Collective. Every rank's lines on every rank, of whatever length."""
    blob = "\n".join(lines).encode(errors="backslashreplace")  # halves of surrogate pairs in somebody's words
    sizes = [
        int.from_bytes(part, "big")
        for part in gather_bytes(world, len(blob).to_bytes(8, "big"), phase=phase, timeout_s=timeout_s)
    ]
    padded = blob + b" " * (max(sizes) - len(blob))
    blobs = gather_bytes(world, padded, phase=phase, timeout_s=timeout_s) if max(sizes) else [b""] * world.size
    return [part[:size].decode().split("\n") for part, size in zip(blobs, sizes, strict=True)]


def _first_difference(lines_by_rank: list[list[str]], phase: str) -> str:
    reference = lines_by_rank[0]
    for rank, lines in enumerate(lines_by_rank[1:], start=1):
        for index in range(max(len(reference), len(lines))):
            left = reference[index] if index < len(reference) else "(nothing: its list ends here)"
            right = lines[index] if index < len(lines) else "(nothing: its list ends here)"
            if left != right:
                at = next(
                    (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
                )
                left, right = _around(left, at), _around(right, at)
                return (
                    f"ranks disagree in {phase}, first at entry {index}: rank 0 has {left!r}, rank {rank} has {right!r}"
                )
    return f"ranks disagree in {phase}, but what they describe is equal: their fingerprints cover something that is not described"


def _around(line: str, at: int) -> str:
    """A short line whole; of a long one what stands around the character `at`, where two lines begin to differ."""
    if len(line) <= _LONG_LINE:
        return line
    start, stop = max(at - _SHOWN_BEFORE, 0), at + _SHOWN_AFTER
    return ("..." if start else "") + line[start:stop] + ("..." if stop < len(line) else "")


@contextmanager
def _naming_who_is_missing(world: World, phase: str, timeout_s: float) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        waited = time.monotonic() - began
        raise RankMissing(
            f"{_who_is_missing(world, phase)} after {waited:.1f} s (limit {timeout_s:.0f} s): {error}"
        ) from error


def _who_is_missing(world: World, phase: str, peer: int | None = None) -> str:
    """Name whom this rank waited for: `peer` if it is known; or else those whose last announced phase is another one; or
    else those who do not notice, soon, that somebody is missing."""
    waits = f"rank {world.rank} waited in {phase!r} for"
    try:
        if world.store is not None:
            world.store.set(_GAVE_UP_KEY.format(phases=world.num_phases, rank=world.rank), phase)
        others = [_last_seen(world, rank) for rank in range(world.size) if rank != world.rank]
        if peer is not None:
            return f"{waits} {_last_seen(world, peer)[2]}"
        behind = [text for count, where, text in others if (count, where) != (world.num_phases, world.phase)]
        if behind:
            return f"{waits} {', '.join(behind)}"
        silent = _roll_call(world)
        named = [_last_seen(world, rank)[2] for rank in silent]
    except RuntimeError as error:
        return f"{waits} ranks that it cannot name, since {_STORE_IS_GONE} ({error})"
    if len(named) == 1 < len(others):
        return f"{waits} {named[0]}, which came too, then left or hangs"
    return (
        f"{waits} a rank that came too, then left or hangs, one of: {', '.join(named or [text for *_, text in others])}"
    )


def _roll_call(world: World) -> list[int]:
    """Other ranks that do not give up as this one just did. One other rank needs no call."""
    keys = {
        rank: _GAVE_UP_KEY.format(phases=world.num_phases, rank=rank)
        for rank in range(world.size)
        if rank != world.rank
    }
    if len(keys) == 1 or world.store is None:
        return list(keys)
    try:
        world.store.wait(list(keys.values()), datetime.timedelta(seconds=_ROLL_CALL_S))
    except RuntimeError:  # the wait ran out, which is the usual case: somebody is missing
        return [rank for rank, key in keys.items() if not world.store.check([key])]
    return []


def _last_seen(world: World, rank: int) -> tuple[int, str, str]:
    """How many phases a rank has announced, the last of them, and both in words."""
    assert world.store is not None
    key = _PHASE_KEY.format(rank=rank)
    count, _, where = (world.store.get(key).decode() if world.store.check([key]) else "0 start-up").partition(" ")
    return int(count), where, f"rank {rank} (last seen in {where!r})"


@contextmanager
def data_phase(world: World, phase: str) -> Iterator[None]:
    """Turn a failed data collective (a rank died or stalled) into `RankMissing` naming the phase, on every surviving rank."""
    announce(world, phase)
    with lost_ranks_named(world, phase):
        yield


@contextmanager
def lost_ranks_named(world: World, phase: str = "", peer: int | None = None) -> Iterator[None]:
    """`data_phase` without the announcement; without `phase` the one announced last is named. Not collective.

    `peer`: the only rank that a message inside comes from or goes to.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LockstepError) or not _is_lost_peer(error):
            raise
        raise RankMissing(
            f"{_who_is_missing(world, phase or world.phase, peer)}: {str(error).splitlines()[0]}"
        ) from error


def _is_lost_peer(error: RuntimeError) -> bool:
    text = str(error)
    return isinstance(error, dist.DistError) or any(
        mark in text
        for mark in (
            "Connection closed by peer",
            "Connection reset by peer",
            "Timed out waiting",
            "caused pair closure",
            "gloo/transport",
            "Broken pipe",
            "NCCL",
        )
    )


def sum_over_ranks(values: Sequence[float], world: World) -> list[float]:
    """Collective. Element-wise sums in float64."""
    return _reduce(values, world, dist.ReduceOp.SUM)


def max_over_ranks(values: Sequence[float], world: World) -> list[float]:
    """Collective. Element-wise maxima in float64."""
    return _reduce(values, world, dist.ReduceOp.MAX)


def _reduce(values: Sequence[float], world: World, op: dist.ReduceOp.RedOpType) -> list[float]:
    if world.size == 1:
        return [float(value) for value in values]
    tensor = torch.tensor(values, dtype=torch.float64)
    with data_phase(world, "reduce of metrics"):
        dist.all_reduce(tensor, op=op, group=world.control)
    return tensor.tolist()


def sum_stats(stats: Mapping[str, Stat], world: World) -> dict[str, Stat]:
    """Collective. Sums and counts added over ranks; every rank must bring the same names."""
    names = sorted(stats)
    agree(world, phase="sum of stats", fingerprint="\n".join(names), describe=lambda: names)
    flat = sum_over_ranks([number for name in names for number in (stats[name].total, stats[name].count)], world)
    return {name: Stat(flat[2 * i], flat[2 * i + 1]) for i, name in enumerate(names)}


def any_rank(flag: bool, world: World) -> bool:
    """Collective. True on every rank if it is true on one."""
    return max_over_ranks([float(flag)], world)[0] > 0


def gather_texts(world: World, text: str, *, phase: str) -> list[str]:
    """Collective. One string of every rank, on every rank, in rank order. Waits `world.timeout_s`: ranks come from unequal work.

    An agreement comes first: a rank that is here because of a failure while the others are elsewhere ends all with
    `RanksDisagree`, which quotes what it wanted to say. Without it, messages of unequal length would meet.
    """
    if world.size == 1:
        return [text]

    def describe() -> list[str]:
        return [f", where it says {text!r}" if text else ""]

    _agree(world, phase=phase, fingerprint="texts", describe=describe, timeout_s=world.timeout_s)
    parts = exchange_lines(world, text.split("\n"), phase=phase, timeout_s=world.timeout_s)
    return ["\n".join(part) for part in parts]


@contextmanager
def all_or_none(world: World, phase: str) -> Iterator[None]:
    """Collective. Run a rank-local block on every rank; if one rank's raises, every rank raises.

    The failing rank raises its own error; the others a `LockstepError` (or the same class, for lockstep's errors) that
    names the rank and repeats its message.
    """
    announce(world, phase)
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    said = gather_texts(world, said_by(failure) if failure else "", phase=phase)
    if failure is not None:
        raise failure
    for rank, text in enumerate(said):
        if text:
            raise LockstepError(f"rank {rank} failed in {phase}: {text}")
