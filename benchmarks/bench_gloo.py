"""Window sizes in; what gloo's ways of bringing one window of packed shards together cost in time and memory, out.

What the export's gather rests on. Every way moves the same bytes: each rank's share of a result of `--total-mib`, in windows.

    python benchmarks/bench_gloo.py [--ranks 2] [--total-mib 64] [--windows-mib 1 2 4 8 16] [--rounds 9]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from export_measure import Method, cost_of, time_methods

from lockstep.dist import World
from lockstep.testing import run_ranks

_MiB = 1 << 20
# all_gather_into_tensor became all_gather_single in torch 2.13, and warns under its old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Windows:
    """This rank's share of the result, and a result of one window that every way fills again and again."""

    world: World
    shares: tuple[torch.Tensor, ...]
    """This rank's part of every window."""
    whole: torch.Tensor
    """One window: the ranks' parts in rank order."""
    parts: tuple[torch.Tensor, ...]
    """Views of `whole`, by rank."""

    @classmethod
    def make(cls, world: World, *, nbytes: int, window: int) -> Windows:
        share = window // world.size
        mine = torch.full((nbytes // world.size,), world.rank + 1, dtype=torch.uint8)
        whole = torch.zeros(share * world.size, dtype=torch.uint8)
        return cls(world, mine.split(share)[: nbytes // window], whole, whole.split(share))

    def others(self) -> list[int]:
        return [rank for rank in range(self.world.size) if rank != self.world.rank]


def all_gather_list(windows: Windows) -> None:
    for share in windows.shares:
        dist.all_gather(list(windows.parts), share)


def all_gather_single(windows: Windows) -> None:
    for share in windows.shares:
        _all_gather_single(windows.whole, share)


def all_gather_in_place(windows: Windows) -> None:
    """The input is a slice of the output."""
    for share in windows.shares:
        windows.parts[windows.world.rank].copy_(share)
        _all_gather_single(windows.whole, windows.parts[windows.world.rank])


def send_to_all(windows: Windows) -> None:
    for share in windows.shares:
        works = [dist.irecv(windows.parts[rank], src=rank) for rank in windows.others()]
        works += [dist.isend(share, dst=rank) for rank in windows.others()]
        windows.parts[windows.world.rank].copy_(share)
        _wait(works)


def gather(windows: Windows) -> None:
    for share in windows.shares:
        dist.gather(share, list(windows.parts) if windows.world.is_main else None, dst=0)


def send_to_main(windows: Windows) -> None:
    for share in windows.shares:
        if windows.world.is_main:
            works = [dist.irecv(windows.parts[rank], src=rank) for rank in windows.others()]
            windows.parts[0].copy_(share)
        else:
            works = [dist.isend(share, dst=0)]
        _wait(works)


WAYS: tuple[Callable[[Windows], None], ...] = (
    all_gather_list,
    all_gather_single,
    all_gather_in_place,
    send_to_all,
    gather,
    send_to_main,
)


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


def measure(world: World, total_mib: int, windows_mib: list[int], rounds: int) -> list[str]:
    """Collective. The table's lines."""
    lines = []
    for window_mib in windows_mib:
        windows = Windows.make(world, nbytes=total_mib * _MiB, window=window_mib * _MiB)
        runs: dict[str, Method] = {way.__name__: partial(way, windows) for way in WAYS}
        for way in WAYS:
            _check(way, windows)
        timings = time_methods(runs, rounds=rounds)
        for name, run in runs.items():
            peak = max(cost_of(run).peak_nbytes) / (window_mib * _MiB)
            rate = total_mib * _MiB / timings[name].median_s / 1e9
            lines.append(
                f"{window_mib:6} MiB  {name:20} {timings[name].median_s * 1e3:8.1f} ms {rate:6.2f} GB/s   "
                f"allocates {peak:.2f} windows inside"
            )
    return lines


def _check(way: Callable[[Windows], None], windows: Windows) -> None:
    """Every part that this way brings is the rank's own."""
    windows.whole.zero_()
    way(windows)
    if windows.world.is_main or way not in (gather, send_to_main):
        for rank, part in enumerate(windows.parts):
            assert bool((part == rank + 1).all()), f"{way.__name__}: wrong bytes from rank {rank}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--total-mib", type=int, default=64, help="bytes of the whole result")
    parser.add_argument(
        "--windows-mib", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="bytes of one whole window"
    )
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    for line in run_ranks(args.ranks, measure, args.total_mib, args.windows_mib, args.rounds, timeout_s=600.0)[0]:
        print(line)


if __name__ == "__main__":
    main()
