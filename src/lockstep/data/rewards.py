"""Samples in, the same samples with their rewards out; or an error that shows the sample it failed on."""

from __future__ import annotations

import contextlib
import math
import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from lockstep.config import RewardConfig
from lockstep.data.reward_calls import RewardCall, resolve_reward
from lockstep.data.time_limit import CallFailed, CallTimedOut, call_all
from lockstep.errors import RewardError, said_by
from lockstep.types import Sample, ScoredSample

_SHOWN_CHARACTERS = 600
_LARGEST = 1e30


@dataclass(frozen=True, slots=True)
class _Reward:
    label: str
    """Key in `ScoredSample.parts`: the recipe's name, with #2, #3 where it names a reward again."""
    weight: float
    timeout_s: float
    call: RewardCall


class RewardSet:
    """The reward functions of a recipe. Making one finds and checks them all: do so before a model is loaded."""

    def __init__(self, configs: Sequence[RewardConfig]):
        """Raises `ConfigError` for a reward that cannot be found or called (see reward_calls.py)."""
        self._rewards: list[_Reward] = []
        names: list[str] = []
        for config in configs:
            names.append(config.name)
            again = names.count(config.name)
            label = config.name if again == 1 else f"{config.name}#{again}"
            self._rewards.append(_Reward(label, config.weight, config.timeout_s, resolve_reward(config)))

    @property
    def labels(self) -> tuple[str, ...]:
        """The keys of `ScoredSample.parts`, in the recipe's order."""
        return tuple(reward.label for reward in self._rewards)

    def score(self, samples: Sequence[Sample]) -> list[ScoredSample]:
        """Score a batch, in order; the functions run one after the other, each within its own time limit.

        Raises `RewardError`, naming the function and showing a sample, when a function raises, takes longer than its
        `timeout_s` for the batch, or returns anything but one finite number (or bool) per sample.
        """
        if not samples:
            return []
        columns = {reward.label: _values(reward, samples) for reward in self._rewards}
        scored = []
        for index, sample in enumerate(samples):
            parts = {label: column[index] for label, column in columns.items()}
            total = sum(reward.weight * parts[reward.label] for reward in self._rewards)
            _check_total(total, sample)
            scored.append(ScoredSample(sample=sample, reward=total, parts=parts))
        return scored


def _values(reward: _Reward, samples: Sequence[Sample]) -> list[float]:
    call = reward.call
    try:
        with contextlib.chdir(os.curdir):  # come back: a run's paths may be relative
            results = call_all(call.calls(samples), reward.timeout_s)
    except CallTimedOut as late:
        shown = "the first sample of the batch" if call.is_batched else "the sample it was at"
        raise RewardError(
            f"reward {reward.label!r} took longer than its limit of {reward.timeout_s:g} s for {len(samples)} samples; "
            f"make it faster or raise timeout_s; {shown}:{_show(samples[late.index])}"
        ) from None
    except CallFailed as failed:
        error = failed.__cause__ or failed
        shown = f"in a batch of {len(samples)} samples, the first of them" if call.is_batched else "on this sample"
        raise RewardError(
            f"reward {reward.label!r} raised {said_by(error)}; {shown}:{_show(samples[failed.index])}"
        ) from error
    values = _one_per_sample(results[0], reward.label, samples) if call.is_batched else results
    return [_number(value, reward.label, sample) for value, sample in zip(values, samples, strict=True)]


def _check_total(total: float, sample: Sample) -> None:
    """Squares and sums of rewards come later; what float32 cannot hold would overflow there, without a sample to show."""
    if not abs(total) <= _LARGEST:
        raise RewardError(
            f"the weighted sum of the rewards is {total:g}; at most {_LARGEST:g} can be trained on. Lower the weights, or the "
            f"rewards; on this sample:{_show(sample)}"
        )


def _one_per_sample(values: Any, label: str, samples: Sequence[Sample]) -> list[Any]:
    values = _plain(values)
    if not isinstance(values, list | tuple):
        came = repr(values) if isinstance(values, numbers.Number | None) else f"a {type(values).__name__}"
        raise RewardError(
            f"reward {label!r}: expected a list of {len(samples)} numbers, one per completion; {came} came; "
            f"the first sample:{_show(samples[0])}"
        )
    if len(values) != len(samples):
        raise RewardError(
            f"reward {label!r}: expected {len(samples)} numbers, one per completion; {len(values)} came; "
            f"the first sample:{_show(samples[0])}"
        )
    return list(values)


def _number(value: Any, label: str, sample: Sample) -> float:
    value = _plain(value)
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:  # a whole number beyond what a float holds
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(
            f"reward {label!r}: expected one finite number; {_clip(repr(value))} ({type(value).__name__}) came; "
            f"return 0.0 where there is nothing to reward; on this sample:{_show(sample)}"
        )
    return number


def _plain(value: Any) -> Any:
    """Arrays and tensors as Python's own numbers and lists."""
    return value.tolist() if isinstance(value, numpy.ndarray | numpy.generic | torch.Tensor) else value


def _show(sample: Sample) -> str:
    return (
        f"\n  prompt {sample.prompt.uid}: {_clip(repr(sample.prompt.text))}"
        f"\n  completion {sample.index}: {_clip(repr(sample.text))}"
        f"\n  answer: {_clip(repr(sample.prompt.answer))}"
    )


def _clip(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... ({len(text) - _SHOWN_CHARACTERS} more characters)"
