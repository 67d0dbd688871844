"""Methods (functions that every rank calls) in; seconds, peak bytes, and bytes on the wire of each out.

Time: rounds in which every method runs once, in rotated order, from a barrier; the slowest rank counts; the median stands.
Memory and wire are counted in passes of their own, which are not timed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler prints a line at every start and stop

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

_NO_TRANSFER = ("wait_tensor", "_wrap_tensor_autograd", "send")

MEMORY_RUNS = 3
"""c10d lets go of a finished transfer's tensors a little later, at random, so one run can look better than the method is."""

Method = Callable[[], object]
"""Collective. Holds what it returns until the measurement ends."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one method over the rounds."""

    median_s: float
    min_s: float
    max_s: float
    median_cpu_s: float
    """Of processor time, all ranks and threads together: what a busy machine does not stretch."""

    @classmethod
    def of(cls, runs: Sequence[tuple[float, float]]) -> Timing:
        """From (seconds, processor seconds) of each run."""
        seconds, cpu_seconds = zip(*runs, strict=True)
        return cls(statistics.median(seconds), min(seconds), max(seconds), statistics.median(cpu_seconds))


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run of a method, by rank."""

    peak_nbytes: tuple[int, ...]
    """Most bytes that torch's CPU allocator held above what it held at the start."""
    received_nbytes: tuple[int, ...]
    """What collectives and receives brought from other ranks, computed from the shapes of their arguments."""
    num_collectives: tuple[int, ...]
    """Collectives and receives (the control group's included)."""


def time_methods(methods: Mapping[str, Method], *, rounds: int) -> dict[str, Timing]:
    """Collective. One round to warm up, then `rounds` that count."""
    names = list(methods)
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            run = time_once(methods[name])
            if turn:
                runs[name].append(run)
    return {name: Timing.of(of_method) for name, of_method in runs.items()}


def time_once(method: Method) -> tuple[float, float]:
    """Collective. Seconds of the slowest rank, and processor seconds of all ranks."""
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    result = method()
    elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    cpu = torch.tensor([time.process_time() - cpu_start], dtype=torch.float64)
    del result
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return elapsed.item(), cpu.item()


def cost_of(method: Method) -> Cost:
    """Collective. Some runs for memory, of which the worst counts, and one for the wire."""
    peak = 0
    for _ in range(MEMORY_RUNS):
        dist.barrier()
        peak = max(peak, _peak_nbytes(method))
    dist.barrier()
    wire = _Wire()
    with wire:
        method()
    mine = torch.tensor([peak, wire.received_nbytes, wire.num_collectives], dtype=torch.int64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    peaks, received, calls = zip(*(ranks.tolist() for ranks in every), strict=True)
    return Cost(peaks, received, calls)


def profile_of(method: Method, *, rows: int = 12) -> str:
    """Collective. Where one run's time goes on this rank: operators and lockstep's own phases, by self time."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        method()
    return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=40)


def _peak_nbytes(method: Method) -> int:
    """The profiler sees every allocation of torch's CPU allocator, also those that gloo makes inside a collective.

    It does not see numpy, Python objects, or the sockets' buffers.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = method()
    del result
    # The public tables sum allocations per operator; only the raw events are in order of time.
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


class _Wire(TorchDispatchMode):
    """Counts collectives as they reach the dispatcher, DTensor's included."""

    def __init__(self) -> None:
        super().__init__()
        self.received_nbytes = 0
        self.num_collectives = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # DTensor unpacks itself into collectives of plain tensors, which come here again.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and name not in _NO_TRANSFER:
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args) -> None:
        others, rank = dist.get_world_size() - 1, dist.get_rank()
        if name in ("allgather_", "_allgather_base_"):
            mine = args[1]
            received = others * _nbytes(mine)
        elif name == "all_gather_into_tensor":
            received = others * _nbytes(args[0])
        elif name == "gather_":
            received = others * _nbytes(args[1]) if any(args[0]) else 0
        elif name == "recv_":
            received = _nbytes(args[0])
        elif name in ("allreduce_", "all_reduce", "all_reduce_"):
            received = 2 * others * _nbytes(args[0]) // (others + 1)
        elif name in ("reduce_scatter_tensor",):
            received = others * _nbytes(args[0]) // (others + 1)
        elif name == "broadcast_":
            received = _nbytes(args[0]) if args[2] != rank else 0
        elif name == "barrier":
            received = 0
        else:
            raise ValueError(f"collective {name!r} is not counted yet; add what it receives to export_measure._Wire")
        self.num_collectives += 1
        self.received_nbytes += received


def _nbytes(value) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(part) for part in value) if isinstance(value, list | tuple) else 0
