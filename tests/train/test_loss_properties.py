"""Every loss against a plain per-sample reference in float64, and what must not change it: masked garbage, cuts, order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.data.sequences import Sequences
from lockstep.train.corrections import NAMED, Correction, correct
from lockstep.train.losses import CISPO, GSPO, Clip, KLTerm, LossSums, TokenInputs, actor_loss
from lockstep.train.value_loss import value_loss

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length")
SURROGATES = (
    Clip(0.2, 0.28),
    Clip(0.2, 0.28, dual=1.5),
    GSPO(0.05, 0.1),
    GSPO(0.05, 0.1, gradient="token"),
    CISPO(),
    CISPO(0.2, 0.3),
)
KINDS = ("k1", "k2", "k3", "k3_k2", "k3_weighted")
NAMES = ("logprobs", "old", "rollout", "ref", "entropy", "advantages")
GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e4, -1e30]


@dataclass
class Batch:
    """Float64 token values by name, [N] each, with samples' lengths and the mask."""

    lengths: list[int]
    mask: Tensor
    values: dict[str, Tensor]

    def part(self, samples: list[int]) -> Batch:
        """These samples, in this order."""
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        index = torch.tensor([starts[s] + i for s in samples for i in range(self.lengths[s])], dtype=torch.int64)
        values = {name: tensor[index] for name, tensor in self.values.items()}
        return Batch([self.lengths[s] for s in samples], self.mask[index], values)

    def leaves(self) -> Batch:
        return Batch(self.lengths, self.mask, {n: t.clone().requires_grad_() for n, t in self.values.items()})


def make_batch(lengths: list[int], seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    num = sum(lengths)

    def draw(scale: float) -> Tensor:
        return scale * torch.randn(num, generator=generator, dtype=torch.float64)

    logprobs = -draw(1.0).abs()
    per_sample = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    values = {
        "logprobs": logprobs,
        "old": logprobs + draw(0.3),
        "rollout": logprobs + draw(0.4),
        "ref": logprobs + draw(0.5),
        "entropy": draw(1.0).abs(),
        "advantages": torch.repeat_interleave(per_sample, torch.tensor(lengths, dtype=torch.int64)),
    }
    return Batch(lengths, torch.rand(num, generator=generator) < 0.7, values)


def loss_of(batch: Batch, kind, how, *, kl="k3", rules=(), entropy_coef=0.01) -> LossSums:
    v = batch.values
    sequences = Sequences.of(batch.lengths, mask=batch.mask)
    weights = correct(rules, v["old"], v["rollout"], sequences) if rules else None
    tokens = TokenInputs(v["logprobs"], v["old"], v["advantages"], sequences, v["ref"], v["entropy"], weights)
    return actor_loss(tokens, kind, aggregation=how, kl=KLTerm(kl, 0.1), entropy_coef=entropy_coef)


def naive(batch: Batch, kind, how, *, kl="k3", entropy_coef=0.01) -> Tensor:
    """The same, a sample and a token at a time, in no hurry and with nothing clamped; no correction."""
    total, start = torch.zeros((), dtype=torch.float64), 0
    for length in batch.lengths:
        own = [i for i in range(start, start + length) if batch.mask[i]]
        start += length
        if not own:
            continue
        losses = [naive_token(batch, i, own, kind, kl) - entropy_coef * batch.values["entropy"][i] for i in own]
        total = total + sum(losses) / (len(own) if how == "seq_mean_token_mean" else 1)
    return total


def naive_token(batch: Batch, i: int, own: list[int], kind, kl: str) -> Tensor:
    v = batch.values
    p, old, ref, advantage = (v[name][i] for name in ("logprobs", "old", "ref", "advantages"))
    x = p - ref
    weight = torch.exp(p - old)
    k3_value = torch.exp(-x) + x - 1
    k2_value = x * x / 2
    kls = {
        "k1": weight * x,
        "k2": k2_value,
        "k3": k3_value,
        "k3_k2": k2_value + (k3_value - k2_value).detach(),
        "k3_weighted": weight * k3_value,
    }
    if isinstance(kind, CISPO):
        factor = torch.exp(p - old).clamp(1 - kind.low, 1 + kind.high).detach()
        return -factor * advantage * p + 0.1 * kls[kl]
    ratio = torch.exp(p - old)
    if isinstance(kind, GSPO):
        mean = sum(v["logprobs"][j] - v["old"][j] for j in own) / len(own)
        ratio = torch.exp(mean) if kind.gradient == "sequence" else torch.exp(mean.detach() + p - p.detach())
    bounded = torch.clamp(ratio, 1 - kind.low, 1 + kind.high)
    loss = torch.max(-ratio * advantage, -bounded * advantage)
    if isinstance(kind, Clip) and kind.dual is not None and advantage < 0:
        loss = torch.min(loss, -kind.dual * advantage)
    return loss + 0.1 * kls[kl]


def gradients(batch: Batch, loss: Tensor) -> tuple[Tensor, Tensor]:
    loss.backward()
    zero = torch.zeros_like(batch.values["logprobs"])
    return tuple(zero if (g := batch.values[name].grad) is None else g for name in ("logprobs", "entropy"))


@pytest.mark.parametrize(("kind", "how"), list(product(SURROGATES, AGGREGATIONS)))
def test_value_and_gradient_are_those_of_the_plain_reference(kind, how):
    for number, kl in enumerate(KINDS):
        batch = make_batch([4, 1, 0, 6, 3], seed=number)
        ours, plain = batch.leaves(), batch.leaves()
        loss, expected = loss_of(ours, kind, how, kl=kl).loss_sum, naive(plain, kind, how, kl=kl)
        torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)  # float64: the order of some twenty additions
        for one, other in zip(gradients(ours, loss), gradients(plain, expected), strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_sequence_and_token_gspo_agree_where_advantages_do():
    for how in ("token_mean", "seq_mean_token_mean"):
        results = []
        for gradient in ("sequence", "token"):
            batch = make_batch([4, 2, 5], seed=1).leaves()
            loss = loss_of(batch, GSPO(0.05, 0.1, gradient=gradient), how)
            results.append((loss.loss_sum.detach(), gradients(batch, loss.loss_sum)[0]))
        torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=0)  # float64 rounding


