"""One rank's update: the gradient does not depend on the layout, and what is reported is what happened."""

from __future__ import annotations

import math

import pytest
import torch

from helpers_train import PLAIN, Unsharded, adapt, item, largest_gap, make_actor, make_items
from lockstep.data.packing import pack
from lockstep.errors import LockstepError
from lockstep.testing import tiny_llama
from lockstep.train.logprobs import token_logprobs
from lockstep.train.step import UpdateResult
from lockstep.types import Sampling, TrainItem

# fp32 sums in another order, over a few dozen tokens; gradients here are of order 0.01 to 0.1.
REORDERED = 1e-6


def update(
    items: list[TrainItem], *, module=None, sampling: Sampling = PLAIN, **train
) -> tuple[Unsharded, UpdateResult]:
    sharded = Unsharded(adapt(tiny_llama()) if module is None else module)
    return sharded, make_actor(sharded, sampling=sampling, **train).update(items, step=0)


def logprobs_of(module: torch.nn.Module, items: list[TrainItem]) -> list[list[float]]:
    (batch,) = pack(items, mode="padded", max_tokens=8192, pad_id=0)
    with torch.no_grad():
        flat = iter(token_logprobs(module, batch, sampling=PLAIN).logprobs.tolist())
    return [[next(flat) for _ in each.ids] for each in items]


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_layout_and_micro_batches_change_neither_gradient_nor_stats(kl_coef):  # B80, B89
    items = make_items(4, 3, seed=2)
    plain, expected = update(items, kl_coef=kl_coef)
    assert max(float(grad.abs().max()) for grad in plain.clipped.values()) > 0.01
    for packing in ("padded", "packed", "shared_prefix"):
        for micro_batch_tokens in (20, 60, 8192):
            sharded, result = update(items, packing=packing, micro_batch_tokens=micro_batch_tokens, kl_coef=kl_coef)
            assert largest_gap(sharded.clipped, plain.clipped) < REORDERED
            assert result.num_tokens == expected.num_tokens == sum(len(each.ids) for each in items)
            assert result.grad_norm == pytest.approx(expected.grad_norm, abs=REORDERED)
            assert result.stats.keys() == expected.stats.keys()
            for name, stat in result.stats.items():
                assert stat.mean == pytest.approx(expected.stats[name].mean, abs=1e-5), name  # logprobs agree to 1e-5


def test_the_update_is_the_reinforce_gradient_of_the_token_mean():  # B82, B89
    items = make_items(2, 3, seed=5)
    sharded, result = update(items)
    module = adapt(tiny_llama())
    loss = torch.zeros(())
    for each in items:
        ids = torch.tensor([[*each.prompt_ids, *each.ids]])
        logprobs = torch.log_softmax(module(input_ids=ids).logits[0], -1)
        start = len(each.prompt_ids) - 1
        loss = loss - each.advantage * sum(logprobs[start + k, token] for k, token in enumerate(each.ids))
    (loss / sum(len(each.ids) for each in items)).backward()
    by_hand = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    assert largest_gap(sharded.clipped, by_hand) < REORDERED
    assert result.stats["ratio"].mean == 1.0
    assert result.stats["clip_low"].mean == result.stats["clip_high"].mean == 0.0
    assert result.stats["loss"].mean == pytest.approx(
        -sum(each.advantage * len(each.ids) for each in items) / result.num_tokens, abs=1e-6
    )


def test_clip_bounds_do_nothing_in_the_only_update_of_a_rollout():  # what their descriptions say
    """Engine log-probabilities far from the trainer's, as after many updates: the ratio is to the trainer's own."""
    items = [TrainItem((1, 2, 3), (4, 5), (-9.0, -9.0), 1.0, 0), TrainItem((1, 2, 3), (6, 7), (-0.1, -0.1), -1.0, 0)]
    tight, result = update(items, clip_low=0.0, clip_high=0.0)
    wide, _ = update(items, clip_low=0.9, clip_high=9.0)
    assert result.stats["ratio"].mean == 1.0 and result.grad_norm > 0
    assert tight.clipped.keys() == wide.clipped.keys()
    assert all(torch.equal(tight.clipped[name], wide.clipped[name]) for name in wide.clipped)


