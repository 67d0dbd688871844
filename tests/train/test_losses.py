"""Token losses against numbers worked out by hand, and against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lockstep.train.losses import k3, policy_loss

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_on_policy_the_ratio_is_one_and_the_gradient_is_reinforces():  # B82
    logprobs = torch.tensor([-0.3, -7.123, -1e-4], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    sums = policy_loss(logprobs, logprobs.detach(), advantages, **CLIP)
    sums.loss_sum.backward()
    assert torch.equal(logprobs.grad, -advantages)
    assert sums.stats["ratio"].mean == 1.0
    assert sums.stats["clip_low"].mean == sums.stats["clip_high"].mean == sums.stats["approx_kl"].mean == 0.0


def test_clipping_by_hand():
    # ratio 0.5 and 2, advantage of either sign: the pessimistic one of the two products counts.
    ratios = torch.tensor([0.5, 0.5, 2.0, 2.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    logprobs = ratios.log().requires_grad_()
    sums = policy_loss(logprobs, torch.zeros(4, dtype=torch.float64), advantages, **CLIP)
    sums.loss_sum.backward()
    assert sums.loss_sum.item() == pytest.approx(-0.5 + 0.8 - 1.28 + 2.0, abs=1e-12)  # float64 rounding
    # d(-r A)/dlogprob = -r A where the ratio itself counts, 0 where a bound does.
    torch.testing.assert_close(logprobs.grad, torch.tensor([-0.5, 0.0, 0.0, 2.0], dtype=torch.float64))
    assert (sums.stats["clip_low"].total, sums.stats["clip_high"].total) == (1, 1)
    assert sums.stats["ratio"].mean == pytest.approx(1.25)


@pytest.mark.parametrize("cuts", [[(0, 5)], [(0, 4), (4, 5)], [(0, 1), (1, 2), (2, 5)]])
def test_token_mean_does_not_depend_on_micro_batches(cuts):  # B89: lengths 4 and 1, token losses 1 and 3
    losses = torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0])
    logprobs = torch.zeros(5, requires_grad=True)
    total = 0.0
    for start, stop in cuts:
        part = logprobs[start:stop]
        sums = policy_loss(part, part.detach(), -losses[start:stop], **CLIP)
        (sums.loss_sum / 5).backward()
        total += sums.loss_sum.item()
    assert total / 5 == pytest.approx(1.4, abs=1e-6)  # fp32 sum of five small numbers; a mean of means would be 2.0
    torch.testing.assert_close(logprobs.grad, losses / 5, atol=1e-7, rtol=0)  # one fp32 division each


def test_k3_by_hand():  # B91
    assert k3(torch.tensor(-1.0), torch.tensor(-2.0)).item() == pytest.approx(0.367879, abs=1e-6)  # six decimals given
    assert k3(torch.tensor(-1.0), torch.tensor(-1.0)).item() == 0.0


def test_k3_in_expectation():  # B91: its value is the KL; its direct gradient is near the KL's, not equal
    logits = leaf(0.5, 0.0, -0.3)
    reference = torch.log_softmax(leaf(0.0, 0.4, 0.1).detach(), -1)
    logprobs = torch.log_softmax(logits, -1)
    expected = (logprobs.exp().detach() * k3(logprobs, reference)).sum()
    expected.backward()
    assert expected.item() == pytest.approx(0.0971780, abs=1e-7)  # seven decimals given
    given = torch.tensor([0.208405, -0.119717, -0.088688], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, given, atol=1e-6, rtol=0)  # six decimals given


def test_the_kl_term_is_added_with_its_coefficient():
    logprobs, ref = leaf(-1.0, -2.0), torch.tensor([-2.0, -2.0], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    sums = policy_loss(logprobs, logprobs.detach(), zero, **CLIP, ref_logprobs=ref, kl_coef=0.1)
    assert sums.loss_sum.item() == pytest.approx(0.1 * math.exp(-1), abs=1e-12)  # float64 rounding
    assert sums.stats["kl_ref"].mean == pytest.approx(math.exp(-1) / 2)
    assert "kl_ref" not in policy_loss(logprobs, logprobs.detach(), zero, **CLIP).stats


def test_each_argument_plays_its_own_part():  # B97: finite differences on each input
    inputs = {
        "logprobs": leaf(-1.0, -2.0, -0.5),
        "old_logprobs": leaf(-1.1, -1.9, -0.45),
        "advantages": leaf(0.7, -0.4, 1.3),
        "ref_logprobs": leaf(-1.4, -1.5, -0.9),
    }

    def value(**changed: Tensor) -> Tensor:
        return policy_loss(**{**inputs, **changed}, **CLIP, kl_coef=0.3).loss_sum

    value().backward()
    ratio = (inputs["logprobs"] - inputs["old_logprobs"]).exp()
    q_over_p = (inputs["ref_logprobs"] - inputs["logprobs"]).exp()
    by_hand = {
        "logprobs": -ratio * inputs["advantages"] + 0.3 * (1 - q_over_p),
        "old_logprobs": ratio * inputs["advantages"],
        "advantages": -ratio,
        "ref_logprobs": 0.3 * (q_over_p - 1),
    }
    step = 1e-6
    for name, tensor in inputs.items():
        torch.testing.assert_close(tensor.grad, by_hand[name].detach())
        for index in range(3):
            shift = torch.zeros(3, dtype=torch.float64)
            shift[index] = step
            slope = (value(**{name: tensor + shift}) - value(**{name: tensor - shift})) / (2 * step)
            # Central differences are off by step^2 in theory and by 1e-16 / step in float64.
            assert slope.item() == pytest.approx(by_hand[name][index].item(), abs=1e-8)


def test_extreme_ratios_stay_finite():
    logprobs = torch.tensor([0.0, -100.0], requires_grad=True)
    sums = policy_loss(logprobs, torch.tensor([-100.0, 0.0]), torch.tensor([1.0, -1.0]), **CLIP)
    sums.loss_sum.backward()
    assert torch.isfinite(sums.loss_sum)
    assert torch.isfinite(logprobs.grad).all()
    assert math.isfinite(sums.stats["approx_kl"].mean)


def test_no_tokens_give_zero_with_a_path_for_backward():
    logprobs = torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0)
    sums = policy_loss(logprobs, empty, empty, **CLIP, ref_logprobs=empty, kl_coef=1.0)
    sums.loss_sum.backward()
    assert sums.loss_sum.item() == 0.0
    assert all((stat.total, stat.count) == (0.0, 0) for stat in sums.stats.values())
