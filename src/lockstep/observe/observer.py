"""What the loop says in; files, the terminal and the summary out. Every rank has one; rank 0's writes and prints."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from lockstep.config import Config
from lockstep.dist import World
from lockstep.evaluate import EvalResult
from lockstep.observe.metrics import MetricsWriter, StepLines, finite_or_none
from lockstep.observe.progress import Progress, make_console
from lockstep.observe.report import Carried, RunSummary, print_summary, suggest_next_steps, write_summary
from lockstep.observe.samples import SampleWriter
from lockstep.observe.timing import Phase, PhaseTimer
from lockstep.rundir import RunDir
from lockstep.signals import stop_requested
from lockstep.types import ScoredSample

log = logging.getLogger(__name__)

IDLE_STEPS = 5
"""Steps without a gradient after which the user is told, once."""


class Observer:
    """Use it as a context: it closes the files and puts the terminal back, also after an error. Nothing is collective.

    `resume_step` is the number of steps that the run already has: what is on disk beyond it is dropped. Raises
    `CheckpointError` on rank 0 when the disk refuses.
    """

    def __init__(self, config: Config, run: RunDir, world: World, *, resume_step: int):
        self._config, self._run, self._world = config, run, world
        self._step = resume_step
        self._console = make_console(world.rank)
        self._progress = Progress(config.run.num_steps, console=self._console, first_step=resume_step)
        self._timer = PhaseTimer(on_phase=self._progress.phase, device=world.device)
        self._open = ExitStack()
        self._metrics: MetricsWriter | None = None
        self._evals: StepLines | None = None
        self._samples: SampleWriter | None = None
        self._idle_steps = 0

    def __enter__(self) -> Observer:
        observe, step = self._config.observe, self._step
        with self._open:
            if self._world.is_main:
                metrics = MetricsWriter(self._run, tensorboard=observe.tensorboard, resume_step=step)
                self._metrics = self._open.enter_context(metrics)
                self._evals = StepLines(self._run.evals, resume_step=step)
                self._open.callback(self._evals.close)
                self._samples = SampleWriter(self._run, limit=observe.samples_per_step, resume_step=step)
            self._open.enter_context(self._progress)
            self._open = self._open.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def note(self, text: str) -> None:
        """A line for the user."""
        self._progress.note(text)

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Time a block, show that it runs, and mark it in profiles. Set `.tokens` of what it yields."""
        with self._timer.phase(name) as phase:
            yield phase

    def times(self) -> dict[str, dict[str, float]]:
        """Seconds and tokens of every phase of the run so far: saved with a checkpoint."""
        return self._timer.saved()

    def resumed(self, found: Path, times: Mapping[str, Mapping[str, float]]) -> None:
        """The run goes on from a checkpoint; `times` is what was saved with it."""
        self._timer.carry_on(times)
        self.note(f"resumed from {found}")

    def start_training(self) -> None:
        """From now on time counts as training: the first step is not charged for what came before."""
        self._timer.take_step()
        self._progress.restart_clock()

    def step(self, step: int, metrics: Mapping[str, float], scored: Sequence[ScoredSample]) -> None:
        """The numbers of a step, over all ranks, and this rank's samples. `reward` and `loss` are shown."""
        self._step = step
        numbers = {**metrics, **self._timer.take_step()}
        if self._metrics is None or self._samples is None:
            return
        self._metrics.write(step, numbers)
        self._samples.write(step, scored)
        tokens, seconds = numbers.get("completion_tokens_total", 0.0), numbers.get("step_seconds", 0.0)
        rate = tokens / seconds if seconds else 0.0
        self._progress.step(step, reward=numbers["reward"], loss=numbers.get("loss"), tokens_per_second=rate)
        self._warn_if_idle(is_idle="loss" not in numbers)

    def _warn_if_idle(self, *, is_idle: bool) -> None:
        self._idle_steps = self._idle_steps + 1 if is_idle else 0
        if self._idle_steps == IDLE_STEPS:
            log.warning(
                "%d steps in a row taught nothing: in every group all samples earn the same. Look at samples/: a reward that "
                "is too easy, too hard or satisfied by a trick; a temperature too low; a group too small",
                IDLE_STEPS,
            )

    def score(self, name: str, result: EvalResult) -> None:
        """A scoring of the held-out problems: a line in `eval.jsonl` and on the terminal, curves in TensorBoard."""
        form = "" if result.format_rate is None else f", format rate {100 * result.format_rate:.1f} %"
        problems = f"{result.num_problems} held-out problems"
        self.note(
            f"eval {name}: accuracy {100 * result.accuracy:.1f} %{form} on {problems}, asked with {result.template!r}"
        )
        if self._metrics is None or self._evals is None:
            return
        values = {"accuracy": finite_or_none(result.accuracy), "format_rate": finite_or_none(result.format_rate)}
        rest = {"num_problems": result.num_problems, "template": result.template}
        self._evals.append(self._step, {"name": name, **values, **rest})
        self._metrics.draw(self._step, {f"eval.{key}": value for key, value in values.items() if value is not None})

    def finish(self, carried: Carried, *, after: EvalResult | None, steps: int) -> None:
        """Write `summary.json` and, unless the run was asked to stop, print the table and what to do next."""
        if not self._world.is_main:
            return
        summary = RunSummary(
            model=self._config.model.path,
            world_size=self._world.size,
            policy_version=steps,
            num_steps=steps,
            train_seconds=carried.train_seconds,
            reward_first=carried.reward_first,
            reward_last=carried.reward_last,
            before=carried.before,
            after=after,
            seconds=self._timer.seconds,
            tokens_per_second=self._timer.tokens_per_second,
        )
        write_summary(self._run.summary, summary)
        self._open.close()
        if stop_requested() is None:
            todo = suggest_next_steps(
                self._run.path,
                model=self._config.model.path,
                num_steps=steps,
                has_tensorboard=self._config.observe.tensorboard,
                planned_steps=self._config.run.num_steps,
            )
            print_summary(self._console, summary, todo)
