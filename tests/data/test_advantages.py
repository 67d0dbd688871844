"""CASES B87 and B88: advantages by group id, in float64, with one documented treatment of groups of one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.advantages import advantages, uses_groups, whiten, zero_std_groups

ALGORITHMS = ("grpo", "grpo_batch_std", "dr_grpo", "rloo", "rloo_std")
BATCH_ALGORITHMS = ("reinforce_pp", "reinforce_pp_baseline")
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
    # The others of sample 1 are 1, 0, 0: mean 1/3, std 0.57735.
    result = advantages([1, 0, 0, 0], [0] * 4, algorithm="rloo_std")
    assert result[0] == 1.0
    assert result[1:] == pytest.approx([-0.577349] * 3, abs=1e-5)


def test_equal_others_have_no_std_whatever_their_mean_rounds_to():
    """B87: 0.1 + 0.1 + 0.1 is not three times 0.1, so a std of deviations from the mean would be 1e-17."""
    assert advantages([1, 0.1, 0.1, 0.1], [0] * 4, algorithm="rloo_std")[0] == pytest.approx(0.9, abs=1e-12)


def test_group_scaling_is_not_batch_scaling():
    """B87: over the batch the std would be 4.6 for both groups."""
    result = advantages([0, 2, 0, 10], [0, 0, 1, 1], algorithm="grpo")
    assert result == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)] * 2, abs=1e-5)
    std = math.sqrt((9 + 1 + 9 + 49) / 3)
    batch = advantages([0, 2, 0, 10], [0, 0, 1, 1], algorithm="grpo_batch_std")
    assert batch == pytest.approx([-1 / std, 1 / std, -5 / std, 5 / std], abs=1e-5)


SHUFFLED_GROUPS = [7, 5, 7, 9, 9, 7]  # B88: A is 7, B is 5, C is 9
SHUFFLED_REWARDS = [2, 5, 0, 6, 4, 1]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("dr_grpo", [1, 0, -1, 1, -1, 0]),
        ("grpo", [1, 0, -1, 0.70711, -0.70711, 0]),
        ("rloo", [1.5, 0, -1.5, 2, -2, 0]),
        ("rloo_std", [2.12132, 0, -2.12132, 2, -2, 0]),  # the others' std: .70711; of a single other: none
    ],
)
def test_ragged_shuffled_groups_are_found_by_id(algorithm, expected):
    assert advantages(SHUFFLED_REWARDS, SHUFFLED_GROUPS, algorithm=algorithm) == pytest.approx(expected, abs=1e-5)


def test_leave_one_out_baseline():
    assert advantages([1, 0, 0], [0] * 3, algorithm="rloo") == [1, -0.5, -0.5]


@pytest.mark.parametrize("algorithm", ALGORITHMS + BATCH_ALGORITHMS)
@given(samples=scored_groups, data=st.data())
def test_shuffling_samples_does_not_change_advantages(algorithm, samples, data):
    rewards, groups = zip(*samples, strict=True)
    order = data.draw(st.permutations(range(len(samples))))
    straight = advantages(rewards, groups, algorithm=algorithm)
    shuffled = advantages([rewards[i] for i in order], [groups[i] for i in order], algorithm=algorithm)
    assert shuffled == [straight[i] for i in order]  # sums are correctly rounded, so not even the last bit moves


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "rloo_std"])  # a std per sample
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("algorithm", ALGORITHMS + BATCH_ALGORITHMS)
def test_a_reward_that_is_not_finite_is_refused_by_name(algorithm, bad):
    with pytest.raises(ValueError, match=f"sample 2 of group 9: expected a finite reward, {bad} came"):
        advantages([1, 0, bad], [4, 9, 9], algorithm=algorithm)


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(ValueError, match=r"expected an algorithm of grpo, .*; 'ppo' came"):
        advantages([1, 2], [0, 0], algorithm="ppo")


def test_a_group_split_over_ranks_is_compared_whole():
    """B88: rewards and ids of all ranks are put together first; here rank 0 holds samples 0, 2, 5 and rank 1 the others."""
    ranks = [(0, 2, 5), (1, 3, 4)]
    together = [i for rank in ranks for i in rank]
    for algorithm in ALGORITHMS + BATCH_ALGORITHMS:
        whole = advantages(SHUFFLED_REWARDS, SHUFFLED_GROUPS, algorithm=algorithm)
        gathered = advantages(
            [SHUFFLED_REWARDS[i] for i in together], [SHUFFLED_GROUPS[i] for i in together], algorithm=algorithm
        )
        assert gathered == [whole[i] for i in together]


def test_reinforce_pp_normalises_over_the_tokens_of_the_batch():
    """Samples of 3, 1 and 0 tokens with rewards 1, 5, 100: the tokens' rewards are 1, 1, 1, 5: mean 2, variance 4."""
    result = advantages([1, 5, 100], [0, 0, 1], algorithm="reinforce_pp", lengths=[3, 1, 0])
    assert result == pytest.approx([-0.5, 1.5, 0], abs=1e-8)  # 1e-8 is added to the variance
    assert advantages([2, 2], [0, 1], algorithm="reinforce_pp", lengths=[4, 1]) == [0, 0]
    assert advantages([2], [0], algorithm="reinforce_pp") == [0]


