"""Environment variables in, a `World` and agreed collectives out: start-up, agreement between ranks, sums over ranks.

Ranks talk over two channels. The *data group* (NCCL on CUDA, gloo on CPU) is what FSDP uses. The *control group* (always
gloo) carries only fixed-size messages made here, so that a disagreement can be reported instead of corrupting or hanging a
data collective. The *store* remembers the last phase every rank announced: it names whoever is missing.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from lockstep.config import DistConfig
from lockstep.errors import LockstepError, RankMissing, RanksDisagree
from lockstep.types import Stat

log = logging.getLogger(__name__)

_RENDEZVOUS_GRACE_S = 2.0
"""For a store to raise its own, better error first: TCPStore waits a second longer than it is told."""
_PHASE_KEY = "lockstep/phase/{rank}"
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
    rank, size = _whole_number("RANK", 0), _whole_number("WORLD_SIZE", 1)
    local_rank = _whole_number("LOCAL_RANK", rank)
    where = device_for(device, local_rank)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    timeout = datetime.timedelta(seconds=limits.timeout_s)
    store = _rendezvous(rank, size, limits.timeout_s)
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
    _joined.append((dist.group.WORLD, world))
    return world


def current_world(
    *,
    ranks: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    timeout_s: float = 60.0,
) -> World:
    """The world of a process group that somebody else started: all its ranks, or these (ascending global ranks).

    Collective over those ranks the first time, when they make a gloo group for agreement (and one for tensors, unless
    `group` is one of exactly these ranks); later calls give the same object back. Without a process group: a world of one.
    Raises `RankMissing` naming the ranks that do not come within `timeout_s`, `LockstepError` on a rank outside of `ranks`.
    """
    if not dist.is_initialized():
        return World(device=device or torch.device("cpu"), agree_timeout_s=timeout_s)
    everyone = tuple(range(dist.get_world_size()))
    members = everyone if ranks is None else tuple(ranks)
    known = next((world for owner, world in _joined if owner is dist.group.WORLD and _members(world) == members), None)
    if known is None:
        known = _join(members, group, device or torch.device("cpu"), timeout_s)
        _joined.append((dist.group.WORLD, known))
    known.agree_timeout_s = timeout_s
    return known


_joined: list[tuple[object, World]] = []
"""Every world that this process is in, with the default process group that it lives on."""


def _members(world: World) -> tuple[int, ...]:
    return tuple(range(world.size)) if world.ranks is None else world.ranks


def _join(members: tuple[int, ...], group: dist.ProcessGroup | None, device: torch.device, timeout_s: float) -> World:
    me = dist.get_rank()
    if me not in members:
        raise LockstepError(f"rank {me} holds a model that is sharded over the ranks {list(members)}, without it")
    is_everyone = len(members) == dist.get_world_size()
    world = World(members.index(me), len(members), _whole_number("LOCAL_RANK", me), device, timeout_s)
    world.ranks = None if is_everyone else members
    if world.size == 1:
        world.data = None if is_everyone else dist.group.WORLD  # never used: nothing travels
        return world
    name = "-".join(map(str, members)) if not is_everyone else "all"
    # torch has no public name for the store that the default group was made with (2.6 to 2.13 have this one).
    world.store = dist.PrefixStore(f"lockstep/{name}", dist.distributed_c10d._get_default_store())
    _wait_for(world, members, timeout_s)
    world.control = _new_group(members, "gloo", world.timeout_s)
    if not is_everyone:
        fits = group is not None and tuple(dist.get_process_group_ranks(group)) == members
        world.data = group if fits else _new_group(members, None, world.timeout_s)
    return world


def _new_group(members: tuple[int, ...], backend: str | None, timeout_s: float) -> dist.ProcessGroup:
    """Collective over the members only: other ranks need not know."""
    timeout = datetime.timedelta(seconds=timeout_s)
    made = dist.new_group(list(members), backend=backend, timeout=timeout, use_local_synchronization=True)
    return cast(dist.ProcessGroup, made)


def _wait_for(world: World, members: tuple[int, ...], timeout_s: float) -> None:
    """Making a group waits for every member, and cannot say for whom: so they meet in the store first."""
    assert world.store is not None
    keys = {rank: f"here/{rank}" for rank in members}
    world.store.set(keys[members[world.rank]], "yes")
    try:
        world.store.wait(list(keys.values()), datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [rank for rank, key in keys.items() if not world.store.check([key])]
        raise RankMissing(
            f"rank {members[world.rank]} waited {timeout_s:.0f} s in 'joining' for ranks {missing}: attach and shard are "
            f"collective, every one of the ranks {list(members)} calls them"
        ) from error


def _whole_number(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise LockstepError(f"the environment variable {name} must be a whole number; it is {value!r}")
    return int(value)


def _rendezvous(rank: int, size: int, timeout_s: float) -> dist.Store:
    """The store that the ranks meet in. Raises `LockstepError` naming the place that is taken, unreachable or unusable."""
    path = os.environ.get("LOCKSTEP_STORE")
    if path:
        return _shared_file(Path(path), size, timeout_s)
    if size == 1 and "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _whole_number("MASTER_PORT", 29500)
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = datetime.timedelta(seconds=timeout_s)
    hint = (
        f"Check that all {size} ranks were started with this address; if another job uses the port, set MASTER_PORT to a "
        "free one"
    )
    what = f"rank {rank}: rendezvous at {host}:{port}"
    return _within(timeout_s, lambda: dist.TCPStore(host, port, size, is_host, timeout=timeout), what, hint)


def _shared_file(path: Path, size: int, timeout_s: float) -> dist.Store:
    """Looks at the file first: torch 2.13's FileStore tries for minutes, holding the interpreter's lock, where it cannot open
    a file or where the bytes there are not a store's."""
    if not path.parent.is_dir() or path.is_dir() or (path.exists() and not _may_be_store(path)):
        raise LockstepError(f"LOCKSTEP_STORE is {str(path)!r}; it must be a new file in a folder that exists")
    try:
        store = dist.FileStore(str(path), size)
    except RuntimeError as error:
        raise LockstepError(f"LOCKSTEP_STORE: ranks cannot meet in {path}: {error}; name a new file") from error
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def _may_be_store(path: Path) -> bool:
    """A store's file is empty, or starts with the length of a key: four bytes, the lowest first."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(4), "little") < 1 << 16


def _within(timeout_s: float, make: Callable[[], dist.Store], what: str, hint: str) -> dist.Store:
    """What `make` returns. torch 2.13's TCPStore outlasts its own timeout where something listens and never answers, so
    a thread of its own waits for it; it is left behind when it does not return."""
    outcome: queue.SimpleQueue[dist.Store | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put(make())
        except Exception as error:  # handed to the waiting thread, which raises it
            outcome.put(error)

    threading.Thread(target=run, daemon=True, name="rendezvous").start()
    try:
        made = outcome.get(timeout=timeout_s + _RENDEZVOUS_GRACE_S)
    except queue.Empty:
        raise LockstepError(f"{what} did not answer within {timeout_s:.0f} s. {hint}") from None
    if isinstance(made, Exception):
        raise LockstepError(f"{what} failed: {str(made).rstrip('.')}. {hint}") from made
    return made


def stop(world: World) -> None:
    """Leave the process groups. Not collective: a rank that ends on an error must not wait for the others."""
    if dist.is_initialized():
        dist.destroy_process_group()
    world.control = None
    _joined.clear()


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
    all-gather of 32 bytes per rank.
    """
    if world.size == 1:
        return
    limit = world.agree_timeout_s if timeout_s is None else timeout_s
    world.num_agreements += 1
    announce(world, phase)
    mine = hashlib.sha256(f"{world.num_agreements}\n{phase}\n{fingerprint}".encode()).digest()
    every = gather_bytes(world, mine, phase=phase, timeout_s=limit)
    if all(other == mine for other in every):
        return
    lines = [f"agreement {world.num_agreements}: {phase}", *describe()]
    raise RanksDisagree(_first_difference(exchange_lines(world, lines, phase=phase, timeout_s=limit), phase))


