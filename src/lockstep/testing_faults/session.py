"""Scenarios in, one row of findings each out: a trainer, an engine and a canary that are synced again and again, with faults.

After every scenario it is checked that what the engine serves is what it says it serves (or that it refuses), that every rank ended as
named and within the limit, and that the next sync works.
"""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from lockstep import dist
from lockstep.dist import World
from lockstep.errors import LockstepError, StaleWeights
from lockstep.export.what import AdapterExport, MergedExport
from lockstep.model.load import build_empty, find_model
from lockstep.model.lora import inject_lora
from lockstep.serving import Serving
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.fill import fill
from lockstep.sharding.shard import shard
from lockstep.testing import run_ranks
from lockstep.testing_faults.engine import EngineHost, RemoteEngine, ask_for_engine, make_engine
from lockstep.testing_faults.inject import InjectedFault, Trap, WatchedEngine, WatchedModel
from lockstep.testing_faults.plan import Fault, Setup, fault_of
from lockstep.testing_faults.reference import DRAW, LORA, PROBES, SAMPLING, TOLERANCE, Reference, write_version
from lockstep.types import Prompt, Sample
from lockstep.verify.canary import Canary, probe_prompts

LIMIT_S = 10.0
"""No rank may take longer to its error."""
BUCKET_BYTES = {"adapter": 8192, "merged": 65536}
"""Small: an update has more buckets than there are places for faults."""
_EXPORT_POINTS = {"is_current": "plan", "settle": "agreed", "local_flat": "sending"}


class HarnessError(AssertionError):
    """A scenario that did not come out as it must; the message has its seed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario on one rank."""

    number: int
    rank: int
    fault: str
    outcome: str
    error: str
    """What this rank ended with: the class and its first line; "" where it ended well."""
    seconds: float
    """From the start of the sync to its end on this rank, without the time in which a new engine's process started."""
    served: str
    """What the engine did afterwards: serves its version, or refuses."""