def test_reinforce_pp_baseline_centres_within_the_group_first():
    # Centred: -1, 1, -5, 5; their mean is 0 and the unbiased variance 52 / 3. Groups without the others' offset.
    result = advantages([0, 2, 100, 110], [0, 0, 1, 1], algorithm="reinforce_pp_baseline")
    assert result == pytest.approx([value / math.sqrt(52 / 3) for value in (-1, 1, -5, 5)], abs=1e-8)


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 5)), min_size=2, max_size=30))
def test_whitened_tokens_have_mean_zero_and_variance_one(pairs):
    values, weights = zip(*pairs, strict=True)
    tokens = torch.tensor([white for white, n in zip(whiten(values, weights), weights, strict=True) for _ in range(n)])
    used = torch.tensor([value for value, n in pairs for _ in range(n)])
    if used.unique().numel() < 2:
        assert not tokens.any()
    else:
        assert abs(float(tokens.double().mean())) < 1e-6  # values are rounded to fp32 here
        spread = float(used.double().var())
        assert float(tokens.double().var()) == pytest.approx(spread / (spread + 1e-8), rel=1e-4, abs=1e-6)


def test_only_group_comparisons_make_a_flat_group_silent():
    assert all(uses_groups(algorithm) for algorithm in ALGORITHMS)
    assert advantages([1, 1, 5, 5], [0, 0, 1, 1], algorithm="reinforce_pp")[0] < 0
    assert not any(uses_groups(algorithm) for algorithm in BATCH_ALGORITHMS)


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_pp"])
def test_lengths_are_one_per_sample(algorithm):
    with pytest.raises(ValueError, match="expected one length per sample; 2 samples and 1 came"):
        advantages([1, 2], [0, 0], algorithm=algorithm, lengths=[3])
    with pytest.raises(ValueError, match="expected no length below 0"):
        advantages([1, 2], [0, 0], algorithm=algorithm, lengths=[3, -1])


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf")])
def test_an_eps_that_is_no_floor_is_refused(eps):
    with pytest.raises(ValueError, match="expected eps of at least 0"):
        advantages([1, 2], [0, 0], algorithm="grpo", eps=eps)


def test_groups_of_a_tensor_are_found_by_their_value():
    """B88: 0-d tensors are keys by identity, and every sample would be a group of its own."""
    rewards, groups, lengths = torch.tensor([0.0, 1.0, 2.0, 5.0, 7.0]), torch.tensor([4, 4, 4, 9, 9]), torch.ones(5)
    for algorithm in (*ALGORITHMS, *BATCH_ALGORITHMS):
        lists = advantages(rewards.tolist(), groups.tolist(), algorithm=algorithm, lengths=[1] * 5)
        assert advantages(rewards, groups, algorithm=algorithm, lengths=lengths) == lists
        assert advantages(list(rewards), list(groups), algorithm=algorithm) == lists
    assert zero_std_groups(torch.ones(3), torch.tensor([1, 1, 2])) == {1, 2}
    assert whiten(rewards, lengths) == whiten(rewards.tolist(), [1] * 5)


@pytest.mark.parametrize("unit", [1e-200, 1.0, 1e200])
def test_squares_neither_vanish_nor_overflow(unit):
    assert advantages([unit, 2 * unit], [0, 0], algorithm="grpo", eps=0) == pytest.approx(
        [-math.sqrt(0.5), math.sqrt(0.5)]
    )
