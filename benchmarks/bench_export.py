"""Models and numbers of ranks in; what verl's exports and lockstep's cost in time, memory and bytes, in one table, out.

Both read the same sharded model in the same run, in rotated order, over gloo on the CPU; each method's output is compared
with PEFT's first. verl has no export to one rank, so its export to all stands in both comparisons.

    python benchmarks/bench_export.py [--cases smollm2:2,smollm2:4,llama-1b:2] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from export_measure import Cost, Method, Timing, cost_of, profile_of, time_methods, time_once
from export_subjects import SUBJECTS, WIRE, Subject, build_subject, fingerprint
from export_verl import verl_adapter, verl_merged

import lockstep
from lockstep.dist import World
from lockstep.testing import run_ranks

CASES = "smollm2:2,smollm2:4,llama-1b:2,depth-1x:2,depth-2x:2,depth-4x:2"
FLOOR_WINDOW = 16 << 20
"""Bytes of one bare gather: larger ones fall out of the cache and are slower."""
_MiB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    case: str
    kind: str
    """adapter or merged."""
    method: str
    timing: Timing
    cost: Cost | None
    """None for the bare gathers, whose cost is known."""
    note: str = ""


def main() -> None:
    args = parse_args()
    rows: list[Row] = []
    for case in args.cases.split(","):
        name, _, ranks = case.partition(":")
        if name not in SUBJECTS or not ranks.isdecimal():
            raise SystemExit(f"--cases: expected NAME:RANKS with a name of {SUBJECTS}, {case!r} came")
        of_case = run_ranks(
            int(ranks), measure, name, args.rounds, args.bucket_mib * _MiB, args.profile, timeout_s=3600.0
        )[0]
        print_rows(of_case)
        rows += of_case
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))


def measure(world: World, name: str, rounds: int, bucket_bytes: int, is_profiled: bool) -> list[Row]:
    """Collective. Build, check, time, count: the rows of one model at one number of ranks (the same on every rank)."""
    subject = build_subject(name, world)
    case = f"{name}, {world.size} ranks"
    rows = []
    for kind in ("adapter", "merged"):
        methods = _methods(kind, subject, bucket_bytes)
        notes = {method: _check(kind, run(), subject) for method, run in methods.items()}
        holds = dict if kind == "adapter" else _drop
        runs: dict[str, Method] = {method: _held(run, holds) for method, run in methods.items()}
        nbytes = subject.adapter_nbytes if kind == "adapter" else subject.merged_nbytes
        timings = time_methods(runs | _floors(nbytes, world), rounds=rounds)
        costs = {method: cost_of(run) for method, run in runs.items()}
        rows += [Row(case, kind, key, timings[key], costs.get(key), notes.get(key, "")) for key in timings]
        if is_profiled:
            _print_profiles(kind, runs, world)
        rows += _first_exports(case, kind, subject, bucket_bytes, rounds=3)
    return rows


def _methods(kind: str, subject: Subject, bucket_bytes: int):
    what = lockstep.AdapterExport() if kind == "adapter" else lockstep.MergedExport()
    sharded = lockstep.attach(subject.module)
    dtype = None if kind == "adapter" else WIRE
    theirs = verl_adapter if kind == "adapter" else verl_merged

    def ours(to) -> Iterator[tuple[str, torch.Tensor]]:
        with lockstep.export_weights(sharded, what, bucket_bytes=bucket_bytes, to=to, dtype=dtype) as stream:
            for bucket in stream:
                yield from bucket.items()

    return {
        "verl to all": lambda: theirs(subject.module),
        "lockstep to all": lambda: ours("all"),
        "lockstep to rank 0": lambda: ours(0),
    }


def _held(run, holds) -> Method:
    return lambda: holds(run())


def _drop(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """What a rollout engine does with a stream: take one tensor, forget it."""
    for _ in tensors:
        continue


def _check(kind: str, tensors: Iterable[tuple[str, torch.Tensor]], subject: Subject) -> str:
    """Collective. Compare with PEFT on rank 0; every rank compares its shards before and after.

    Raises `AssertionError` when tensors are missing, unknown, or wrong by more than a rounding of the wire's dtype. Says how
    many elements differ from PEFT's at all.
    """
    expected = subject.adapter if kind == "adapter" else subject.merged
    before, seen, num_other, num_all, worst = fingerprint(subject.module), set(), 0, 0, 0.0
    for name, tensor in tensors:
        if not expected:
            continue
        want = expected[name]
        assert tensor.shape == want.shape and tensor.dtype == want.dtype, (name, tensor.dtype, want.dtype)
        seen.add(name)
        num_all += want.numel()
        if not torch.equal(tensor, want):
            difference = (tensor.float() - want.float()).abs()
            num_other += int((difference > 0).sum())
            worst = max(worst, float(difference.max()))
    assert fingerprint(subject.module) == before, f"an export of {kind} weights changed the live model"
    storages = {expected[name].untyped_storage().data_ptr() for name in seen}
    missing = [name for name, value in expected.items() if value.untyped_storage().data_ptr() not in storages]
    assert not missing, f"{len(missing)} of {len(expected)} tensors never came, first {missing[:3]}"
    # Largest seen in verl's order of rounding: one unit in the last place of bf16 for weights below 2.
    assert worst <= 2**-7, f"{kind}: an element differs from PEFT's by {worst}"
    return f"{num_other} of {num_all} elements differ from PEFT's, by at most {worst:.1e}" if num_other else "as PEFT"


def _floors(nbytes: int, world: World) -> dict[str, Method]:
    """Bare transfers of as many bytes, in windows, over buffers that are made once and stay warm."""
    share = -(-nbytes // world.size)
    window = min(FLOOR_WINDOW // world.size, share)
    mine = torch.ones(window, dtype=torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(world.size)]
    times = -(-share // window)

    def all_gather() -> None:
        for _ in range(times):
            dist.all_gather(parts, mine)

    def gather() -> None:
        for _ in range(times):
            dist.gather(mine, parts if world.is_main else None, dst=0)

    def to_all() -> None:
        others = [rank for rank in range(world.size) if rank != world.rank]
        for _ in range(times):
            works = [dist.irecv(parts[rank], src=rank) for rank in others]
            works += [dist.isend(mine, dst=rank) for rank in others]
            for work in works:
                assert work is not None
                work.wait()

    def to_main() -> None:
        for _ in range(times):
            works = [dist.irecv(parts[rank], src=rank) for rank in range(1, world.size)] if world.is_main else []
            works = works if world.is_main else [dist.isend(mine, dst=0)]
            for work in works:
                assert work is not None
                work.wait()

    return {
        "bare all_gather": all_gather,
        "bare send/recv to all": to_all,
        "bare gather": gather,
        "bare send/recv to rank 0": to_main,
    }


def _first_exports(case: str, kind: str, subject: Subject, bucket_bytes: int, *, rounds: int) -> list[Row]:
    """Collective. What planning adds: attach anew, then export once."""
    runs = [time_once(lambda: _drop(_methods(kind, subject, bucket_bytes)["lockstep to all"]())) for _ in range(rounds)]
    timing = Timing.of(runs)
    return [Row(case, kind, "lockstep to all, attached anew", timing, None, f"median of {rounds}")]


def _print_profiles(kind: str, runs: dict[str, Method], world: World) -> None:
    """Collective. Rank 0's tables of lockstep's methods."""
    for method, run in runs.items():
        if method.startswith("lockstep"):
            table = profile_of(run)
            if world.is_main:
                print(f"\n{kind}, {method}, rank 0\n{table}", flush=True)


def print_rows(rows: list[Row]) -> None:
    """Seconds, the ratio to verl in the same run, and MiB on rank 0 / on the rank that has most of the others."""
    print(f"\n{rows[0].case}")
    heads = f"{'median s':>9} {'min-max':>13} {'verl/it':>8} {'CPU s':>7} {'verl/it':>8}"
    print(f"{'':8} {'':31} {heads} {'peak MiB':>14} {'recv MiB':>14} {'calls':>6}")
    base = {row.kind: row.timing for row in rows if row.method == "verl to all"}
    for row in rows:
        timing, verl = row.timing, base[row.kind]
        spread = f"{timing.min_s:.3f}-{timing.max_s:.3f}"
        line = (
            f"{row.kind:8} {row.method:31} {timing.median_s:9.4f} {spread:>13} {verl.median_s / timing.median_s:7.1f}x"
        )
        line += f" {timing.median_cpu_s:7.3f} {verl.median_cpu_s / timing.median_cpu_s:7.1f}x"
        if row.cost is not None:
            line += f" {_two(row.cost.peak_nbytes):>14} {_two(row.cost.received_nbytes):>14} {row.cost.num_collectives[0]:6}"
        print(f"{line}   {row.note}", flush=True)


def _two(nbytes: tuple[int, ...]) -> str:
    return f"{nbytes[0] / _MiB:.1f} / {max(nbytes[1:], default=0) / _MiB:.1f}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES, help="NAME:RANKS, comma-separated")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of every method")
    parser.add_argument("--bucket-mib", type=int, default=64, help="lockstep's bucket_bytes, in MiB")
    parser.add_argument("--profile", action="store_true", help="also print where lockstep's time goes")
    parser.add_argument("--json", type=Path, help="also write every number here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
