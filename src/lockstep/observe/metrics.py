"""The numbers of each step in; `metrics.jsonl` and TensorBoard events out. For rank 0.

A metric that is not a finite number is written as `null` (JSON has no NaN) and named once in the log; TensorBoard gets it
as it is.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, get_args, get_type_hints

from torch.utils.tensorboard import SummaryWriter

from lockstep.errors import LockstepError
from lockstep.files import atomic_write_text, explain_os_errors
from lockstep.rundir import RunDir
from lockstep.types import Episode, ScoredSample, Stat

log = logging.getLogger(__name__)


class StepLines:
    """A file of JSON objects, one whole line each, every one with the step it belongs to.

    `resume_step` is the number of steps that the run already has: what was written beyond it is dropped. Raises
    `CheckpointError` when the disk refuses; a line is then taken back, not left half.
    """

    def __init__(self, path: Path, *, resume_step: int):
        self._path = path
        _drop_steps_beyond(path, resume_step)
        with explain_os_errors(path):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        data = (json.dumps({"step": step, **values}, ensure_ascii=False, allow_nan=False) + "\n").encode()
        with explain_os_errors(self._path):
            before = os.fstat(self._file).st_size
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError:
                os.ftruncate(self._file, before)
                raise

    def close(self) -> None:
        os.close(self._file)


class MetricsWriter:
    """One line per step in `metrics.jsonl`, the same numbers in TensorBoard; a step never appears twice (`StepLines`)."""

    def __init__(self, run_dir: RunDir, *, tensorboard: bool, resume_step: int = 0):
        self._lines = StepLines(run_dir.metrics, resume_step=resume_step)
        self._folder = run_dir.tensorboard
        self._named: set[str] = set()
        self._events = None
        if tensorboard:
            with explain_os_errors(self._folder):
                self._events = SummaryWriter(str(self._folder), purge_step=resume_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the step's numbers, keys in the order given."""
        values = {name: float(value) for name, value in metrics.items()}
        odd = [name for name, value in values.items() if not math.isfinite(value) and name not in self._named]
        if odd:
            self._named.update(odd)
            log.warning("step %d: not finite, written as null: %s", step, ", ".join(f"{n} = {values[n]}" for n in odd))
        self._lines.append(step, {name: finite_or_none(value) for name, value in values.items()})
        self.draw(step, values)

    def draw(self, step: int, values: Mapping[str, float]) -> None:
        """To TensorBoard alone; dots make groups."""
        if self._events is None:
            return
        with explain_os_errors(self._folder):
            for name, value in values.items():
                self._events.add_scalar(name.replace(".", "/"), value, step)
            self._events.flush()

    def close(self) -> None:
        self._lines.close()
        if self._events is not None:
            with explain_os_errors(self._folder):
                self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `StepLines` file, in order. A line that a killed run left unfinished is passed over."""
    if not path.exists():
        return []
    with explain_os_errors(path):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    entries = [entry for line in lines if (entry := _parse(line)) is not None]
    if len(entries) < len(lines):
        log.warning("%s: passed over %d damaged lines", path, len(lines) - len(entries))
    return entries


def reward_stats(
    scored: Sequence[ScoredSample], labels: Sequence[str], *, with_episodes: bool = False
) -> dict[str, Stat]:
    """Sums and counts of one rank's samples, for `dist.sum_stats`: the same keys on every rank, also on one without samples.

    `reward` and `reward.<label>` (`labels` names the reward functions), `completion_tokens` (sampled ones) per sample,
    `truncated` (share cut at max_new_tokens) and `empty` (share without any text). `with_episodes`, where the recipe has an
    environment: `episode/turns` and `episode/observation_tokens` per sample, and the share of each way to end (`episode/done`, ..).
    """
    count = len(scored)
    columns = {
        "reward": [item.reward for item in scored],
        **{f"reward.{label}": [item.parts[label] for item in scored] for label in labels},
        "completion_tokens": [item.sample.num_sampled for item in scored],
        "truncated": [item.sample.finish == "length" for item in scored],
        "empty": [not item.sample.text.strip() for item in scored],
        **(_episode_columns(scored) if with_episodes else {}),
    }
    return {name: Stat(math.fsum(values), count) for name, values in columns.items()}


def _episode_columns(scored: Sequence[ScoredSample]) -> dict[str, list[float]]:
    episodes = [item.sample.episode for item in scored if item.sample.episode is not None]
    ways = get_args(get_type_hints(Episode)["ended"])
    return {
        "episode/turns": [len(episode.rewards) for episode in episodes],
        "episode/observation_tokens": [len(item.sample.ids) - item.sample.num_sampled for item in scored],
        **{f"episode/{way}": [episode.ended == way for episode in episodes] for way in ways},
    }


def refuse_empty(sums: Mapping[str, Stat], *, step: int, samples: Path) -> None:
    """Raises `LockstepError` when no completion of the step, over all ranks, has any text: nothing could be learned from it."""
    if sums["empty"].mean == 1.0:
        raise LockstepError(
            f"step {step}: all {sums['empty'].count:.0f} completions are empty: the model ends its answer at once. "
            f"Look at {samples}, at data.prompt (template, format) and at rollout.stop_token_ids"
        )


def finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _drop_steps_beyond(path: Path, resume_step: int) -> None:
    """Steps made after the checkpoint that is resumed will be made again. Also drops a line left unfinished by a kill."""
    if not path.exists():
        return
    kept = [
        json.dumps(entry, ensure_ascii=False) + "\n" for entry in read_metrics(path) if entry["step"] <= resume_step
    ]
    if "".join(kept) != path.read_text(encoding="utf-8", errors="replace"):
        atomic_write_text(path, "".join(kept))


def _parse(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None
