"""The trainer's weights and an engine in; samples of exactly these weights out, proven after each update, through engine crashes.

`sync` exports, pushes, and has the canary look. `generate` samples, and refuses samples of another version. When a server dies,
or does not answer, every rank waits while rank 0 starts it again and sends it the full current weights; then the work goes on.
After `engine.max_restarts` the run stops with the engine's own last words. Everything here is collective.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar, cast

import torch

from lockstep import dist
from lockstep.dist import World
from lockstep.errors import EngineDied, EngineUnhealthy, LockstepError, RankMissing, RanksDisagree, StaleWeights
from lockstep.export.stream import export_weights
from lockstep.export.what import Export
from lockstep.rollout.base import Engine, SharedEngine
from lockstep.sharding.base import ShardedModel
from lockstep.transport.inproc import Pushed, push
from lockstep.types import Draw, Prompt, Sample, Sampling
from lockstep.verify.canary import Canary

log = logging.getLogger(__name__)

T = TypeVar("T")

Connect = Callable[[dict[str, Any]], SharedEngine]
"""A handle in, another rank's engine out."""


@dataclass(frozen=True, slots=True)
class _Update:
    """What one rank has of an update."""

    pushed: Pushed | None
    samples: list[Sample] | None
    """The engine's answer to the canary's probe."""
    seconds: dict[str, float]
    """`sync/push_seconds`: export, transport and commit; `canary/generate_seconds`."""


@dataclass(frozen=True, slots=True)
class Synced:
    """One update that the engine serves; the same on every rank."""

    pushed: Pushed
    metrics: dict[str, float] = field(default_factory=dict)
    """This rank's seconds, and the canary's numbers where it looked."""


