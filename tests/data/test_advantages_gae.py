"""Token-level advantages by hand and against a plain recursion; masked tokens change nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.gae import (
    gae,
    outcome_rewards,
    rewards_to_go,
    squared_deviations,
    sum_and_count,
    whiten_tokens,
)
from lockstep.data.sequences import Sequences

EXACT = {"atol": 1e-12, "rtol": 0}  # float64 rounding of a few additions


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def by_definition(rewards, values, gamma, lam, after):
    """Sum over k of (gamma lam)^k delta_{t+k}, written as it stands in the paper."""
    following = [*values, after][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def test_by_hand():
    # One sample, terminal: deltas are .5 - .2 = .3 (t=1: 1 - .5 = .5), A_0 = (0 + .9 * .5 - .2) + .9 * .8 * .5.
    found = gae(tensor(0, 1), tensor(0.2, 0.5), Sequences.of([2]), gamma=0.9, lam=0.8)
    torch.testing.assert_close(found.advantages, tensor(0.25 + 0.36, 0.5), **EXACT)
    torch.testing.assert_close(found.returns, tensor(0.81, 1.0), **EXACT)


def test_a_truncated_sample_goes_on_with_the_critics_value():
    sequences = Sequences.of([1, 1])
    found = gae(tensor(1, 1), tensor(0.5, 0.5), sequences, gamma=0.9, bootstrap=[0.0, 2.0])
    torch.testing.assert_close(found.advantages, tensor(0.5, 0.5 + 1.8), **EXACT)
    with pytest.raises(ValueError, match="a bootstrap value per sample, 2; 1 came"):
        gae(tensor(1, 1), tensor(0, 0), sequences, bootstrap=[0.0])


numbers = st.floats(-3, 3)
samples = st.lists(st.lists(st.tuples(numbers, numbers), max_size=6), min_size=1, max_size=5)


@given(samples=samples, gamma=st.floats(0, 1), lam=st.floats(0, 1), after=numbers)
def test_ragged_samples_follow_the_definition(samples, gamma, lam, after):
    flat = [pair for sample in samples for pair in sample]
    rewards, values = (tensor(*(pair[i] for pair in flat)) for i in (0, 1))
    sequences = Sequences.of([len(sample) for sample in samples])
    found = gae(rewards, values, sequences, gamma=gamma, lam=lam, bootstrap=[after] * len(samples))
    expected = [a for s in samples for a in by_definition([r for r, _ in s], [v for _, v in s], gamma, lam, after)]
    torch.testing.assert_close(found.advantages, tensor(*expected), atol=1e-10, rtol=0)  # sums of at most 12 terms of 3


@given(samples=samples, data=st.data())
def test_observation_tokens_are_as_if_they_were_not_there(samples, data):  # B92
    flat = [pair for sample in samples for pair in sample]
    mask = data.draw(st.lists(st.booleans(), min_size=len(flat), max_size=len(flat)))
    garbage = st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e4])
    pairs = [pair if kept else (data.draw(garbage), data.draw(garbage)) for pair, kept in zip(flat, mask, strict=True)]
    lengths = [len(sample) for sample in samples]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    kept = [sum(mask[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
    whole = Sequences.of(lengths, mask=torch.tensor(mask, dtype=torch.bool))
    found = gae(*(tensor(*(p[i] for p in pairs)) for i in (0, 1)), whole, gamma=0.9, lam=0.8)
    only = [pair for pair, is_kept in zip(flat, mask, strict=True) if is_kept]
    alone = gae(*(tensor(*(p[i] for p in only)) for i in (0, 1)), Sequences.of(kept), gamma=0.9, lam=0.8)
    assert torch.equal(found.advantages[whole.mask], alone.advantages)
    assert torch.equal(found.returns[whole.mask], alone.returns)
    assert not found.advantages[~whole.mask].any()


def test_an_outcome_reward_stands_at_the_last_token_that_counts():
    mask = torch.tensor([True, True, False, True, False, False])
    rewards = outcome_rewards([2.0, 3.0, 9.0, 7.0], Sequences.of([3, 1, 0, 2], mask=mask))
    assert rewards.tolist() == [0, 2, 0, 3, 0, 0]  # the last sample has no token that counts
    assert outcome_rewards([1.0], Sequences.of([0])).tolist() == []


def test_a_reward_too_many_is_not_passed_over():
    with pytest.raises(ValueError, match=r"expected one value per sample, \[2\]; \[3\] came"):
        outcome_rewards([1.0, 2.0, 3.0], Sequences.of([2, 1]))


@pytest.mark.parametrize("rates", [{"gamma": 1.01}, {"lam": -0.1}, {"lam": float("nan")}])
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(ValueError, match="expected gamma and lam between 0 and 1"):
        gae(torch.zeros(3), torch.zeros(3), Sequences.of([2, 1]), **rates)


def test_rewards_to_go():
    sequences = Sequences.of([3, 1])
    assert rewards_to_go(tensor(1, 0, 2, 5), sequences).tolist() == [3, 2, 2, 5]
    torch.testing.assert_close(rewards_to_go(tensor(1, 0, 2, 5), sequences, gamma=0.5), tensor(1.5, 1, 2, 5), **EXACT)


def test_whitening_over_ranks_is_whitening_the_batch():
    values, mask = tensor(1, 2, 40, 3, 7), torch.tensor([True, True, False, True, True])
    ranks = [
        (values[:3], Sequences.of([3], mask=mask[:3])),
        (values[3:], Sequences.of([1, 1], mask=mask[3:])),
    ]
    totals, counts = zip(*(sum_and_count(*rank) for rank in ranks), strict=True)
    mean = sum(totals) / sum(counts)
    variance = sum(squared_deviations(*rank, mean=mean) for rank in ranks) / (sum(counts) - 1)
    white = torch.cat([whiten_tokens(*rank, mean=mean, variance=variance) for rank in ranks])
    used = values[mask]
    torch.testing.assert_close(white[mask], (used - used.mean()) / (used.var() + 1e-8).sqrt(), **EXACT)
    assert white[2] == 0