RULES = (*NAMED.values(), Correction("geometric", "truncate", high=1.2, low=0.8, veto=0.5))


@settings(deadline=None)
@given(data=st.data(), lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6), seed=st.integers(0, 10**6))
def test_garbage_in_masked_places_changes_not_a_bit(data, lengths, seed):  # B92
    kind, how = data.draw(st.sampled_from(SURROGATES)), data.draw(st.sampled_from(AGGREGATIONS))
    rules, kl = data.draw(st.lists(st.sampled_from(RULES), max_size=2)), data.draw(st.sampled_from(KINDS))
    clean = make_batch(lengths, seed)
    dirty = make_batch(lengths, seed)
    for name in NAMES:
        for i in (~dirty.mask).nonzero()[:, 0].tolist():
            dirty.values[name][i] = data.draw(st.sampled_from(GARBAGE))
    results = []
    for batch in (clean.leaves(), dirty.leaves()):
        sums = loss_of(batch, kind, how, kl=kl, rules=rules)
        results.append((sums.loss_sum.detach(), *gradients(batch, sums.loss_sum), sums.stats))
    for one, other in zip(results[0][:3], results[1][:3], strict=True):
        assert torch.equal(one, other)
        assert torch.isfinite(other).all()
        assert other.ndim == 0 or not other[~clean.mask].any()
    assert results[0][3] == results[1][3]


@settings(deadline=None)
@given(data=st.data(), lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8), seed=st.integers(0, 10**6))
def test_cuts_and_order_change_neither_sums_nor_gradients(data, lengths, seed):  # B89: 1x8 == 8x1
    kind, how = data.draw(st.sampled_from(SURROGATES)), data.draw(st.sampled_from(AGGREGATIONS))
    rules, kl = data.draw(st.lists(st.sampled_from(RULES), max_size=2)), data.draw(st.sampled_from(KINDS))
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(lengths) - 1, 1)))))
    whole = make_batch(lengths, seed).leaves()
    total = loss_of(whole, kind, how, kl=kl, rules=rules)
    reference = gradients(whole, total.loss_sum)
    split = make_batch(lengths, seed).leaves()
    edges = [0, *[cut for cut in cuts if cut < len(order)], len(order)]
    parts = [loss_of(split.part(list(order[a:b])), kind, how, kl=kl, rules=rules) for a, b in pairwise(edges)]
    loss = sum(part.loss_sum for part in parts)
    # float64: the parts are added in another order, no more.
    torch.testing.assert_close(loss, total.loss_sum, atol=1e-11, rtol=1e-12)
    for one, other in zip(gradients(split, loss), reference, strict=True):
        torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-12)
    for name, stat in total.stats.items():
        added = sum((part.stats[name].total for part in parts), 0.0)
        assert added == pytest.approx(
            stat.total, abs=1e-5 * max(1.0, abs(stat.total))
        )  # the correction's weights are fp32
        assert sum(part.stats[name].count for part in parts) == stat.count


@pytest.mark.parametrize("num_cuts", [1, 2, 4])
def test_the_critics_gradient_does_not_depend_on_micro_batches(num_cuts):  # B89
    batch = make_batch([4, 1, 3, 2], seed=3)
    names = ("logprobs", "old", "ref")  # any three will do as values, old values and returns

    def value_sums(part: Batch) -> LossSums:
        return value_loss(*(part.values[n] for n in names), Sequences.of(part.lengths, mask=part.mask), clip=0.2)

    whole, split = batch.leaves(), batch.leaves()
    total = value_sums(whole)
    total.loss_sum.backward()
    size = 4 // num_cuts
    parts = [value_sums(split.part(list(range(i, i + size)))) for i in range(0, 4, size)]
    loss = sum(part.loss_sum for part in parts)
    loss.backward()
    torch.testing.assert_close(loss, total.loss_sum, atol=1e-12, rtol=0)  # float64 rounding
    torch.testing.assert_close(split.values["logprobs"].grad, whole.values["logprobs"].grad, atol=0, rtol=0)
    for name, stat in total.stats.items():
        assert math.isclose(sum(part.stats[name].total for part in parts), stat.total, abs_tol=1e-12)
