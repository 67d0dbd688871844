"""Setups and a number of syncs in, the tables of docs/faults.md out: `python -m lockstep.testing_faults --syncs 200`."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from lockstep.testing_faults.deadly import check_deadly
from lockstep.testing_faults.plan import Setup, deadly_faults
from lockstep.testing_faults.reference import make_fault_model
from lockstep.testing_faults.report import deadly_lines_of, lines_of, table
from lockstep.testing_faults.session import Row, check_scenarios

SETUPS = (
    "inproc/adapter/1", "inproc/adapter/2", "inproc/merged/2", "shm/adapter/1", "shm/adapter/2", "shm/merged/2",
    "disk/adapter/2", "disk/merged/1", "collective/adapter/2", "collective/merged/1",
)  # fmt: skip


def setup_of(text: str, folder: str) -> Setup:
    """ "shm/adapter/2" and a model's folder."""
    transport, kind, ranks = text.split("/")
    return Setup(cast(Any, transport), cast(Any, kind), folder, int(ranks))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lockstep.testing_faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--syncs", type=int, default=200, help="random syncs of each setup")
    parser.add_argument("--setups", nargs="*", default=SETUPS, help="transport/kind/ranks")
    parser.add_argument(
        "--deadly", nargs="*", default=["shm/adapter/2"], help="setups of which every deadly fault is run"
    )
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = make_fault_model(Path(folder))
        rows: list[list[Row]] = []
        for name in args.setups:
            rows += check_scenarios(setup_of(name, model), args.seed, 0, args.syncs, timeout_s=3600)
            print(f"{name}: {args.syncs} syncs, {time.monotonic() - began:.0f} s", flush=True)
        print(table(lines_of(rows)), flush=True)
        for name in args.deadly:
            setup = setup_of(name, model)
            print(f"\n{name}\n\n{table(deadly_lines_of(check_deadly(setup, deadly_faults(setup))))}", flush=True)
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