class Serving:
    """An engine that serves what the trainer has."""

    def __init__(
        self,
        engine: Engine,
        sharded: ShardedModel,
        *,
        export: Export,
        world: World,
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
        canary: Canary | None = None,
        canary_every: int = 1,
        connect: Connect | None = None,
    ):
        """`dtype`: what floats travel in, rounded once; None: as they are. `connect`: for a shared engine, how ranks other than 0 get
        one of their own from a new handle."""
        self.engine = engine
        self._sharded, self._export, self._world = sharded, export, world
        self._bucket_bytes, self._dtype = bucket_bytes, dtype
        self._canary, self._canary_every = canary, canary_every
        self._connect = connect
        self._version: int | None = None
        self._digest: str | None = None
        """Version and digest (on a rank that pushes) of the sync that was proven last; None while there is none."""
        self._num_syncs = 0

    def sync(self, version: int) -> Synced:
        """Collective. Have the engine serve the trainer's present weights as `version`, as one transaction, and prove it.

        Raises `CanaryFailed` if the engine serves something else, `TransportError` if the update does not arrive whole (it then
        serves the old version, or nothing). After a sync that failed nothing is sampled until one has worked.
        """
        looks = self._canary is not None and self._num_syncs % self._canary_every == 0
        self._version = self._digest = None
        update = self._through_crashes(lambda: self._update(version, looks=looks), "sync", version=None)
        pushed = self._told(update.pushed)
        metrics = update.seconds
        if self._canary is not None:
            if looks:
                metrics |= self._canary.check(update.samples, version=version).metrics
            self._canary.remember(version)
        self._version, self._digest = version, pushed.digest
        self._num_syncs += 1
        return Synced(pushed, metrics)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, draw: Draw, phase: str = "rollout"
    ) -> list[Sample]:
        """Collective. This rank's samples (none for no prompts), all of the version that was last synced.

        Raises `StaleWeights` for samples of another version, and after a sync that failed; one rank's failure is every rank's.
        """
        if self._version is None:
            raise StaleWeights(
                "no version is known to be served: the last sync did not succeed, or there was none. Sync first, then generate"
            )

        def sample() -> list[Sample]:
            if not prompts:
                return []
            samples = self.engine.generate(prompts, sampling, num_samples=num_samples, draw=draw)
            self._check_versions(samples)
            return samples

        return self._through_crashes(sample, phase, version=self._version)

    def canary_state(self) -> dict[str, Any] | None:
        """Not collective. What the canary has learnt of this run's engine, for a checkpoint, as JSON; None without a canary."""
        return None if self._canary is None else self._canary.state()

    def canary_from(self, state: dict[str, Any] | None) -> None:
        """Not collective. Go on from what a checkpoint has of `canary_state`. None (an older checkpoint): it calibrates anew."""
        if self._canary is not None and state is not None:
            self._canary.restore(state)

    def close(self) -> None:
        """Not collective. Let go of the engine; what was started for it ends."""
        self.engine.close()

    def _check_versions(self, samples: Sequence[Sample]) -> None:
        others = sorted({sample.policy_version for sample in samples} - {self._version})
        if others:
            raise StaleWeights(
                f"the engine sampled with version {others[0]} where {self._version} is due; its samples are thrown away. Look at "
                "the engine's log: who else sends it weights, or restarted it?"
            )

    def _update(self, version: int, *, looks: bool) -> _Update:
        """Collective. Export, push, and (`looks`) the engine's answer to the canary's probe."""
        pushes = self._world.is_main or not self.engine.is_shared
        to = 0 if self.engine.is_shared else "all"
        pushed: Pushed | None = None
        began = time.perf_counter()
        how: dict[str, Any] = {"bucket_bytes": self._bucket_bytes, "to": to, "dtype": self._dtype}
        with export_weights(self._sharded, self._export, **how) as stream:
            if pushes:
                pushed = push(stream, self.engine, stream.manifest(version))
            else:
                deque(stream, maxlen=0)  # nothing comes here, and this rank takes part
        seconds = {"sync/push_seconds": time.perf_counter() - began}
        if not (pushes and looks):
            return _Update(pushed, None, seconds)
        assert self._canary is not None
        probe = self._canary.probe_request()
        answer = self.engine.generate(probe.prompts, probe.sampling, num_samples=probe.num_samples, draw=probe.draw)
        asked = time.perf_counter() - began - seconds["sync/push_seconds"]
        return _Update(pushed, answer, seconds | {"canary/generate_seconds": asked})

    def _told(self, pushed: Pushed | None) -> Pushed:
        """Collective. What rank 0 pushed, on every rank; the others' handles learn the version."""
        if not self.engine.is_shared:
            assert pushed is not None
            return pushed
        text = json.dumps(asdict(pushed)) if pushed is not None else ""
        pushed = Pushed(**json.loads(dist.gather_texts(self._world, text, phase="what was pushed")[0]))
        self._saw(pushed.version)
        return pushed

    def _through_crashes(self, work: Callable[[], T], phase: str, *, version: int | None) -> T:
        """Collective. `work` on every rank; where an engine fails meanwhile, again after a restart.

        `version`: what the restarted engine must be given before (None: `work` itself gives it its weights).
        """
        while True:
            announced, failure = self._attempt(work, phase)
            if failure is None:
                return cast(T, announced)
            self._revive(failure)
            if version is not None:
                self._through_crashes(lambda: self._resend(version), "sync", version=None)
                self._saw(version)

    def _resend(self, version: int) -> None:
        """Collective. The proven version once more, for an engine that has lost it; refused where the trainer has moved on since."""
        pushed = self._update(version, looks=False).pushed
        if pushed is not None and pushed.digest != self._digest:
            digest, self._version = self._digest, None
            raise StaleWeights(
                f"the engine was started again and needs version {version}, but the trainer's weights are no longer those (digest "
                f"{pushed.digest[:12]}, {str(digest)[:12]} when they were synced); sync after an update, before the next generate"
            )

    def _saw(self, version: int) -> None:
        """Collective. The handles of the ranks that did not push learn what is served."""
        if self.engine.is_shared:
            with dist.all_or_none(self._world, "hearing of an update"):
                if not self._world.is_main:
                    cast(SharedEngine, self.engine).saw(version)

    def _attempt(self, work: Callable[[], T], phase: str) -> tuple[T | None, str | None]:
        """Collective. The result; or, on every rank, what an engine failed with. Any other error ends all ranks.

        Nobody is asked how it went where the ranks are known to be out of step, or one to be missing: it would not answer.
        """
        result, error = None, None
        dist.announce(self._world, phase)
        try:
            result = work()
        except Exception as raised:
            error = raised
        if error is not None and (self._world.is_torn or isinstance(error, RankMissing | RanksDisagree)):
            raise error
        is_engine = isinstance(error, EngineDied | EngineUnhealthy)
        told = "" if error is None else f"{'engine' if is_engine else 'other'} {type(error).__name__}: {error}"
        try:
            said = dist.gather_texts(self._world, told, phase=phase)
        except RanksDisagree as apart:  # the others are not here yet, and have been told why this rank is
            if error is None:
                raise
            raise error from apart
        engines = [text.removeprefix("engine ") for text in said if text.startswith("engine ")]
        if engines and (self.engine.is_shared or error is None):
            return None, engines[0]
        if error is not None:
            raise error
        for rank, text in enumerate(said):
            if text:
                raise LockstepError(f"rank {rank} failed in {phase}: {text.partition(' ')[2]}")
        return result, None

    def _revive(self, failure: str) -> None:
        """Collective. Rank 0 starts the engine again; the others connect anew. Raises where that is not possible."""
        if not self.engine.is_shared:
            raise EngineDied(
                f"an engine of another rank failed, and it is not one that can be started again: {failure}"
            )
        engine = cast(SharedEngine, self.engine)
        with dist.all_or_none(self._world, "restarting the engine"):
            if self._world.is_main:
                log.warning("the engine failed (%s); it is started again and gets the current weights", failure)
                try:
                    engine.restart()
                except (EngineDied, EngineUnhealthy) as error:
                    raise type(error)(f"{error}\nIt had failed with: {failure}") from error
        text = json.dumps(engine.handle()) if self._world.is_main else ""
        handle = json.loads(dist.gather_texts(self._world, text, phase="engine's handle")[0])
        with dist.all_or_none(self._world, "connecting to the engine"):
            if not self._world.is_main:
                assert self._connect is not None, "a shared engine on several ranks comes with a way to connect"
                engine.close()
                self.engine = self._connect(handle)
