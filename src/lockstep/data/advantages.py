"""Rewards and their groups in, one advantage per sample out. Pure; float64; groups are found by id, never by position.

All samples of the global batch are given at once: a group's samples may have been drawn by different ranks, so rewards,
groups and lengths (three numbers per sample) are gathered before they are compared. Sums are exactly rounded
(`math.fsum`), so the result depends neither on the order of samples nor on which rank held them, to the last bit.

What follows from rewards per token (a critic, a KL in the reward) is in `gae.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from torch import Tensor

Algorithm = Literal[
    "grpo", "grpo_batch_std", "dr_grpo", "rloo", "rloo_std", "reinforce_pp", "reinforce_pp_baseline", "distill"
]  # fmt: skip

WHITEN_EPS = 1e-8
"""Added to the variance when advantages are normalised over a batch."""


def advantages(
    rewards: Sequence[float] | Tensor,
    groups: Sequence[int] | Tensor,
    *,
    algorithm: Algorithm,
    eps: float = 1e-6,
    lengths: Sequence[int] | Tensor | None = None,
) -> list[float]:
    """One advantage per reward, in the same order. `groups[i]` is the id of sample i's group; groups may be ragged.

    Where samples of a group are compared, a group of one and a group whose rewards are all equal have nothing to
    compare: exactly 0, whatever the algorithm. The two that normalise over the batch weigh a sample by its tokens that
    count (`lengths`; 1 each if None). `eps` is added to a standard deviation, once; std is the unbiased one.

    grpo: (r - mean) / (std + eps) within the group (arXiv 2402.03300) · grpo_batch_std: the std is the whole batch's
    (arXiv 2508.08221) · dr_grpo: r - mean (arXiv 2503.20783) · rloo: r - mean of the group's others (arXiv 2402.14740) ·
    rloo_std: that, over the others' std, or over 1 where the others are all equal · reinforce_pp: r normalised over all
    tokens of the batch, with no group (arXiv 2501.03262) · reinforce_pp_baseline: r - group mean, then so normalised ·
    distill: 0, since the loss has a teacher to learn from, and rewards are only watched.

    Raises `ValueError` for a reward that is not finite (named by its place and group), for lists that do not match, and for an
    `eps` or a length below 0.
    """
    members = _members(rewards, groups)
    values = [float(reward) for reward in rewards]
    if not 0 <= eps < math.inf:
        raise ValueError(f"expected eps of at least 0, finite; {eps} came")
    if lengths is not None:
        _check_weights(len(values), lengths, "length")
    match algorithm:
        case "grpo":
            return _by_group(values, members, lambda own: _over_std(_centred(own), eps))
        case "grpo_batch_std":
            std = _std(values)
            return _by_group(values, members, lambda own: [value / (std + eps) for value in _centred(own)])
        case "dr_grpo":
            return _by_group(values, members, _centred)
        case "rloo":
            return _by_group(values, members, _leave_one_out)
        case "rloo_std":
            return _by_group(values, members, lambda own: _leave_one_out_std(own, eps))
        case "reinforce_pp":
            return whiten(values, lengths)
        case "reinforce_pp_baseline":
            return whiten(_by_group(values, members, _centred), lengths)
        case "distill":
            return [0.0] * len(values)
    raise ValueError(f"expected an algorithm of {', '.join(get_args(Algorithm))}; {algorithm!r} came")


def zero_std_groups(rewards: Sequence[float] | Tensor, groups: Sequence[int] | Tensor) -> set[int]:
    """Ids of the groups whose rewards are all equal, groups of one included: where samples are only compared with their
    group, these carry no gradient (`uses_groups`)."""
    members = _members(rewards, groups)
    return {group for group, indices in members.items() if len({float(rewards[index]) for index in indices}) == 1}


def uses_groups(algorithm: Algorithm) -> bool:
    """Whether a group whose rewards are all equal has no gradient. reinforce_pp compares with the batch, not the group;
    reinforce_pp_baseline centres on the batch's mean once more, so a flat group may be left with a small common offset; distill
    does not learn from rewards."""
    return algorithm not in ("reinforce_pp", "reinforce_pp_baseline", "distill")


def whiten(values: Sequence[float] | Tensor, weights: Sequence[float] | Tensor | None = None) -> list[float]:
    """(value - mean) / sqrt(var + 1e-8) with weighted mean and unbiased variance; all 0 if the weighted values are equal.

    A value of weight 0 takes no part in the statistics and comes back 0. Weights are tokens: n of them count n times.
    """
    values = [float(value) for value in values]
    weights = [1.0] * len(values) if weights is None else [float(weight) for weight in weights]
    _check_weights(len(values), weights, "weight")
    used = {value for value, weight in zip(values, weights, strict=True) if weight > 0}
    total = math.fsum(weights)
    if len(used) < 2:
        return [0.0] * len(values)
    mean = math.fsum(weight * value for value, weight in zip(values, weights, strict=True)) / total
    squares = math.fsum(weight * (value - mean) ** 2 for value, weight in zip(values, weights, strict=True))
    scale = 1 / math.sqrt(squares / (total - 1) + WHITEN_EPS)
    return [(value - mean) * scale if weight > 0 else 0.0 for value, weight in zip(values, weights, strict=True)]


def _members(rewards: Sequence[float] | Tensor, groups: Sequence[int] | Tensor) -> dict[int, list[int]]:
    if len(rewards) != len(groups):
        raise ValueError(f"expected one group id per reward; {len(rewards)} rewards and {len(groups)} ids came")
    # A tensor's elements are keys by identity: each would be a group of its own, and every advantage 0.
    ids = [int(group) if isinstance(group, Tensor) else group for group in groups]
    members: dict[int, list[int]] = defaultdict(list)
    for index, (reward, group) in enumerate(zip(rewards, ids, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(
                f"sample {index} of group {group}: expected a finite reward, {reward} came; it would make every "
                "advantage of its group NaN. Fix the reward function"
            )
        members[group].append(index)
    return members


def _check_weights(num: int, weights: Sequence[float] | Tensor, what: str) -> None:
    if len(weights) != num:
        raise ValueError(f"expected one {what} per sample; {num} samples and {len(weights)} came")
    if not all(weight >= 0 for weight in weights):
        raise ValueError(f"expected no {what} below 0; {list(weights)} came")


def _by_group(
    values: list[float], members: dict[int, list[int]], compare: Callable[[list[float]], list[float]]
) -> list[float]:
    """`compare` on each group that has a spread, 0 elsewhere."""
    result = [0.0] * len(values)
    for indices in members.values():
        own = [values[index] for index in indices]
        if min(own) == max(own):
            continue
        for index, value in zip(indices, compare(own), strict=True):
            result[index] = value
    return result


def _centred(values: list[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _std(values: list[float]) -> float:
    """Unbiased; 0 for equal values or a single one. Deviations first, then squares: no cancellation."""
    if len(set(values)) < 2:
        return 0.0
    return _spread_of(_centred(values))


def _over_std(centred: list[float], eps: float) -> list[float]:
    std = _spread_of(centred)
    return [value / (std + eps) for value in centred]


def _spread_of(centred: list[float]) -> float:
    """Unbiased std of values with mean 0. In units of a power of two, which rounds nothing, so that no square is 0 or inf."""
    unit = 2.0 ** (math.frexp(max(map(abs, centred)))[1] - 1)
    return unit * math.sqrt(math.fsum((value / unit) ** 2 for value in centred) / (len(centred) - 1))


def _leave_one_out(values: list[float]) -> list[float]:
    total = math.fsum(values)
    return [value - (total - value) / (len(values) - 1) for value in values]


def _leave_one_out_std(values: list[float], eps: float) -> list[float]:
    """The others' std, computed from the others themselves: taking one value out of a sum of squares would leave a
    rounding error where the answer is 0, and the advantage would be divided by it."""
    stds = [_std(values[:index] + values[index + 1 :]) for index in range(len(values))]
    return [value / (std + eps) if std > 0 else value for value, std in zip(_leave_one_out(values), stds, strict=True)]
