"""What a run does, as it does it, in; progress, metrics, samples and the summary out. Rank 0 writes, the others only time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from lockstep.config import Config
from lockstep.dist import World
from lockstep.evaluate import EvalResult
from lockstep.observe.metrics import MetricsWriter
from lockstep.observe.progress import Progress, make_console
from lockstep.observe.report import RunSummary, print_summary, suggest_next_steps, write_summary
from lockstep.observe.samples import SampleWriter
from lockstep.observe.timing import Phase, PhaseTimer
from lockstep.rundir import RunDir
from lockstep.types import ScoredSample


class Observer:
    """Use as a context: it puts the terminal back and closes its files, also after an error."""

    def __init__(self, config: Config, run: RunDir, world: World, *, resume_step: int):
        self._config, self._run, self._world = config, run, world
        self._console = make_console(world.rank)
        self._progress = Progress(config.run.num_steps, console=self._console, first_step=resume_step)
        self._timer = PhaseTimer(on_phase=self._progress.phase, device=world.device)
        self._metrics: MetricsWriter | None = None
        self._samples: SampleWriter | None = None
        if world.is_main:
            observe = config.observe
            self._metrics = MetricsWriter(run, tensorboard=observe.tensorboard, resume_step=resume_step)
            self._samples = SampleWriter(run, limit=observe.samples_per_step, resume_step=resume_step)

    def phase(self, name: str) -> AbstractContextManager[Phase]:
        """Time the block; set `.tokens` of what it yields."""
        return self._timer.phase(name)

    def note(self, text: str) -> None:
        self._progress.note(text)

    def start_training(self) -> None:
        """What was timed so far is not a step's."""
        self._timer.take_step()
        self._progress.restart_clock()

    def step(self, step: int, metrics: Mapping[str, float], scored: Sequence[ScoredSample]) -> None:
        """One step is done: its numbers over all ranks, and this rank's samples."""
        times = self._timer.take_step()
        seconds = math.fsum(value for name, value in times.items() if name.startswith("seconds."))
        tokens = metrics["completion_tokens_total"]
        self._progress.step(
            step, reward=metrics["reward"], loss=metrics["loss"], tokens_per_second=tokens / seconds if seconds else math.nan
        )
        if self._metrics is not None and self._samples is not None:
            self._metrics.write(step, {**metrics, **times})
            self._samples.write(step, scored)

    def score(self, name: str, result: EvalResult) -> None:
        form = "" if result.format_rate is None else f", format {100 * result.format_rate:.1f} %"
        self.note(f"{name}: accuracy {100 * result.accuracy:.1f} %{form} of {result.num_problems} held-out problems, asked {result.template!r}")

    def finish(
        self,
        *,
        steps: int,
        train_seconds: float,
        rewards: tuple[float | None, float | None],
        before: EvalResult | None,
        after: EvalResult | None,
    ) -> None:
        """Write summary.json and print the tables. `rewards` is the first and the last step's mean."""
        if not self._world.is_main:
            return
        config = self._config
        summary = RunSummary(
            model=config.model.path,
            world_size=self._world.size,
            policy_version=steps,
            num_steps=steps,
            train_seconds=train_seconds,
            reward_first=rewards[0],
            reward_last=rewards[1],
            before=before,
            after=after,
            seconds=self._timer.seconds,
            tokens_per_second=self._timer.tokens_per_second,
        )
        write_summary(self._run.summary, summary)
        steps_to_take = suggest_next_steps(
            self._run.path, model=config.model.path, num_steps=steps, has_tensorboard=config.observe.tensorboard
        )
        print_summary(self._console, summary, steps_to_take)

    def __enter__(self) -> Observer:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)
        if self._metrics is not None:
            self._metrics.close()