def test_dr_grpo_divides_by_a_length_that_samples_cannot_change():
    items = make_items(2, 3, seed=5)
    token_mean, _ = update(items)
    constant, result = update(items, algorithm="dr_grpo")
    tokens, normaliser = sum(len(each.ids) for each in items), 6 * 16  # 16 is the rollout's max_new_tokens
    scaled = {name: grad * (tokens / normaliser) for name, grad in token_mean.clipped.items()}
    assert largest_gap(constant.clipped, scaled) < REORDERED
    assert result.stats["loss"].count == normaliser


def test_every_parameter_moves_and_the_same_update_twice_is_the_same_bit_for_bit():
    items = make_items(3, 3)
    first, _ = update(items, packing="shared_prefix", micro_batch_tokens=40)
    second, _ = update(items, packing="shared_prefix", micro_batch_tokens=40)
    before = dict(Unsharded(adapt(tiny_llama())).trainable())
    for (name, left), (_, right) in zip(first.trainable(), second.trainable(), strict=True):
        assert torch.equal(left, right)
        assert not torch.equal(left, before[name]), name
        assert left.grad is None


def test_the_gradient_is_clipped_and_the_norm_is_the_one_before():
    items = make_items(2, 3)
    sharded, result = update(items, max_grad_norm=1e-3)
    assert result.grad_norm > 1e-2
    assert math.sqrt(sum(float(grad.square().sum()) for grad in sharded.clipped.values())) == pytest.approx(
        result.grad_norm,
        rel=1e-5,  # fp32 sum of squares
    )


def test_the_learning_rate_follows_the_schedule():
    sharded = Unsharded(adapt(tiny_llama()))
    actor = make_actor(sharded, schedule="linear", lr=0.1)
    assert [actor.update(make_items(1, 2), step=step).lr for step in (0, 5)] == pytest.approx([0.1, 0.05])


@pytest.mark.parametrize("items", [[], [item([1, 2], [])]])
def test_an_update_without_tokens_is_skipped_and_says_so(items):  # B84: everything masked out
    sharded = Unsharded(adapt(tiny_llama()))
    actor = make_actor(sharded, kl_coef=0.1)
    before = [p.detach().clone() for _, p in sharded.trainable()]
    result = actor.update(items, step=0)
    assert (result.num_tokens, result.grad_norm, result.stats["skipped"].mean) == (0, 0.0, 1.0)
    assert all(torch.equal(old, new) for old, (_, new) in zip(before, sharded.trainable(), strict=True))
    assert actor.optimizer.torch.state_dict()["state"] == {}
    taken = actor.update(make_items(1, 2), step=1)
    assert taken.stats["skipped"].mean == 0.0
    assert taken.stats.keys() == result.stats.keys()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_the_run_before_the_step(bad):
    sharded = Unsharded(adapt(tiny_llama()))
    actor = make_actor(sharded)
    before = [p.detach().clone() for _, p in sharded.trainable()]
    with pytest.raises(LockstepError, match=r"step 7: the gradient norm is nan"):
        actor.update([*make_items(1, 2), item([1, 2], [3], advantage=bad)], step=7)
    assert all(torch.equal(old, new) for old, (_, new) in zip(before, sharded.trainable(), strict=True))
    assert all(p.grad is None for _, p in sharded.trainable())
    assert math.isfinite(actor.update(make_items(1, 2), step=7).grad_norm)


def test_missing_rollout_logprobs_are_refused():
    with pytest.raises(ValueError, match="item 0: expected a rollout logprob for each of its 2"):
        update([TrainItem((1, 2), (3, 4), (-1.0,), 1.0, 0)])


@pytest.mark.parametrize("packing", ["padded", "packed", "shared_prefix"])
def test_what_is_longer_than_the_models_positions_is_refused(packing):
    with pytest.raises(ValueError, match="item 1: its prompt of 250 and completion of 7 tokens are more than the 256"):
        update([item([1] * 250, [2] * 6), item([1] * 250, [2] * 7)], packing=packing)


