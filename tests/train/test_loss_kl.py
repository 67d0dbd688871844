"""CASES B91: what each estimate of the KL is worth as a value and as a gradient, in exact expectation over three tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.train.kl import k1, k2, k3, kl_loss, kl_reward

TRUE = [0.224834, -0.129154, -0.095680]
OTHER_DIRECTION = [0.208405, -0.119717, -0.088688]
SIX = {"atol": 1e-6, "rtol": 0}  # six decimals given
REFERENCE = torch.log_softmax(torch.tensor([0.0, 0.4, 0.1], dtype=torch.float64), -1)


def policy(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1)


def start() -> Tensor:
    return torch.tensor([0.5, 0.0, -0.3], dtype=torch.float64, requires_grad=True)


def expected(estimate, logits: Tensor) -> Tensor:
    """Mean over samples from the policy; as in training, the sampling itself has no gradient."""
    logprobs = policy(logits)
    return (logprobs.detach().exp() * estimate(logprobs)).sum()


@pytest.mark.parametrize(
    ("kind", "gradient"),
    [("k1", TRUE), ("k2", TRUE), ("k3", OTHER_DIRECTION), ("k3_k2", TRUE), ("k3_weighted", TRUE)],
)
def test_value_and_gradient_in_expectation(kind, gradient):
    logits = start()
    value = expected(lambda p: kl_loss(kind, p, REFERENCE, old_logprobs=p.detach()), logits)
    value.backward()
    torch.testing.assert_close(logits.grad, torch.tensor(gradient, dtype=torch.float64), **SIX)
    if kind != "k2":  # the square is a KL to second order only
        assert value.item() == pytest.approx(0.0971780, abs=1e-7)


def test_the_true_gradients_are_of_the_two_directions():
    logits = start()
    (policy(logits).exp() * (policy(logits) - REFERENCE)).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor(TRUE, dtype=torch.float64), **SIX)
    logits = start()
    (REFERENCE.exp() * (REFERENCE - policy(logits))).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor(OTHER_DIRECTION, dtype=torch.float64), **SIX)


def test_k1_differentiated_directly_has_no_effect():
    logits = start()
    expected(lambda p: k1(p, REFERENCE), logits).backward()
    assert logits.grad.abs().max() < 1e-15  # float64 rounding of an exact 0


@pytest.mark.parametrize("kind", ["k1", "k3_weighted"])
def test_the_weighted_kinds_are_right_off_policy_too(kind):
    """Tokens drawn from an older policy: weighted by p / p_old, value and gradient are still the current policy's."""
    logits = start()
    old = policy(torch.tensor([-0.2, 0.3, 0.1], dtype=torch.float64))
    value = (old.exp() * kl_loss(kind, policy(logits), REFERENCE, old_logprobs=old)).sum()
    value.backward()
    assert value.item() == pytest.approx(0.0971780, abs=1e-7)
    torch.testing.assert_close(logits.grad, torch.tensor(TRUE, dtype=torch.float64), **SIX)


def test_per_token_values():
    p, q = torch.tensor(-1.0), torch.tensor(-2.0)
    assert k1(p, q).item() == 1
    assert k2(p, q).item() == 0.5
    assert k3(p, q).item() == pytest.approx(0.367879, abs=1e-6)
    assert kl_reward("k1", p, q, coef=0.1).item() == pytest.approx(-0.1)


def test_a_kl_reward_carries_no_gradient():
    p = torch.tensor([-1.0], requires_grad=True)
    assert not kl_reward("k3", p, torch.tensor([-2.0]), coef=0.1).requires_grad


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3_k2", "k3_weighted"])
def test_equal_policies_have_no_kl_and_extremes_are_finite(kind):
    p = torch.tensor([-1.0, -200.0, 0.0, -3.0], requires_grad=True)
    ref = torch.tensor([-1.0, 0.0, -200.0, -float("inf")])
    values = kl_loss(kind, p, ref, old_logprobs=p.detach())
    values.sum().backward()
    assert values[0].item() == 0
    assert torch.isfinite(values).all()
    assert torch.isfinite(p.grad).all()


@pytest.mark.parametrize(("kind", "slope"), [("k1", 30.0), ("k2", 29.0), ("k3", 1.0), ("k3_k2", 29.0)])
def test_a_policy_that_went_far_is_still_pulled_back(kind, slope):
    """At p/q = e^29: k1 has x + 1, k2 x, k3 1 - e^-x. A clamp of the log-ratio would leave 0 of the last three."""
    p = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    kl_loss(kind, p, torch.tensor([-30.0]), old_logprobs=p).sum().backward()
    assert p.grad.item() == pytest.approx(slope)
    assert kl_reward("k1", p, torch.tensor([-30.0]), coef=0.1).item() == pytest.approx(-2.9)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3_k2", "k3_weighted"])
def test_shapes_that_would_broadcast_are_refused(kind):
    p = torch.zeros(3)
    for ref, old in ((torch.zeros(3, 1), p), (torch.zeros(1), p), (p, torch.zeros(3, 1))):
        if old is p or kind in ("k1", "k3_weighted"):
            with pytest.raises(ValueError, match="expected two tensors of one shape"):
                kl_loss(kind, p, ref, old_logprobs=old)


def test_bf16_is_computed_with_in_fp32():
    p, q = (torch.tensor([value], dtype=torch.bfloat16) for value in (-1.0, -1.046875))
    assert k3(p, q).item() == pytest.approx(0.0010817, rel=1e-3)  # bf16: 0.00098


def test_an_unknown_kind_is_refused():
    p = torch.zeros(1)
    with pytest.raises(ValueError, match=r"k3_k2 or k3_weighted; 'k3\+' came"):
        kl_loss("k3+", p, p, old_logprobs=p)
