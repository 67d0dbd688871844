"""CASES B87 and B88: advantages by group id, in float64, with one documented treatment of groups of one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.advantages import advantages, zero_std_groups

ALGORITHMS = ("grpo", "dr_grpo", "rloo")
scored_groups = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 4)), min_size=1, max_size=30)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_tiny_spread_is_neither_lost_nor_blown_up(offset):
    """B87: naive float32 E[x^2] - E[x]^2 is exactly 0 here. 5e-6 / (7.0711e-6 + 1e-6) = 0.61950; the case's 0.6196 is
    for rewards that were rounded to float32 before."""
    rewards = [offset + 1, offset + 1.00001]
    exact = advantages(rewards, [0, 0], algorithm="grpo", eps=1e-6)
    assert exact == pytest.approx([-0.619497, 0.619497], abs=1e-6)
    rounded = advantages(torch.tensor(rewards).tolist(), [0, 0], algorithm="grpo", eps=1e-6)
    assert rounded == pytest.approx([-0.6196, 0.6196], abs=5e-5)


def test_the_standard_deviation_is_the_unbiased_one():
    assert advantages([1, 0, 0, 1], [0] * 4, algorithm="grpo") == pytest.approx(
        [0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("rewards", [[1, 1, 1, 1], [0.1, 0.1, 0.1], [7.5]])
def test_nothing_to_compare_is_exactly_zero(algorithm, rewards):
    assert advantages(rewards, [3] * len(rewards), algorithm=algorithm) == [0.0] * len(rewards)


def test_leave_one_out_is_not_divided_by_the_others_spread():
    """B87: the others of sample 0 are all 0; a floor of 1e-6 in their std would make it 1e6."""
    assert advantages([1, 0, 0, 0], [0] * 4, algorithm="rloo")[0] == 1.0


def test_group_scaling_is_not_batch_scaling():
    """B87: over the batch the std would be 4.6 for both groups."""
    result = advantages([0, 2, 0, 10], [0, 0, 1, 1], algorithm="grpo")
    assert result == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)] * 2, abs=1e-5)


SHUFFLED_GROUPS = [7, 5, 7, 9, 9, 7]  # B88: A is 7, B is 5, C is 9
SHUFFLED_REWARDS = [2, 5, 0, 6, 4, 1]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("dr_grpo", [1, 0, -1, 1, -1, 0]),
        ("grpo", [1, 0, -1, 0.70711, -0.70711, 0]),
        ("rloo", [1.5, 0, -1.5, 2, -2, 0]),
    ],
)
def test_ragged_shuffled_groups_are_found_by_id(algorithm, expected):
    assert advantages(SHUFFLED_REWARDS, SHUFFLED_GROUPS, algorithm=algorithm) == pytest.approx(expected, abs=1e-5)


def test_leave_one_out_baseline():
    assert advantages([1, 0, 0], [0] * 3, algorithm="rloo") == [1, -0.5, -0.5]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(samples=scored_groups, data=st.data())
def test_shuffling_samples_does_not_change_advantages(algorithm, samples, data):
    rewards, groups = zip(*samples, strict=True)
    order = data.draw(st.permutations(range(len(samples))))
    straight = advantages(rewards, groups, algorithm=algorithm)
    shuffled = advantages([rewards[i] for i in order], [groups[i] for i in order], algorithm=algorithm)
    assert shuffled == [straight[i] for i in order]  # sums are correctly rounded, so not even the last bit moves


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(samples=scored_groups)
def test_advantages_of_a_group_sum_to_zero(algorithm, samples):
    rewards, groups = zip(*samples, strict=True)
    result = advantages(rewards, groups, algorithm=algorithm)
    for group in set(groups):
        total = math.fsum(value for value, own in zip(result, groups, strict=True) if own == group)
        assert abs(total) < 1e-9  # rewards are at most 10: a few float64 roundings; grpo divides by at least 1e-6


@given(samples=scored_groups)
def test_groups_without_spread_are_exactly_those_without_advantage(samples):
    rewards, groups = zip(*samples, strict=True)
    result = advantages(rewards, groups, algorithm="dr_grpo")
    silent = {g for g in set(groups) if all(v == 0 for v, own in zip(result, groups, strict=True) if own == g)}
    assert zero_std_groups(rewards, groups) == silent


def test_a_group_id_is_needed_for_each_reward():
    with pytest.raises(ValueError, match="2 rewards and 1 ids"):
        advantages([1, 2], [0], algorithm="grpo")
