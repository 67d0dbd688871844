"""Rows of scenarios in; counts and a Markdown table, one line per kind of fault, out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lockstep.testing_faults.deadly import DeadlyRow
from lockstep.testing_faults.session import Row


@dataclass(slots=True)
class _Line:
    """All scenarios of one kind of fault."""

    num: int = 0
    outcomes: set[str] = field(default_factory=set)
    errors: set[str] = field(default_factory=set)
    served: set[str] = field(default_factory=set)
    seconds: float = 0.0


def lines_of(by_rank: Iterable[Sequence[Row]]) -> dict[str, _Line]:
    """Of one or several runs of `check_scenarios`: rows by rank. A scenario counts once, however many ranks it had."""
    lines: dict[str, _Line] = defaultdict(_Line)
    for rows in by_rank:
        for row in rows:
            line = lines[row.fault]
            line.num += row.rank == 0
            line.outcomes.add(row.outcome)
            line.served.add(row.served)
            line.errors |= {row.error.partition(":")[0]} if row.error else set()
            line.seconds = max(line.seconds, row.seconds)
    return lines


def deadly_lines_of(rows: Iterable[DeadlyRow]) -> dict[str, _Line]:
    """Of `check_deadly`."""
    lines: dict[str, _Line] = defaultdict(_Line)
    for row in rows:
        line = lines[f"{row.fault} (rank {row.rank})"]
        line.num += 1
        line.outcomes.add("ended")
        line.served |= set(row.served.split("/"))
        line.errors |= {error.partition(":")[0] for error in row.errors.values()}
        line.seconds = max(line.seconds, row.seconds)
    return lines


def table(lines: dict[str, _Line]) -> str:
    """Markdown. "serves -1": the version before; "serves +0": the new one, whole."""
    out = ["| fault | syncs | outcome | ranks see | engine then | longest (s) |", "|---|---|---|---|---|---|"]
    for name, line in sorted(lines.items()):
        cells = [
            name,
            str(line.num),
            *(", ".join(sorted(each)) or "-" for each in (line.outcomes, line.errors, line.served)),
        ]
        out.append("| " + " | ".join([*cells, f"{line.seconds:.2f}"]) + " |")
    return "\n".join(out)
