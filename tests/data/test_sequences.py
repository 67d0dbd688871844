"""Sums and spreads within samples of a micro-batch."""

import pytest
import torch

from lockstep.data.sequences import Sequences

INF, NAN = float("inf"), float("nan")
MASK = torch.tensor([True, False, True, False, True])


def test_sums_means_and_minima_are_of_each_sample():
    sequences = Sequences.of([3, 0, 2])
    values = torch.tensor([1.0, 2.0, 6.0, 4.0, -5.0])
    assert sequences.num == 3
    assert sequences.sums(values).tolist() == [9, 0, -1]
    assert sequences.means(values).tolist() == [3, 0, -0.5]
    assert sequences.minima(values).tolist() == [1, INF, -5]
    assert sequences.spread(torch.tensor([7.0, 8.0, 9.0])).tolist() == [7, 7, 7, 9, 9]


def test_masked_places_do_not_count_whatever_stands_there():  # B92
    sequences = Sequences.of([3, 2], mask=MASK)
    values = torch.tensor([1.0, NAN, 3.0, INF, 5.0], requires_grad=True)
    means = sequences.means(values)
    assert means.tolist() == [2, 5]
    assert sequences.minima(values).tolist() == [1, 5]
    means.sum().backward()
    assert values.grad.tolist() == [0.5, 0, 0.5, 0, 1]


def test_a_sample_without_tokens_that_count_has_mean_zero():
    sequences = Sequences.of([2, 1], mask=torch.tensor([False, False, True]))
    assert sequences.means(torch.tensor([NAN, NAN, 2.0])).tolist() == [0, 2]
    assert sequences.counts.tolist() == [0, 1]


def test_no_tokens_at_all_keep_a_path_for_backward():
    for lengths in ([], [0, 0]):
        values = torch.zeros(0, requires_grad=True)
        sequences = Sequences.of(lengths)
        (sequences.sums(values).sum() + sequences.spread(sequences.means(values)).sum()).backward()
        assert sequences.minima(values).tolist() == [INF] * len(lengths)


@pytest.mark.parametrize("call", ["sums", "means", "minima", "clean", "grid"])
@pytest.mark.parametrize("shape", [(1,), (5, 1), (1, 5), (4,), ()])
@pytest.mark.parametrize("mask", [None, MASK])
def test_values_are_one_per_token(call, shape, mask):
    with pytest.raises(ValueError, match=r"expected one value per token, \[5\]"):
        getattr(Sequences.of([3, 2], mask=mask), call)(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), ()])
def test_values_of_samples_are_one_per_sample(shape):
    with pytest.raises(ValueError, match=r"expected one value per sample, \[2\]"):
        Sequences.of([3, 2]).spread(torch.zeros(shape))


@pytest.mark.parametrize("mask", [torch.ones(4, dtype=torch.bool), torch.ones(5)])
def test_the_mask_is_one_bool_per_token(mask):
    with pytest.raises(ValueError, match=r"expected a bool mask of \[5\]"):
        Sequences.of([3, 2], mask=mask)
