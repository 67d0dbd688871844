"""Faults that end a run in; how the ranks that were left ended, what the engine serves then, and whether new ranks go on, out.

Each scenario has ranks of its own, one after the other on one engine, which outlives them: the first sync of each is the next sync
after the one before.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.dist import World
from lockstep.errors import LockstepError, StaleWeights
from lockstep.testing import collect_ranks
from lockstep.testing_faults.engine import EngineHost, RemoteEngine
from lockstep.testing_faults.inject import InjectedFault, Trap
from lockstep.testing_faults.plan import Fault, Setup
from lockstep.testing_faults.reference import DRAW, PROBES, SAMPLING, TOLERANCE, Reference
from lockstep.testing_faults.session import LIMIT_S, HarnessError, Session

GROUP_TIMEOUT_S = 8.0
"""Of the process groups: what ends a forward whose other rank is frozen."""
WORK_TIMEOUT_S, AGREE_TIMEOUT_S = 5.0, 4.0
"""Limits of the world while the fault strikes."""


@dataclass(frozen=True, slots=True)
class DeadlyRow:
    """One scenario."""

    fault: str
    rank: int
    """Which rank was hurt."""
    errors: dict[int, str]
    """Rank -> what it ended with: the class and its first line. Killed ranks have none."""
    seconds: float
    """From the fault to the last survivor's error; 0 without survivors. A frozen rank is woken after that."""
    served: str
    """What the engine did afterwards, seen from outside."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a rank that is left ended."""

    error: str
    is_named: bool
    seconds: float
    served: str


def check_deadly(setup: Setup, faults: Sequence[Fault]) -> list[DeadlyRow]:
    """Run each fault in ranks of its own. Raises `HarnessError` naming the first that does not come out as it must."""
    reference = Reference(setup.folder)
    rows = []
    with EngineHost() as host:
        handle = host.start(setup.folder, setup.transport) if setup.is_shared else None
        for number, fault in enumerate(faults):
            try:
                rows.append(_check_one(setup, fault, handle, 2 * number, reference))
            except Exception as error:
                raise HarnessError(
                    f"{type(error).__name__}: {error}\n  scenario {number}, {setup}: {fault}; before it: "
                    f"{[row.fault for row in rows[-2:]]}\n  again: check_deadly(setup, [{fault}])"
                ) from error
    return rows


def _check_one(
    setup: Setup, fault: Fault, handle: dict[str, Any] | None, version: int, reference: Reference
) -> DeadlyRow:
    with tempfile.TemporaryDirectory(prefix="lockstep-faults-") as folder:
        mark = Path(folder) / "struck"
        outcomes = collect_ranks(
            setup.num_ranks,
            _run,
            setup,
            fault,
            handle,
            version,
            str(mark),
            timeout_s=60.0,
            agree_timeout_s=GROUP_TIMEOUT_S,
            world_timeout_s=GROUP_TIMEOUT_S,
        )
        if not mark.exists():
            raise HarnessError(f"the fault never struck: {outcomes}")
    ended: dict[int, _Ended] = {}
    for rank, (ok, value) in enumerate(outcomes):
        is_victim = rank == fault.rank and fault.act in ("kill", "exit")
        if ok:
            ended[rank] = value
        elif not is_victim:
            raise HarnessError(f"rank {rank} did not end with an error of its own: {value}")
    return _judge(setup, fault, ended, version, _seen_from_outside(handle, version + 2, reference))


def _judge(setup: Setup, fault: Fault, ended: dict[int, _Ended], version: int, served: str) -> DeadlyRow:
    survivors = {rank: each for rank, each in ended.items() if rank != fault.rank}
    for rank, each in ended.items():
        if not each.is_named:
            raise HarnessError(f"rank {rank} ended with an error without a name: {each.error}")
    late = max((each.seconds for each in survivors.values()), default=0.0)
    if late > LIMIT_S:
        raise HarnessError(f"it took {late:.1f} s, {LIMIT_S:g} s are allowed: {ended}")
    seen = {each.served for each in ended.values()} | ({served} if served else set())
    allowed = {"serves -1", "serves +0"} | (set() if setup.kind == "adapter" else {"refuses"})
    if not seen <= allowed:
        raise HarnessError(
            f"the engine {seen}; after version {version + 1} was synced and {version + 2} was not: {allowed}"
        )
    errors = {rank: each.error for rank, each in ended.items()}
    return DeadlyRow(fault.name, fault.rank, errors, late, served or "/".join(sorted(seen)))


def _seen_from_outside(handle: dict[str, Any] | None, version: int, reference: Reference) -> str:
    """What the engine serves once all ranks are gone, relative to `version`; "" where it went with its rank."""
    if handle is None:
        return ""
    engine = RemoteEngine(handle, timeout_s=LIMIT_S)
    with closing(engine):
        try:
            samples = engine.generate(PROBES, SAMPLING, num_samples=1, draw=DRAW)
        except StaleWeights:
            return "refuses"
    claimed = samples[0].policy_version
    found = reference.distance(samples, claimed)
    if found > TOLERANCE:
        raise HarnessError(f"the engine says that it serves version {claimed}, and is {found:.1e} nats from it")
    return f"serves {claimed - version:+d}"


def _run(world: World, setup: Setup, fault: Fault, handle: dict[str, Any] | None, version: int, mark: str) -> _Ended:
    """One rank: a sync that must work, then one that meets the fault."""
    path = Path(mark)

    def on_end() -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps([os.getpid(), time.monotonic()]))
        part.rename(path)

    session = Session(world, setup, handle=handle, trap=Trap(world.rank, on_end=on_end))
    session.version = version
    session.next_version()
    session.clean_sync()
    world.timeout_s, world.agree_timeout_s = WORK_TIMEOUT_S, AGREE_TIMEOUT_S
    session.next_version()
    session.trap.arm(fault)
    try:
        session.serving.sync(session.version)
    except Exception as error:  # whatever it is: the row says whether it has a name
        seen_at = time.monotonic()
        is_named = isinstance(error, LockstepError) or (isinstance(error, InjectedFault) and world.rank == fault.rank)
        pid, struck_at = json.loads(path.read_text())
        if fault.act == "freeze" and world.rank != fault.rank:
            os.kill(pid, signal.SIGCONT)
        told = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return _Ended(told, is_named, seen_at - struck_at, session.look())
    raise HarnessError("the sync went on as if nothing had been")
