"""Phases on a clock that the test turns: nested, raising, with tokens, by step and by run."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lockstep.observe import timing
from lockstep.observe.timing import PhaseTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_seconds_and_tokens_add_up_by_step_and_by_run(clock: Clock):
    timer = PhaseTimer()
    for seconds, tokens in ((2.0, 100), (3.0, 50)):
        with timer.phase("generate") as phase:
            clock.now += seconds
            phase.tokens = tokens
    with timer.phase("sync", tokens=0):
        clock.now += 1.0
    clock.now += 7.0  # between phases: nobody's
    assert timer.take_step() == {
        "seconds.generate": 5.0,
        "seconds.sync": 1.0,
        "tokens_per_second.generate": 30.0,
    }
    with timer.phase("generate", tokens=5):
        clock.now += 5.0
    assert timer.take_step() == {"seconds.generate": 5.0, "tokens_per_second.generate": 1.0}
    assert timer.take_step() == {}
    assert timer.seconds == {"generate": 10.0, "sync": 1.0}
    assert timer.tokens_per_second == {"generate": 15.5}


def test_a_resumed_run_counts_on(clock: Clock):
    first, second = PhaseTimer(), PhaseTimer()
    with first.phase("generate", tokens=10):
        clock.now += 2.0
    with second.phase("generate", tokens=20):
        clock.now += 3.0
    second.carry_on(first.saved() | {"update": {"seconds": 4.0, "tokens": 8.0}})
    assert second.seconds == {"generate": 5.0, "update": 4.0}
    assert second.tokens_per_second == {"generate": 6.0, "update": 2.0}
    assert second.take_step() == {"seconds.generate": 3.0, "tokens_per_second.generate": 20 / 3.0}


def test_an_inner_phase_is_not_counted_twice(clock: Clock):
    told: list[str] = []
    timer = PhaseTimer(on_phase=told.append)
    with timer.phase("train", tokens=12):
        clock.now += 1.0
        with timer.phase("checkpoint"):
            clock.now += 10.0
        clock.now += 2.0
    assert timer.seconds == {"train": 3.0, "checkpoint": 10.0}
    assert timer.tokens_per_second == {"train": 4.0}
    assert told == ["train", "checkpoint", "train", ""]


def test_a_phase_that_raises_is_counted_and_left(clock: Clock):
    told: list[str] = []
    timer = PhaseTimer(on_phase=told.append)
    with pytest.raises(ZeroDivisionError), timer.phase("reward"):
        clock.now += 4.0
        raise ZeroDivisionError
    assert timer.seconds == {"reward": 4.0}
    assert told == ["reward", ""]


def test_a_profile_speaks_of_the_phases():
    timer = PhaseTimer()
    with profile(activities=[ProfilerActivity.CPU]) as recorded, timer.phase("generate"):
        torch.ones(2).sum()
    assert "lockstep::generate" in {event.key for event in recorded.key_averages()}
