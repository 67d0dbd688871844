"""CASES B95: weights for the mismatch of engine and trainer, by hand; and B97's rollout log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lockstep.data.sequences import Sequences
from lockstep.train.corrections import NAMED, Correction, Weights, correct, effective_share
from lockstep.train.losses import Clip, TokenInputs, actor_loss

LN10 = math.log(10)
SIX = {"abs": 1e-5}  # fp32 exp of numbers of order 1


def weigh(rules, log_ratios: list[float], lengths: list[int] | None = None) -> Weights:
    rollout = torch.zeros(len(log_ratios))
    rules = rules if isinstance(rules, tuple) else (rules,)
    return correct(rules, torch.tensor(log_ratios), rollout, Sequences.of(lengths or [len(log_ratios)]))


def test_token_ratios_are_cut_to_the_bounds():
    assert weigh(Correction("token", "truncate", high=2, low=0.5), [LN10, -LN10, 0]).weight.tolist() == [2, 0.5, 1]


def test_the_geometric_mean_of_ten_and_a_tenth_is_one():
    found = weigh(Correction("geometric", "mask", high=1.01, low=0.99), [LN10, -LN10, 0])
    assert found.weight.tolist() == pytest.approx([1, 1, 1])
    assert found.keep.all()


def test_modes_say_whether_the_ratio_grows_with_the_length():
    tokens = [0.005] * 300
    assert weigh(Correction("sequence", "truncate", high=9), tokens).weight[0].item() == pytest.approx(4.48, abs=5e-3)
    assert weigh(Correction("geometric", "truncate", high=9), tokens).weight[0].item() == pytest.approx(1.005, abs=5e-4)
    assert not weigh(NAMED["sequence_mask"], tokens).keep.any()  # 4.48 is above 3


def test_a_long_samples_product_is_finite_without_a_bound():
    rule = Correction("sequence", "truncate", high=float("inf"))
    assert weigh(rule, [1.0] * 300).weight[0].item() == pytest.approx(math.exp(20), rel=1e-5)  # fp32 exp
    assert weigh(rule, [-1.0] * 300).weight[0].item() == pytest.approx(math.exp(-20), rel=1e-5)


def test_masks_keep_the_ratio_and_rejections_do_not():
    log_ratios = [math.log(4), math.log(6), math.log(0.4), 0]
    icepop = weigh(NAMED["icepop"], log_ratios)
    assert icepop.weight.tolist() == pytest.approx([4, 0, 0, 1], **SIX)
    assert icepop.keep.tolist() == [True, False, False, True]
    assert weigh(Correction("token", "reject", high=5, low=0.5), log_ratios).weight.tolist() == [1, 0, 0, 1]


def test_the_bounds_themselves_are_within():
    found = weigh(Correction("token", "mask", high=1, low=1), [0.0, 1e-3, -1e-3])
    assert found.weight.tolist() == [1, 0, 0]
    assert (found.stats["is_above"].total, found.stats["is_below"].total) == (1, 1)


def test_samples_are_judged_one_by_one():
    found = weigh(NAMED["sequence_mask"], [0.5, 0.5, 0.9, 0.9], [2, 2])  # e^1 = 2.72, e^1.8 = 6.05
    assert found.weight.tolist() == pytest.approx([math.e, math.e, 0, 0], **SIX)
    assert (found.stats["is_samples_left_out"].total, found.stats["is_samples_left_out"].count) == (1, 2)


def test_a_veto_leaves_out_the_whole_sample():
    rule = Correction("token", "truncate", high=2, veto=1e-4)
    found = weigh(rule, [0, -10, 0, -9], [2, 2])  # e^-10 = 4.5e-5, e^-9 = 1.2e-4
    assert found.keep.tolist() == [False, False, True, True]
    assert found.weight.tolist() == pytest.approx([0, 0, 1, math.exp(-9)], **SIX)


def test_a_veto_is_of_the_ratio_as_it_is():
    old = torch.tensor([-30.0, -1.0, -1.0])
    weights = correct(
        [Correction("token", "truncate", 2.0, veto=1e-10)], old, torch.full((3,), -1.0), Sequences.of([2, 1])
    )
    assert weights.keep.tolist() == [False, False, True]


def test_rules_multiply():
    rules = (Correction("geometric", "reject", high=1.5, low=0.5), NAMED["token_tis"])
    found = weigh(rules, [math.log(3), -math.log(3), math.log(3), math.log(3)], [2, 2])
    assert found.weight.tolist() == pytest.approx([2, 1 / 3, 0, 0], **SIX)


@pytest.mark.parametrize("gap", [100.0, -100.0, float("inf"), -float("inf")])
@pytest.mark.parametrize("rule", NAMED.values(), ids=NAMED.keys())
def test_extreme_ratios_give_finite_losses_and_gradients(rule, gap):
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    rollout = torch.tensor([-1.0 - gap, -2.0, -0.5])
    sequences = Sequences.of([2, 1])
    weights = correct([rule], logprobs, rollout, sequences)
    tokens = TokenInputs(logprobs, logprobs.detach(), torch.ones(3), sequences, weights=weights)
    sums = actor_loss(tokens, Clip(), aggregation="token_mean")
    sums.loss_sum.backward()
    assert torch.isfinite(sums.loss_sum)
    assert torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(stat.total) for stat in sums.stats.values())
    assert logprobs.grad[2] == -1  # its ratio is 1
    if not weights.keep[0]:
        assert logprobs.grad[0] == 0
    assert bool(weights.keep[0]) == (rule.action == "truncate" or (rule.low == 0 and gap < 0))


def test_a_rejected_sample_adds_exactly_nothing():
    entropy, ref = torch.ones(2, requires_grad=True), torch.tensor([-9.0, -9.0])
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    sequences = Sequences.of([2])
    weights = correct([NAMED["sequence_mask"]], logprobs, torch.tensor([-101.0, -2.0]), sequences)
    tokens = TokenInputs(logprobs, logprobs.detach(), torch.ones(2), sequences, ref, entropy, weights)
    sums = actor_loss(tokens, Clip(), aggregation="seq_mean_token_mean", entropy_coef=0.1)
    sums.loss_sum.backward()
    assert sums.loss_sum.item() == 0
    assert not logprobs.grad.any()
    assert not entropy.grad.any()


def test_weights_carry_no_gradient():
    old, rollout = torch.tensor([-1.0], requires_grad=True), torch.tensor([-1.5], requires_grad=True)
    assert not correct([NAMED["token_tis"]], old, rollout, Sequences.of([1])).weight.requires_grad


def test_stats_are_of_raw_ratios():
    found = weigh(Correction("token", "truncate", high=2, low=0.5), [LN10, -LN10, 0, math.log(1.5)])
    stats = {name: stat.mean for name, stat in found.stats.items()}
    assert (stats["is_above"], stats["is_below"], stats["is_left_out"]) == (0.25, 0.25, 0)
    assert stats["is_ratio"] == pytest.approx((10 + 0.1 + 1 + 1.5) / 4, **SIX)
    assert stats["is_weight"] == pytest.approx(5 / 4, **SIX)
    assert effective_share(found.stats) == pytest.approx(25 / (4 * 7.5), **SIX)  # weights 2, .5, 1, 1.5
    assert effective_share(weigh((), [0.0, 0.0]).stats) == 1
    assert math.isnan(effective_share(weigh(NAMED["icepop"], [9.0]).stats))


@pytest.mark.parametrize("words", [("tokens", "mask"), ("token", "drop")])
def test_unknown_words_are_refused(words):
    with pytest.raises(ValueError, match="expected a level of token, sequence, geometric and an action of truncate"):
        Correction(*words, high=2.0)


def test_without_a_rule_all_weights_are_one():
    found = weigh((), [3.0, -3.0])
    assert found.weight.tolist() == [1, 1]


@pytest.mark.parametrize("bounds", [{"high": 0.5, "low": 0.6}, {"high": 0}, {"high": 1, "veto": -1}])
def test_bounds_that_make_no_sense_are_refused(bounds):
    with pytest.raises(ValueError, match="expected 0 <= low <= high"):
        Correction("token", "mask", **bounds)


def test_each_argument_plays_its_own_part():
    """B97: current, old and rollout log-probabilities all differ; the weight is p_old / p_rollout and never follows the
    current ones, the ratio is p / p_old. Finite differences on each."""
    inputs = {
        "logprobs": torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64),
        "old": torch.tensor([-1.1, -1.9, -0.45], dtype=torch.float64),
        "rollout": torch.tensor([-1.3, -1.8, -0.6], dtype=torch.float64),
        "advantages": torch.tensor([0.7, -0.4, 1.3], dtype=torch.float64),
    }
    sequences = Sequences.of([2, 1])

    def value(**changed: Tensor) -> Tensor:
        v = {**inputs, **changed}
        weights = correct([Correction("token", "truncate", high=5)], v["old"], v["rollout"], sequences)
        tokens = TokenInputs(v["logprobs"], v["old"], v["advantages"], sequences, weights=weights)
        return actor_loss(tokens, Clip(), aggregation="token_mean").loss_sum

    product = -(inputs["logprobs"] - inputs["rollout"]).exp() * inputs["advantages"]  # p/p_old * p_old/p_rollout
    by_hand = {
        "logprobs": product,
        "old": torch.zeros(3, dtype=torch.float64),  # cancels, since nothing is clipped
        "rollout": -product,
        "advantages": product / inputs["advantages"],
    }
    step = 1e-5
    for name, tensor in inputs.items():
        for index in range(3):
            shift = torch.zeros(3, dtype=torch.float64)
            shift[index] = step
            slope = (value(**{name: tensor + shift}) - value(**{name: tensor - shift})) / (2 * step)
            # float64: the central difference is off by about step^2, and by 1e-16 / step.
            assert slope.item() == pytest.approx(by_hand[name][index].item(), abs=1e-8)