def test_rollout_differences_are_measured():
    module = adapt(tiny_llama())
    items = make_items(2, 2, seed=8)
    exact = logprobs_of(module, items)
    matching = [
        TrainItem(i.prompt_ids, i.ids, tuple(lp), i.advantage, i.group) for i, lp in zip(items, exact, strict=True)
    ]
    _, result = update(matching, module=module)
    # The same layout in the same arithmetic: only the float written into the item and back lies between.
    assert result.mismatch.diff_max < 1e-7
    assert result.mismatch.metrics()["rollout_kl_k3"] < 1e-7

    shifted = [
        TrainItem(
            i.prompt_ids, i.ids, tuple(lp + (0.5 if n == 1 else 0.0) for lp in i.rollout_logprobs), i.advantage, i.group
        )
        for n, i in enumerate(matching)
    ]
    _, result = update(shifted, module=adapt(tiny_llama()), packing="shared_prefix", micro_batch_tokens=20)
    gaps = [math.exp(lp) * (math.exp(0.5) - 1) for lp in exact[1]]
    assert result.mismatch.count == result.num_tokens
    assert result.mismatch.diff_max == pytest.approx(max(gaps), abs=1e-6)  # fp32 probabilities
    assert result.mismatch.diff == pytest.approx(sum(gaps), abs=1e-5)
    # ratio trainer/rollout is e^-0.5 on that item's tokens and 1 elsewhere: k3 = r - 1 - log r
    assert result.mismatch.k3 == pytest.approx(len(gaps) * (math.exp(-0.5) - 0.5), abs=1e-4)


def test_logprobs_are_compared_under_the_sampling_distribution():  # B74, B76
    module = adapt(tiny_llama())
    items = [item([1, 2, 3], [4, 5, 6])]
    sampling = Sampling(temperature=0.7, top_k=5, max_new_tokens=16)
    logits = module(input_ids=torch.tensor([[1, 2, 3, 4, 5, 6]])).logits[0, 2:5].detach() / 0.7
    by_hand = []
    for row, token in zip(logits, (4, 5, 6), strict=True):
        kept = set(row.topk(5).indices.tolist()) | {token}
        by_hand.append(float(row[token] - torch.logsumexp(row[sorted(kept)], 0)))
    items = [TrainItem(items[0].prompt_ids, items[0].ids, tuple(by_hand), 1.0, 0)]
    _, result = update(items, module=module, sampling=sampling)
    assert result.mismatch.diff_max < 1e-5  # fp32, another order of summing


def test_the_reference_is_the_adapter_off_and_kl_grows_from_zero():  # B83
    items = make_items(2, 3)
    sharded = Unsharded(adapt(tiny_llama(), zero_b=True))
    actor = make_actor(sharded, kl_coef=0.1, lr=0.05)
    first = actor.update(items, step=0)
    assert first.stats["kl_ref"].mean == 0.0
    second = actor.update(items, step=1)
    assert second.stats["kl_ref"].mean > 1e-4


def test_the_kl_term_pulls_towards_the_reference():  # B83: a non-zero adapter, and nothing but KL in the loss
    items = [item(i.prompt_ids, i.ids, group=i.group, advantage=0.0) for i in make_items(2, 3)]
    sharded = Unsharded(adapt(tiny_llama()))
    actor = make_actor(sharded, kl_coef=1.0, lr=0.02)
    values = [actor.update(items, step=step).stats["kl_ref"].mean for step in range(9)]
    assert values[0] > 0
    assert values[-1] < 0.5 * values[0]


def test_dropout_acts_in_the_update_only():
    module = adapt(tiny_llama(), lora_dropout=0.5)
    sharded = Unsharded(module)
    torch.manual_seed(0)
    make_actor(sharded, kl_coef=0.1).update(make_items(1, 2), step=0)
    assert not module.training
    noisy, clean = sharded.clipped, update(make_items(1, 2), kl_coef=0.1)[0].clipped
    assert largest_gap(noisy, clean) > 1e-4


# The name that every transformers >= 5.0 has; the newer one came during 5.x.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_recomputing_activations_changes_nothing():
    items = make_items(2, 3)
    plain, _ = update(items, packing="shared_prefix")
    module = adapt(tiny_llama())
    module.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    recomputed, _ = update(items, module=module, packing="shared_prefix")
    assert largest_gap(recomputed.clipped, plain.clipped) == 0.0
