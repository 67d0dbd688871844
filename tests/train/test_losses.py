"""Token losses against numbers worked out by hand, and against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lockstep.data.sequences import Sequences
from lockstep.train.corrections import NAMED, correct
from lockstep.train.losses import (
    CISPO,
    GSPO,
    Clip,
    KLTerm,
    TokenInputs,
    actor_loss,
    aggregate,
    denominator,
    k3,
    policy_loss,
)
from lockstep.types import Stat

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
    torch.testing.assert_close(inputs["logprobs"].grad, by_hand["logprobs"].detach())
    for name, tensor in inputs.items():
        assert name == "logprobs" or tensor.grad is None
        for index in range(3):
            shift = torch.zeros(3, dtype=torch.float64)
            shift[index] = step
            slope = (value(**{name: tensor + shift}) - value(**{name: tensor - shift})) / (2 * step)
            # Central differences are off by step^2 in theory and by 1e-16 / step in float64.
            assert slope.item() == pytest.approx(by_hand[name][index].item(), abs=1e-8)


@pytest.mark.parametrize("kind", [Clip(), GSPO(), GSPO(gradient="token"), CISPO()])
def test_old_logprobs_that_were_not_detached_do_not_cancel_the_gradient(kind):  # B82
    logprobs = leaf(-0.3, -7.1, -1e-4)
    tokens = TokenInputs(logprobs, logprobs, torch.tensor([1.0, -2.0, 0.5]), Sequences.of([1, 1, 1]), logprobs)
    actor_loss(tokens, kind, aggregation="token_mean", kl=KLTerm("k1", 1.0)).loss_sum.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, 3.0, 0.5], dtype=torch.float64))  # -A, and 1 of k1


@pytest.mark.parametrize("wrong", ["logprobs", "old_logprobs", "advantages", "ref_logprobs", "entropy"])
@pytest.mark.parametrize("shape", [(3, 1), (1,), ()])
def test_what_is_not_one_per_token_is_refused(wrong, shape):  # [3, 1] against [3] would be a loss of nine tokens
    given = dict.fromkeys(("logprobs", "old_logprobs", "advantages", "ref_logprobs", "entropy"), torch.zeros(3))
    tokens = TokenInputs(**(given | {wrong: torch.zeros(shape)}), sequences=Sequences.of([2, 1]))
    with pytest.raises(ValueError, match=r"expected one value per token, \[3\]; "):
        actor_loss(tokens, Clip(), aggregation="token_mean")


@pytest.mark.parametrize("kind", [Clip(), GSPO(), CISPO()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_with_in_fp32(kind, dtype):  # a bf16 ratio has no place in a range of 3e-4
    torch.manual_seed(0)
    values = [torch.randn(12).to(dtype) for _ in range(4)]

    def gradient(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, old, advantages, ref = inputs
        logprobs = logprobs.clone().requires_grad_()
        sequences = Sequences.of([5, 7])
        weights = correct([NAMED["token_tis"]], old, ref, sequences)
        tokens = TokenInputs(logprobs, old, advantages, sequences, ref, weights=weights)
        loss = actor_loss(tokens, kind, aggregation="seq_mean_token_mean", kl=KLTerm("k3", 0.1)).loss_sum
        return loss.detach(), torch.autograd.grad(loss, logprobs)[0]

    loss, grad = gradient(*values)
    in_full, grad_in_full = gradient(*(tensor.float() for tensor in values))
    assert torch.equal(loss, in_full)
    assert torch.equal(grad, grad_in_full.to(dtype))


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


@pytest.mark.parametrize("kind", [Clip(dual=3.0), GSPO(), GSPO(gradient="token"), CISPO()])
@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean", "constant_length"])
def test_a_dummy_micro_batch_runs_backward_too(kind, how):
    leaf, empty = torch.ones(3, requires_grad=True), torch.zeros(0)
    nothing = leaf[:0]  # what a rank that has run out of samples scores
    sequences = Sequences.of([])
    weights = correct([NAMED["geometric_reject"]], empty, empty, sequences)
    tokens = TokenInputs(nothing, empty, empty, sequences, empty, nothing, weights)
    sums = actor_loss(tokens, kind, aggregation=how, kl=KLTerm("k3_weighted", 1.0), entropy_coef=0.1)
    sums.loss_sum.backward()
    assert sums.loss_sum.item() == 0
    assert not leaf.grad.any()
    assert all((stat.total, stat.count) == (0, 0) for stat in sums.stats.values())


@pytest.mark.parametrize("cuts", [[(0, 2)], [(0, 1), (1, 2)]])
@pytest.mark.parametrize(
    ("how", "expected"),
    [("token_mean", 1.4), ("seq_mean_token_mean", 2.0), ("seq_mean_token_sum", 3.5), ("constant_length", 0.875)],
)
def test_aggregation_by_hand(how, expected, cuts):  # B89: lengths 4 and 1, token losses 1 and 3, T = 4
    losses, lengths = [torch.ones(4), torch.full((1,), 3.0)], [4, 1]
    total = sum(aggregate(torch.cat(losses[a:b]), Sequences.of(lengths[a:b]), how) for a, b in cuts)
    count = denominator(how, num_tokens=5, num_sequences=2, max_tokens=4)
    assert float(total) / count == pytest.approx(expected, abs=1e-6)


def test_with_global_counts_two_ranks_are_one():  # B90: 2 and 6 tokens; FSDP averages over ranks, so world size is undone
    logprobs, advantages = torch.zeros(8, requires_grad=True), torch.arange(8.0)
    count = denominator("token_mean", num_tokens=8, num_sequences=2, max_tokens=6)
    for rank in (slice(0, 2), slice(2, 8)):
        part = logprobs[rank]
        (policy_loss(part, part.detach(), advantages[rank], **CLIP).loss_sum * 2 / count / 2).backward()
    assert torch.equal(logprobs.grad, -advantages / 8)


def test_nothing_left_to_train_on_is_zero():  # B84: all samples masked; the denominator is at least 1
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    sequences = Sequences.of([2], mask=torch.zeros(2, dtype=torch.bool))
    for how in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length"):
        sums = actor_loss(TokenInputs(logprobs, logprobs.detach(), torch.ones(2), sequences), Clip(), aggregation=how)
        loss = sums.loss_sum / denominator(how, num_tokens=0, num_sequences=0, max_tokens=64)
        loss.backward()
        assert loss.item() == 0
        assert sums.stats["ratio"] == Stat(0.0, 0.0)
    assert not logprobs.grad.any()


def inputs(
    ratios: list[float], advantages: list[float], lengths: list[int] | None = None, **more: Tensor
) -> TokenInputs:
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    old = torch.zeros_like(logprobs).detach()
    values = torch.tensor(advantages, dtype=torch.float64)
    return TokenInputs(logprobs, old, values, Sequences.of(lengths or [len(ratios)]), **more)


def test_dual_clip_by_hand():
    # A < 0 and ratios 2, 2.5, 5: losses 2, 2.5, and 3 (the bound) without a gradient. A > 0 is not touched.
    tokens = inputs([2, 2.5, 5, 5], [-1, -1, -1, 1])
    sums = actor_loss(tokens, Clip(0.2, 0.28, dual=3.0), aggregation="token_mean")
    sums.loss_sum.backward()
    assert sums.loss_sum.item() == pytest.approx(2 + 2.5 + 3 - 1.28)
    assert tokens.logprobs.grad.tolist()[0] == pytest.approx(2)
    assert tokens.logprobs.grad.tolist()[2:] == [0, 0]
    assert sums.stats["clip_dual"].total == 1


def test_gspo_by_hand():
    # Ratios 4 and 1: the sample's is 2, its gradient 2 A / 2 on either token; ratio 1 for the other sample.
    tokens = inputs([4, 1, 1], [-1, -1, 3], [2, 1])
    sums = actor_loss(tokens, GSPO(), aggregation="seq_mean_token_mean")
    sums.loss_sum.backward()
    assert sums.loss_sum.item() == pytest.approx(2 - 3)
    assert tokens.logprobs.grad.tolist() == pytest.approx([1, 1, -3])
    assert sums.stats["ratio"].mean == pytest.approx(5 / 3)


def test_gspo_token_keeps_advantages_of_single_tokens_apart():
    for gradient, expected in (("token", [2, 4]), ("sequence", [3, 3])):
        tokens = inputs([4, 1], [-1, -2])
        actor_loss(tokens, GSPO(gradient=gradient), aggregation="token_mean").loss_sum.backward()
        assert tokens.logprobs.grad.tolist() == pytest.approx(expected)


def test_cispo_by_hand():
    # Weights 0.5, 1 and 6 cut to 5 have no gradient themselves: the gradient is -weight A on every token.
    tokens = inputs([0.5, 1, 6], [2, -1, 1])
    sums = actor_loss(tokens, CISPO(), aggregation="token_mean")
    sums.loss_sum.backward()
    assert tokens.logprobs.grad.tolist() == pytest.approx([-1, 1, -5])
    assert sums.loss_sum.item() == pytest.approx(-math.log(0.5) - 5 * math.log(6))
    assert sums.stats["clip_high"].total == 1


@pytest.mark.parametrize("kind", [Clip(), Clip(dual=3.0), GSPO(), GSPO(gradient="token"), CISPO()])
def test_on_policy_every_surrogate_has_reinforces_gradient(kind):  # B82
    logprobs = torch.tensor([-0.3, -7.123, -1e-4], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -2.0])
    tokens = TokenInputs(logprobs, logprobs.detach(), advantages, Sequences.of([2, 1]))
    sums = actor_loss(tokens, kind, aggregation="token_mean")
    sums.loss_sum.backward()
    assert torch.equal(logprobs.grad, -advantages)
    assert sums.stats["ratio"].mean == 1.0
    assert sums.stats["clip_low"].total == sums.stats["clip_high"].total == 0


def test_stats_by_hand():
    ref = torch.tensor([0.0, 0.0], dtype=torch.float64)
    sums = actor_loss(inputs([2, 1], [1, -1], ref_logprobs=ref), Clip(), aggregation="token_mean", kl=KLTerm("k2", 0.5))
    stats = {name: stat.mean for name, stat in sums.stats.items()}
    assert stats["pg_loss"] == pytest.approx((-1.28 + 1) / 2)
    assert stats["approx_kl"] == pytest.approx((2 - 1 - math.log(2)) / 2)  # k3 of old to current: p/p_old - log - 1
    assert stats["kl_ref"] == pytest.approx((0.5 - 1 + math.log(2)) / 2)  # k3 of current to reference
    assert sums.loss_sum.item() == pytest.approx(-0.28 + 0.5 * math.log(2) ** 2 / 2)


def test_the_entropy_bonus_raises_the_entropy():
    entropy = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
    tokens = inputs([1, 1], [0, 0], entropy=entropy)
    sums = actor_loss(tokens, Clip(), aggregation="token_mean", entropy_coef=0.1)
    sums.loss_sum.backward()
    assert sums.loss_sum.item() == pytest.approx(-0.2)
    assert entropy.grad.tolist() == [-0.1, -0.1]
    assert sums.stats["entropy"].mean == 1.0


def test_terms_without_their_tensor_are_refused():
    with pytest.raises(ValueError, match="needs the reference's log-probabilities; none came"):
        actor_loss(inputs([1], [1]), Clip(), aggregation="token_mean", kl=KLTerm("k3", 0.1))
    with pytest.raises(ValueError, match="needs the entropy; none came"):
        actor_loss(inputs([1], [1]), Clip(), aggregation="token_mean", entropy_coef=0.1)
    with pytest.raises(ValueError, match="with a gradient; it is detached"):
        actor_loss(inputs([1], [1], entropy=torch.ones(1)), Clip(), aggregation="token_mean", entropy_coef=0.1)


@pytest.mark.parametrize("make", [lambda: Clip(low=-0.1), lambda: GSPO(high=-1), lambda: CISPO(low=-1)])
def test_negative_bounds_are_refused(make):
    with pytest.raises(ValueError, match="at least 0"):
        make()


def test_a_dual_clip_within_the_range_is_refused():
    with pytest.raises(ValueError, match=r"dual must be above the clip range"):
        Clip(high=0.28, dual=1.2)


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="constant_length; 'seq_mean' came"):
        aggregate(torch.zeros(2), Sequences.of([2]), "seq_mean")
    with pytest.raises(ValueError, match="expected a gradient of sequence or token"):
        GSPO(gradient="tokens")


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="constant_length; 'mean' came"):
        denominator("mean", num_tokens=1, num_sequences=1, max_tokens=1)