def gather_bytes(world: World, message: bytes, *, phase: str, timeout_s: float) -> list[bytes]:
    """Collective. Every rank's message (of equal length) on every rank. Raises `RankMissing`."""
    if world.size == 1:
        return [message]
    mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    out = [torch.empty_like(mine) for _ in range(world.size)]
    with _naming_who_is_missing(world, phase, timeout_s):
        work = dist.all_gather(out, mine, group=world.control, async_op=True)
        assert work is not None
        work.wait(datetime.timedelta(seconds=timeout_s))
    return [bytes(part.numpy().tobytes()) for part in out]


def exchange_lines(world: World, lines: Sequence[str], *, phase: str, timeout_s: float) -> list[list[str]]:
    """Collective. Every rank's lines on every rank, of whatever length."""
    blob = "\n".join(lines).encode()
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
                return (
                    f"ranks disagree in {phase}, first at entry {index}: rank 0 has {left!r}, rank {rank} has {right!r}"
                )
    return f"ranks disagree in {phase}, but what they describe is equal: their fingerprints cover something that is not described"


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


def _who_is_missing(world: World, phase: str) -> str:
    """Read the last announced phase of every other rank: those behind are whom we wait for."""
    waits = f"rank {world.rank} waited in {phase!r} for"
    try:
        others = [_last_seen(world, rank) for rank in range(world.size) if rank != world.rank]
    except RuntimeError as error:
        return f"{waits} ranks that it cannot name, since {_STORE_IS_GONE} ({error})"
    behind = [text for count, where, text in others if (count, where) != (world.num_phases, world.phase)]
    if behind:
        return f"{waits} {', '.join(behind)}"
    return f"{waits} a rank that came too, then left or hangs, one of: {', '.join(text for _, _, text in others)}"


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
def lost_ranks_named(world: World, phase: str = "") -> Iterator[None]:
    """`data_phase` without the announcement; without `phase` the one announced last is named. Not collective."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LockstepError) or not _is_lost_peer(error):
            raise
        raise RankMissing(f"{_who_is_missing(world, phase or world.phase)}: {str(error).splitlines()[0]}") from error


def _is_lost_peer(error: RuntimeError) -> bool:
    text = str(error)
    return isinstance(error, dist.DistError) or any(
        mark in text
        for mark in (
            "Connection closed by peer",
            "Connection reset by peer",
            "Timed out waiting",
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
    """Collective. One string of every rank, on every rank, in rank order. Waits `world.timeout_s`: ranks come from unequal work."""
    if world.size == 1:
        return [text]
    announce(world, phase)
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
    said = gather_texts(world, f"{type(failure).__name__}: {failure}" if failure else "", phase=phase)
    if failure is not None:
        raise failure
    for rank, text in enumerate(said):
        if text:
            raise LockstepError(f"rank {rank} failed in {phase}: {text}")
