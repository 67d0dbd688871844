"""The critic's loss by hand."""

import math

import pytest
import torch

from lockstep.data.sequences import Sequences
from lockstep.train.value_loss import explained_variance, value_loss

VALUES, OLD, RETURNS = (
    torch.tensor(row, dtype=torch.float64) for row in ([1.0, 0.4, 2.0], [0.5, 0.5, 0.5], [2.0, 0.0, 0.0])
)


def test_clipping_takes_the_worse_of_both_errors():
    values = VALUES.clone().requires_grad_()
    sums = value_loss(values, OLD, RETURNS, Sequences.of([2, 1]), clip=0.2)
    sums.loss_sum.backward()
    # Clipped values .7, .4, .7: errors 1.3 > 1, .4 = .4, .7 < 2.
    assert sums.loss_sum.item() == pytest.approx(0.5 * (1.69 + 0.16 + 4))
    assert values.grad.tolist() == pytest.approx([0, 0.4, 2])
    assert sums.stats["value_clip"].mean == pytest.approx(1 / 3)


def test_clipping_holds_on_both_sides():
    old, values = torch.tensor([0.5, 0.5]), torch.tensor([-0.5, 1.5])
    loss = value_loss(values, old, torch.tensor([-1.0, 2.0]), Sequences.of([2]), clip=0.2).loss_sum
    assert loss.item() == pytest.approx(0.5 * (1.3**2 + 1.3**2))  # clipped values .3 and .7


def test_without_a_clip_it_is_the_squared_error():
    loss = value_loss(VALUES, OLD, RETURNS, Sequences.of([3]), clip=None).loss_sum
    assert loss.item() == pytest.approx(0.5 * (1 + 0.16 + 4))
    loss = value_loss(VALUES, OLD, RETURNS, Sequences.of([2, 1]), clip=None, aggregation="seq_mean_token_mean").loss_sum
    assert loss.item() == pytest.approx(0.5 * (1.16 / 2 + 4))


def test_masked_places_change_nothing():  # B92
    sequences = Sequences.of([3], mask=torch.tensor([True, False, True]))
    bad = torch.tensor([0.0, float("nan"), 0.0], dtype=torch.float64)
    values = (VALUES + bad).requires_grad_()
    sums = value_loss(values, OLD + bad, RETURNS + bad, sequences, clip=0.2)
    sums.loss_sum.backward()
    assert sums.loss_sum.item() == pytest.approx(0.5 * (1.69 + 4))
    assert values.grad.tolist() == pytest.approx([0, 0, 2])
    assert sums.stats["return"].count == 2
    assert all(math.isfinite(stat.total) for stat in sums.stats.values())


@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_at_the_bound_itself_the_gradient_is_whole(clip):
    values = torch.tensor([clip, -clip], requires_grad=True)
    value_loss(values, torch.zeros(2), torch.tensor([2.0, -2.0]), Sequences.of([2]), clip=clip).loss_sum.backward()
    assert values.grad.tolist() == [clip - 2, 2 - clip]


@pytest.mark.parametrize("clip", [-0.2, float("nan")])
def test_a_clip_below_0_is_refused(clip):
    with pytest.raises(ValueError, match="expected a clip of at least 0"):
        value_loss(VALUES, OLD, RETURNS, Sequences.of([3]), clip=clip)


def test_a_heads_column_is_refused():  # [3, 1] against [3] would be nine errors
    with pytest.raises(ValueError, match=r"expected one value per token, \[3\]; \[3, 1\] came"):
        value_loss(VALUES[:, None], OLD, RETURNS, Sequences.of([3]), clip=None)


def test_explained_variance():
    sequences = Sequences.of([3])

    def explained(old: list[float], returns: list[float]) -> float:
        old_values, targets = torch.tensor(old), torch.tensor(returns)
        return explained_variance(value_loss(old_values, old_values, targets, sequences, clip=None).stats)

    assert explained([1.0, 2.0, 4.0], [1.0, 2.0, 4.0]) == pytest.approx(1)
    assert explained([7.0, 8.0, 10.0], [1.0, 2.0, 4.0]) == pytest.approx(1)  # a constant offset leaves no variance
    assert explained([3.0, 3.0, 3.0], [1.0, 2.0, 4.0]) == pytest.approx(0)
    assert explained([4.0, 2.0, 0.0], [0.0, 2.0, 4.0]) == pytest.approx(-3)
    assert math.isnan(explained([1.0, 2.0, 3.0], [0.1, 0.1, 0.1]))
