"""What a run came to in; `summary.json` and a table with what to do next out. For rank 0."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lockstep import __version__
from lockstep.evaluate import EvalResult
from lockstep.files import atomic_write_text
from lockstep.observe.metrics import finite_or_none

WIDTH = 80


@dataclass(frozen=True, slots=True)
class Carried:
    """What the summary needs of the time before a resume: it travels in every checkpoint."""

    train_seconds: float = 0.0
    """Of all steps so far."""
    reward_first: float | None = None
    """Mean reward of the first step."""
    reward_last: float | None = None
    before: EvalResult | None = None

    def after_step(self, *, reward: float, seconds: float) -> Carried:
        first = reward if self.reward_first is None else self.reward_first
        return replace(self, train_seconds=self.train_seconds + seconds, reward_first=first, reward_last=reward)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Carried:
        before = values["before"]
        return cls(**{**values, "before": EvalResult(**before) if before else None})


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What `summary.json` holds. None: not measured."""

    model: str
    world_size: int
    policy_version: int
    """Optimizer steps behind the final weights."""
    num_steps: int
    """Steps made over the whole run, before a resume included."""
    train_seconds: float
    """Wall-clock time of these steps; evaluation and start-up are not counted."""
    reward_first: float | None
    reward_last: float | None
    before: EvalResult | None = None
    after: EvalResult | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase."""
    tokens_per_second: Mapping[str, float] = field(default_factory=dict)
    """By phase; phases that count tokens only."""


def num_problems(summary: RunSummary) -> int | None:
    """Held-out problems scored; None if none were."""
    scored = summary.after or summary.before
    return scored.num_problems if scored else None


def write_summary(path: Path, summary: RunSummary) -> None:
    """Put `summary.json` down, whole. Raises `CheckpointError` when the disk refuses."""
    atomic_write_text(path, json.dumps(summary_tree(summary), indent=2) + "\n")


def summary_tree(summary: RunSummary) -> dict[str, Any]:
    """The file's nested keys: eval.before.accuracy, reward.first, tokens_per_second.generate, ..."""
    return {
        "eval": {
            "before": _score_tree(summary.before),
            "after": _score_tree(summary.after),
            "num_problems": num_problems(summary),
        },
        "train_seconds": finite_or_none(summary.train_seconds),
        "num_steps": summary.num_steps,
        "reward": {"first": finite_or_none(summary.reward_first), "last": finite_or_none(summary.reward_last)},
        "tokens_per_second": {name: finite_or_none(value) for name, value in summary.tokens_per_second.items()},
        "seconds": {name: finite_or_none(value) for name, value in summary.seconds.items()},
        "model": summary.model,
        "world_size": summary.world_size,
        "policy_version": summary.policy_version,
        "versions": {"lockstep": __version__, "torch": torch.__version__},
    }


def print_summary(console: Console, summary: RunSummary, next_steps: Sequence[tuple[str, str]]) -> None:
    """A table of what came out and, below it, what to do next: (what for, command) pairs. Reads well in 80 columns."""
    console.print()
    console.print(_outcome_table(summary))
    if summary.seconds:
        console.print(_phase_table(summary))
    if next_steps:
        console.print("What to do next:")
        for what, command in next_steps:
            # soft_wrap: a command that is broken over two lines cannot be copied.
            console.print(f"  {what}\n      {command}", markup=False, highlight=False, soft_wrap=True)


def suggest_next_steps(
    run_dir: Path, *, model: str, num_steps: int, has_tensorboard: bool, planned_steps: int | None = None
) -> list[tuple[str, str]]:
    """What one does with a finished run directory. A run that ended before its `planned_steps` was out of time."""
    recipe = shlex.quote(str(run_dir / "config.yaml"))
    adapter = run_dir / "checkpoints" / f"step-{num_steps:06d}" / "adapter"
    more = "run.max_train_seconds=null" if num_steps < (planned_steps or 0) else f"run.num_steps={2 * num_steps}"
    steps = []
    if has_tensorboard:
        steps.append(("see the curves", f"tensorboard --logdir {shlex.quote(str(run_dir / 'tensorboard'))}"))
    steps += [
        ("score the adapter again, or with other options", f"lockstep eval {recipe}"),
        ("train longer", f"lockstep train {recipe} --resume {more}"),
    ]
    base = "base_model" if model.startswith("package:") else f"AutoModelForCausalLM.from_pretrained({model!r})"
    return [*steps, ("load the adapter in Python", f"PeftModel.from_pretrained({base}, {str(adapter)!r})")]


def _outcome_table(summary: RunSummary) -> Table:
    table = _table("", "before", "after", "change")
    before, after = summary.before, summary.after
    if before or after:
        _add_rates(table, "accuracy, held out", before and before.accuracy, after and after.accuracy)
        _add_rates(table, "format rate, held out", before and before.format_rate, after and after.format_rate)
    first, last = finite_or_none(summary.reward_first), finite_or_none(summary.reward_last)
    gain = f"{last - first:+.3f}" if first is not None and last is not None else "-"
    table.add_row("reward, first and last step", _number(first), _number(last), gain)
    count = num_problems(summary)
    problems = f"; {count} held-out problems" if count else ""
    table.caption = (
        f"{summary.num_steps} steps in {summary.train_seconds:.0f} s on {summary.world_size} rank(s){problems}"
    )
    return table


def _phase_table(summary: RunSummary) -> Table:
    table = _table("phase", "seconds", "share", "tokens/s")
    total = sum(summary.seconds.values())
    for name, seconds in summary.seconds.items():
        rate = summary.tokens_per_second.get(name)
        share = f"{100 * seconds / total:.0f} %" if total else "-"
        table.add_row(name, f"{seconds:.1f}", share, f"{rate:,.0f}" if rate is not None else "-")
    return table


def _table(*columns: str) -> Table:
    table = Table(width=min(WIDTH, 64), caption_justify="left")
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", ratio=None if place else 1)
    return table


def _add_rates(table: Table, name: str, before: float | None, after: float | None) -> None:
    if before is None and after is None:
        return
    gain = f"{100 * (after - before):+.1f} pts" if before is not None and after is not None else "-"
    table.add_row(name, _percent(before), _percent(after), gain)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _score_tree(score: EvalResult | None) -> dict[str, Any] | None:
    if score is None:
        return None
    return {
        "accuracy": finite_or_none(score.accuracy),
        "format_rate": finite_or_none(score.format_rate),
        "template": score.template,
    }
