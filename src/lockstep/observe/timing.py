"""Blocks of work in; seconds and tokens per second of each phase, for one step and for the run, out.

```
with timer.phase("generate") as phase:
    samples = engine.generate(...)
    phase.tokens = sum(sample.num_sampled for sample in samples)
```
A profile speaks the same words: every phase is a `torch.profiler.record_function` range.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from torch.profiler import record_function


@dataclass(slots=True)
class Phase:
    """What one phase has taken: filled in while it runs, added up over a step and over the run."""

    tokens: float = 0.0
    """Tokens that it worked on; 0 where tokens say nothing about it."""
    seconds: float = 0.0


@dataclass(slots=True)
class PhaseTimer:
    """Wall-clock time by phase. An inner phase's time is not also counted in the outer one."""

    on_phase: Callable[[str], None] = lambda name: None
    """Told the name of the phase that runs now; "" between phases."""
    device: torch.device | None = None
    """A CUDA device is waited for at the end of each phase, so that its work is booked where it was started."""
    step: dict[str, Phase] = field(default_factory=dict)
    run: dict[str, Phase] = field(default_factory=dict)
    _stack: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def phase(self, name: str, *, tokens: float = 0.0) -> Iterator[Phase]:
        """Time the block as `name`, also if it raises. Set `.tokens` of what it yields when they are known only then."""
        self._book()
        self._stack.append(name)
        self.on_phase(name)
        current = Phase(tokens)
        try:
            with record_function(f"lockstep::{name}"):
                yield current
                self._synchronize()
        finally:
            self._book(tokens=current.tokens)
            self._stack.pop()
            self.on_phase(self._stack[-1] if self._stack else "")

    def take_step(self) -> dict[str, float]:
        """`seconds.<phase>` and, where tokens were counted, `tokens_per_second.<phase>` since the last call."""
        taken, self.step = self.step, {}
        return {**_seconds(taken, "seconds."), **_rates(taken, "tokens_per_second.")}

    def saved(self) -> dict[str, dict[str, float]]:
        """The run's phases as plain numbers, to be carried over a resume."""
        return {name: asdict(phase) for name, phase in self.run.items()}

    def carry_on(self, saved: Mapping[str, Mapping[str, float]]) -> None:
        """Count on from what an earlier session of the run took."""
        for name, numbers in saved.items():
            entry = self.run.setdefault(name, Phase())
            entry.seconds, entry.tokens = entry.seconds + numbers["seconds"], entry.tokens + numbers["tokens"]

    @property
    def seconds(self) -> dict[str, float]:
        """By phase, over the run."""
        return _seconds(self.run)

    @property
    def tokens_per_second(self) -> dict[str, float]:
        """By phase, over the run; phases that count tokens only."""
        return _rates(self.run)

    def _book(self, *, tokens: float = 0.0) -> None:
        """Give the time since the last booking to the phase that runs now."""
        now = time.perf_counter()
        if self._stack:
            for book in (self.step, self.run):
                entry = book.setdefault(self._stack[-1], Phase())
                entry.seconds += now - self._since
                entry.tokens += tokens
        self._since = now

    def _synchronize(self) -> None:
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _seconds(book: dict[str, Phase], prefix: str = "") -> dict[str, float]:
    return {prefix + name: phase.seconds for name, phase in book.items()}


def _rates(book: dict[str, Phase], prefix: str = "") -> dict[str, float]:
    return {prefix + name: p.tokens / p.seconds for name, p in book.items() if p.tokens and p.seconds}
