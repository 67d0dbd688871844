"""The same batch through lockstep's, verl's and TRL's released functions; a table of gaps and of reasons out.

    make bench-parity        (an environment of its own: .venv-parity)

Values and gradients, float64. Fails if two definitions that should agree differ by more than 1e-6, or if a stated
difference is none. The table of differences is also in docs/algorithms.md.
"""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import version

import torch
from parity_batch import gap_of, make_batch

# TRL builds the engine's log-probabilities from Python numbers, in torch's default dtype.
torch.set_default_dtype(torch.float64)
with warnings.catch_warnings():
    # Both warn of optional packages that are not installed.
    warnings.simplefilter("ignore")
    from parity_rows import Row, all_rows

TOLERANCE = 1e-6
SEEDS = range(5)


def largest_gap(row: Row) -> float:
    return max(gap_of(row.ours(make_batch(seed)), row.theirs(make_batch(seed))) for seed in SEEDS)


def main() -> int:
    names = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "verl"))
    print(f"{names}; {len(SEEDS)} batches, values and gradients in float64\n")
    rows = [(row, largest_gap(row)) for row in all_rows()]
    wrong = [row for row, gap in rows if (gap > TOLERANCE) == (not row.why)]
    print("| Against | What | Largest difference |\n|---|---|---|")
    for row, gap in rows:
        if not row.why:
            print(f"| {row.peer} | {row.what} | {gap:.1e}{'  DIFFERS' if row in wrong else ''} |")
    print("\n| Against | What | Difference | Why |\n|---|---|---|---|")
    for row, gap in rows:
        if row.why:
            print(f"| {row.peer} | {row.what} | {gap:.2g}{'  NONE' if row in wrong else ''} | {row.why} |")
    equal = sum(not row.why for row, _ in rows)
    print(f"\n{equal} rows should agree to {TOLERANCE:g}, {len(rows) - equal} should not; {len(wrong)} are otherwise")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