class Session:
    """One rank's part of a trainer with an engine. Everything here is collective unless it says otherwise."""

    def __init__(
        self,
        world: World,
        setup: Setup,
        *,
        desk: Connection | None = None,
        handle: dict[str, Any] | None = None,
        trap: Trap | None = None,
    ):
        """`desk`: where rank 0 asks for an engine (`EngineHost`); `handle`: of one that somebody else started, and keeps."""
        self.world, self.setup = world, setup
        self.trap = trap or Trap(world.rank)
        self.sharded = _make_trainer(world, setup.folder)
        self.reference = Reference(setup.folder)
        self.version = 0
        engine = self._make_engine(desk, handle)
        watched: Any = WatchedModel(self.sharded, self.trap, _EXPORT_POINTS)
        self.serving = Serving(
            engine,
            watched,
            export=AdapterExport() if setup.kind == "adapter" else MergedExport(),
            world=world,
            bucket_bytes=BUCKET_BYTES[setup.kind],
            canary=self._make_canary(),
            connect=self._attach,
        )

    def close(self) -> None:
        """Not collective."""
        self.serving.close()

    def next_version(self) -> None:
        """Not collective. What an optimizer step does: the trainer's weights are those of one version more."""
        self.version += 1
        write_version(self.sharded, self.version)

    def clean_sync(self) -> None:
        """Without a fault. Raises whatever goes wrong."""
        self.trap.arm(None)
        self.serving.sync(self.version)
        self.check_serving()

    def check_serving(self) -> None:
        """What every rank samples is the present version, by its word and by its log-probabilities."""
        samples = self.serving.generate(PROBES, SAMPLING, num_samples=1, draw=DRAW)
        assert {each.policy_version for each in samples} == {self.version}
        self._check_distance(samples, self.version)

    def look(self) -> str:
        """Not collective. What this rank's engine serves now: checked against the version that it claims, or a refusal."""
        try:
            samples = self.serving.engine.generate(PROBES, SAMPLING, num_samples=1, draw=DRAW)
        except StaleWeights:
            return "refuses"
        claimed = samples[0].policy_version
        self._check_distance(samples, claimed)
        return f"serves {claimed - self.version:+d}"

    def run(self, number: int, fault: Fault) -> Row:
        """One scenario: a new version, a sync that meets the fault, the checks, and a sync that must work."""
        self.next_version()
        restarts, starting_s = self._restarts()
        self._arm(fault)
        began, error = time.monotonic(), None
        try:
            self.serving.sync(self.version)
        except (LockstepError, InjectedFault) as raised:
            error = raised
        seconds = time.monotonic() - began
        restarted, started_s = self._restarts()
        seconds -= started_s - starting_s
        outcome = "refused" if error else "restarted" if restarted > restarts else "served"
        fired = self._fired(fault, outcome)
        self.trap.arm(None)
        told = "" if error is None else f"{type(error).__name__}: {str(error).splitlines()[0]}"
        self._check_named(fault, error, seconds, outcome, fired)
        served = self.look()
        if error is not None:
            self._check_refuses()
            self._disarm()
            self.clean_sync()
        else:
            self.check_serving()
        return Row(number, self.world.rank, fault.name, outcome, told, seconds, served)

    def _check_refuses(self) -> None:
        """After a sync that failed nobody samples until the next one has worked."""
        try:
            self.serving.generate(PROBES, SAMPLING, num_samples=1, draw=DRAW)
        except LockstepError:
            return
        raise HarnessError("after a sync that failed, generate gave samples")

    def _check_named(self, fault: Fault, error: Exception | None, seconds: float, outcome: str, fired: bool) -> None:
        said = f"rank {self.world.rank} came to {outcome!r} after {seconds:.2f} s with {error!r}"
        if not fired:
            raise HarnessError(f"the fault never struck; {said}")
        if outcome != fault.outcome:
            raise HarnessError(f"{fault.outcome!r} was due; {said}") from error
        if seconds > LIMIT_S:
            raise HarnessError(f"it took longer than {LIMIT_S:g} s: {said}") from error
        if isinstance(error, InjectedFault) and fault.rank != self.world.rank:
            raise HarnessError(f"another rank's own exception came here: {said}") from error

    def _check_distance(self, samples: list[Sample], version: int) -> None:
        found = self.reference.distance(samples, version)
        if found > TOLERANCE:
            apart = {
                other: self.reference.distance(samples, other) for other in (version - 1, version + 1) if other >= 0
            }
            raise HarnessError(
                f"the engine says that it serves version {version}, and is {found:.1e} nats from it (allowed {TOLERANCE:g}; "
                f"from others: {apart})"
            )

    def _fired(self, fault: Fault, outcome: str) -> bool:
        """Did the fault strike? Of the engine's own only what it led to is seen."""
        if fault.place != "engine":
            return self.trap.fired or fault.rank != self.world.rank
        return fault.act == "late" or outcome != "served"

    def _restarts(self) -> tuple[int, float]:
        """How often rank 0's engine was started again, and how many seconds that took; on every rank."""
        engine = self.serving.engine if self.world.is_main else None
        counts = [getattr(engine, "num_restarts", 0), getattr(engine, "starting_s", 0.0)]
        num, seconds = dist.sum_over_ranks(counts, self.world)
        return int(num), seconds

    def _arm(self, fault: Fault) -> None:
        self.trap.arm(fault)
        if fault.place == "engine" and self.world.is_main:
            self.serving.engine.arm(fault)  # type: ignore[attr-defined]

    def _disarm(self) -> None:
        """A fault that another one's end kept from striking must not strike later."""
        if self.setup.is_shared and self.world.is_main:
            self.serving.engine.arm(None)  # type: ignore[attr-defined]

    def _make_engine(self, desk: Connection | None, handle: dict[str, Any] | None) -> Any:
        if not self.setup.is_shared:
            return WatchedEngine(make_engine(self.setup.folder), self.trap)
        setup = self.setup
        engine: RemoteEngine | None = None
        if self.world.is_main:
            if handle is None:
                assert desk is not None, "an engine, or where to get one"
                handle = ask_for_engine(desk, setup.folder, setup.transport)
            engine = RemoteEngine(handle, timeout_s=setup.timeout_s, trap=self.trap, desk=desk, folder=setup.folder)
        text = json.dumps(engine.handle()) if engine is not None else ""
        text = dist.gather_texts(self.world, text, phase="engine's handle")[0]
        return self._attach(json.loads(text)) if engine is None else WatchedEngine(engine, self.trap)

    def _attach(self, handle: dict[str, Any]) -> Any:
        return WatchedEngine(RemoteEngine(handle, timeout_s=self.setup.timeout_s), self.trap)

    def _make_canary(self) -> Canary:
        watched: Any = WatchedModel(self.sharded, self.trap, {"module": "canary"})
        prompts = probe_prompts(_canary_prompts(), num_prompts=1, max_len=128, num_tokens=6, length=20)
        return Canary(
            watched,
            sampling=SAMPLING,
            world=self.world,
            pad_id=0,
            prompts=prompts,
            dtypes=("float32", "float32"),
            num_samples=2,
            num_tokens=6,
        )


def check_scenarios(setup: Setup, seed: int, first: int, count: int, *, timeout_s: float = 600.0) -> list[list[Row]]:
    """Scenarios `first` .. `first + count` of a seed, in ranks of their own. Rows by rank.

    Raises `AssertionError` with seed and number of the first that does not come out as it must.
    """
    with EngineHost() as host:
        return run_ranks(setup.num_ranks, run_scenarios, setup, seed, first, count, host.desk, timeout_s=timeout_s)


def run_scenarios(world: World, setup: Setup, seed: int, first: int, count: int, desk: Connection) -> list[Row]:
    """Collective; see `check_scenarios`. Scenarios `first` .. `first + count` of a seed, one after the other.

    Raises `HarnessError`.
    """
    rows = []
    with closing(Session(world, setup, desk=desk)) as session:
        session.clean_sync()
        for number in range(first, first + count):
            fault = fault_of(setup, seed, number)
            try:
                rows.append(session.run(number, fault))
            except Exception as error:
                raise HarnessError(
                    f"{type(error).__name__}: {error}\n  scenario {number} of seed {seed}, {setup}: {fault}\n  again: "
                    f"check_scenarios(setup, {seed}, {number}, 1); before it: {[row.fault for row in rows[-3:]]}"
                ) from error
    return rows


def _make_trainer(world: World, folder: str) -> ShardedModel:
    files = find_model(folder)
    sharded = shard(inject_lora(build_empty(files, dtype=torch.float32, attention="sdpa"), LORA, seed=0))
    assert sharded.world is world
    fill(sharded, files, attention="sdpa")
    write_version(sharded, 0)
    return sharded


def _canary_prompts() -> list[Prompt]:
    return [Prompt(f"canary-{i}", tuple((7 * i + 3 * j) % 61 + 3 for j in range(20)), "", "") for i in range(2)]
