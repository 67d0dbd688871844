"""Rewards and their groups in, one advantage per sample out. Pure; float64; groups are found by id, never by position.

grpo: (r - mean) / (std + eps) with the unbiased std (DeepSeekMath, arXiv 2402.03300) · dr_grpo: r - mean (arXiv
2503.20783) · rloo: r - mean of the group's others (arXiv 2402.14740).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

Algorithm = Literal["grpo", "dr_grpo", "rloo"]


def advantages(
    rewards: Sequence[float], groups: Sequence[int], *, algorithm: Algorithm, eps: float = 1e-6
) -> list[float]:
    """One advantage per reward, in the same order. `groups[i]` is the id of sample i's group.

    Groups may be of any sizes and lie in any order. A group of one, or one whose rewards are all equal, has nothing to
    compare: its advantages are exactly 0, whatever the algorithm. `eps` (grpo only) is added to the std once.
    """
    result = [0.0] * len(rewards)
    for members in _members(rewards, groups).values():
        values = [float(rewards[index]) for index in members]
        if min(values) == max(values):
            continue
        for index, value in zip(members, _compare(values, algorithm, eps), strict=True):
            result[index] = value
    return result


def zero_std_groups(rewards: Sequence[float], groups: Sequence[int]) -> set[int]:
    """Ids of the groups whose rewards are all equal, groups of one included: they carry no gradient."""
    members = _members(rewards, groups)
    return {group for group, indices in members.items() if len({float(rewards[index]) for index in indices}) == 1}


def _members(rewards: Sequence[float], groups: Sequence[int]) -> dict[int, list[int]]:
    if len(rewards) != len(groups):
        raise ValueError(f"expected one group id per reward; {len(rewards)} rewards and {len(groups)} ids came")
    members: dict[int, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    return members


def _compare(values: list[float], algorithm: Algorithm, eps: float) -> list[float]:
    """The advantages within one group of at least two. Deviations first, then squares: no cancellation."""
    total = math.fsum(values)
    if algorithm == "rloo":
        return [value - (total - value) / (len(values) - 1) for value in values]
    mean = total / len(values)
    centred = [value - mean for value in values]
    if algorithm == "dr_grpo":
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(values) - 1))
    return [value / (std + eps) for value in centred]
