"""Algorithms and seeds in; a held-out accuracy curve of each on SmolLM2, as a figure and a table, out.

Every run is `lockstep train` on the demo's task with the same prompts, samples and steps; only the algorithm differs. A run that
is there already is not made again, so the figure can be drawn while others are still to come.

    python benchmarks/learning_curves.py run --dir curves                    # about five minutes a run on one core
    python benchmarks/learning_curves.py draw --dir curves --out docs/learning-curves.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
STEPS = 12
EVERY = 4
PROMPTS = 8
"""Per step; 8 samples of each."""
LIMIT_S = 7200
SAME = (
    f"run.num_steps={STEPS}",
    "run.max_train_seconds=null",
    f"rollout.prompts_per_step={PROMPTS}",
    "train.mini_batches=2",
    "data.eval.num_rows=128",
    f"eval.every_steps={EVERY}",
    "eval.before_templates=[]",
    "eval.after=true",
    "eval.max_new_tokens=12",
    f"canary.every_steps={STEPS}",
    "checkpoint.every_steps=0",
    "observe.tensorboard=false",
)
"""What all runs share, beyond the recipe. Two optimizer steps per rollout: with one, no ratio is ever clipped. Answers are held to
the limit that training has: the rewards do not ask for an end, so some runs learn to write on behind a right equation, which a
longer limit then counts as wrong."""
ALGORITHMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "GRPO": ("smollm2-sums.yaml", ("train.algorithm=grpo",)),
    "RLOO": ("smollm2-sums.yaml", ("train.algorithm=rloo",)),
    "GSPO": ("smollm2-sums.yaml", ("train.algorithm=grpo", "train.loss=gspo")),
    "PPO": ("smollm2-sums-ppo.yaml", ()),
}
"""Recipe, and what it is changed by."""
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8f5fbf")


@dataclass(frozen=True, slots=True)
class Curve:
    """One run."""

    steps: tuple[int, ...]
    accuracy: tuple[float, ...]
    """On the held-out problems, greedily, after so many steps."""
    rewards: tuple[float, ...]
    """Mean of each step's samples."""


def main() -> None:
    args = parse_args()
    if args.what == "run":
        for seed in args.seeds:
            for name in args.algorithms:
                run(name, seed, args.dir)
        return
    curves = {name: found for name in ALGORITHMS if (found := read_all(args.dir, name))}
    if not curves:
        raise SystemExit(f"no finished run in {args.dir}; make some with `run`")
    for line in table(curves):
        print(line)
    if args.out:
        args.out.write_text(figure(curves))


def run(name: str, seed: int, folder: Path) -> None:
    """One training run in a process of its own, unless it is there."""
    out = folder / f"{name.lower()}-{seed}"
    if (out / "summary.json").exists():
        return
    recipe, changes = ALGORITHMS[name]
    command = [sys.executable, "-m", "lockstep", "train", str(ROOT / "recipes" / recipe), "--nproc", "1"]
    command += [f"run.dir={out}", f"run.seed={seed}", *SAME, *changes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
    print(f"{name}, seed {seed}: {100 * read(out).accuracy[-1]:.1f} %", flush=True)


def read_all(folder: Path, name: str) -> list[Curve]:
    """The finished runs of an algorithm."""
    return [read(path.parent) for path in sorted(folder.glob(f"{name.lower()}-*/summary.json"))]


def read(run_dir: Path) -> Curve:
    scores = {line["step"]: line["accuracy"] for line in _lines(run_dir / "eval.jsonl")}
    steps = tuple(sorted(scores))
    rewards = tuple(line["reward"] for line in _lines(run_dir / "metrics.jsonl"))
    return Curve(steps, tuple(scores[step] for step in steps), rewards)


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 of a single value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def table(curves: Mapping[str, Sequence[Curve]]) -> list[str]:
    """Markdown: held-out accuracy in percent at each scored step, mean and standard deviation over seeds."""
    steps = next(iter(curves.values()))[0].steps
    lines = ["| | seeds | " + " | ".join(f"step {step}" for step in steps) + " | each, at the end |"]
    lines.append("|" + "---|" * (len(steps) + 3))
    for name, runs in curves.items():
        cells = []
        for place in range(len(steps)):
            mean, deviation = spread([100 * each.accuracy[place] for each in runs])
            cells.append(f"{mean:.1f} ± {deviation:.1f}")
        last = ", ".join(f"{100 * each.accuracy[-1]:.1f}" for each in runs)
        lines.append(f"| {name} | {len(runs)} | " + " | ".join(cells) + f" | {last} |")
    return lines


def figure(curves: Mapping[str, Sequence[Curve]]) -> str:
    """An SVG: a line per algorithm, the mean over its seeds; a band of one standard deviation around it."""
    width, height, left, top, right, bottom = 640, 360, 56, 16, 150, 44
    last = max(run.steps[-1] for runs in curves.values() for run in runs)

    def x(step: float) -> float:
        return left + (width - left - right) * step / last

    def y(percent: float) -> float:
        return top + (height - top - bottom) * (1 - percent / 100)

    def path(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for percent in range(0, 101, 20):
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y(percent)}" y2="{y(percent)}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y(percent) + 4}" text-anchor="end">{percent}</text>')
    for step in range(0, last + 1, EVERY):
        parts.append(f'<text x="{x(step)}" y="{height - bottom + 18}" text-anchor="middle">{step}</text>')
    parts.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">train steps of {8 * PROMPTS} samples</text>'
    )
    parts.append(
        f'<text transform="translate(14 {(top + height - bottom) / 2}) rotate(-90)" text-anchor="middle">'
        "held-out accuracy, percent</text>"
    )
    for place, (name, runs) in enumerate(curves.items()):
        colour = COLOURS[place % len(COLOURS)]
        points = [spread([100 * run.accuracy[i] for run in runs]) for i in range(len(runs[0].steps))]
        steps = runs[0].steps
        mean = [(step, value) for step, (value, _) in zip(steps, points, strict=True)]
        upper = [(step, min(value + off, 100)) for step, (value, off) in zip(steps, points, strict=True)]
        lower = [(step, max(value - off, 0)) for step, (value, off) in zip(steps, points, strict=True)]
        parts.append(f'<polygon points="{path(upper + lower[::-1])}" fill="{colour}" fill-opacity="0.15"/>')
        parts.append(f'<polyline points="{path(mean)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label = top + 20 + 20 * place
        parts.append(f'<rect x="{width - right + 12}" y="{label - 9}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{width - right + 32}" y="{label - 3}">{name} ({len(runs)} seeds)</text>')
    return "\n".join([*parts, "</svg>", ""])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "draw"))
    parser.add_argument("--dir", type=Path, default=Path("curves"), help="where the runs are")
    parser.add_argument("--out", type=Path, help="SVG to write")
    parser.add_argument("--algorithms", nargs="+", choices=tuple(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    return parser.parse_args()


if __name__ == "__main__":
    main()
