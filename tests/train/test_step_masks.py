"""Updates on samples of several turns: observations are read, and count nowhere, whatever stands in their places."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_train import PLAIN, Unsharded, adapt, largest_gap, make_actor, make_items
from lockstep.testing import tiny_llama
from lockstep.train.step import UpdateResult
from lockstep.types import Prompt, Sample, TrainItem

REORDERED = 1e-6
"""fp32 sums in another order, over a few dozen tokens; gradients here are of order 0.01 to 0.1."""
GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e4, -1e30)
MODULE = adapt(tiny_llama())
WEIGHTS = {name: value.clone() for name, value in MODULE.state_dict().items()}
RECIPES = (
    {"kl_coef": 0.1, "entropy_coef": 0.01},
    {"loss": "gspo", "correction": "geometric_reject", "correction_low": 0.1, "correction_high": 10.0},
    {"loss": "cispo", "correction": "sequence_mask", "aggregation": "seq_mean_token_mean"},
    {"algorithm": "dr_grpo", "correction": "token_tis", "epochs": 2, "mini_batches": 2},
    {"correction": "icepop", "aggregation": "seq_mean_token_sum", "epochs": 2},
)


def update(items: list[TrainItem], **train) -> tuple[Unsharded, UpdateResult]:
    MODULE.load_state_dict(WEIGHTS)
    sharded = Unsharded(MODULE)
    return sharded, make_actor(sharded, sampling=PLAIN, **train).update(items, step=0)


def in_turns(items: list[TrainItem], seed: int) -> list[TrainItem]:
    """Each with a mask that leaves one token at least, and advantages of its tokens."""
    draw = random.Random(seed)
    out = []
    for each in items:
        mask = [draw.random() < 0.5 for _ in each.ids]
        mask[draw.randrange(len(mask))] = True
        values = tuple(draw.uniform(-1, 1) for _ in each.ids)
        out.append(replace(each, loss_mask=tuple(mask), token_advantages=values))
    return out


def dirtied(items: list[TrainItem], draw: random.Random) -> list[TrainItem]:
    """Garbage wherever an observation stands."""

    def dirty(values: tuple[float, ...], mask: tuple[bool, ...]) -> tuple[float, ...]:
        return tuple(value if own else draw.choice(GARBAGE) for value, own in zip(values, mask, strict=True))

    return [
        replace(
            each,
            rollout_logprobs=dirty(each.rollout_logprobs, each.loss_mask),
            token_advantages=dirty(each.token_advantages, each.loss_mask),
        )
        for each in items
    ]


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    recipe=st.sampled_from(RECIPES),
    packing=st.sampled_from(["padded", "packed", "shared_prefix"]),
    micro_batch_tokens=st.sampled_from([20, 8192]),
)
def test_garbage_at_observations_changes_not_a_bit(seed, recipe, packing, micro_batch_tokens):  # B92
    items = in_turns(make_items(3, 2, seed=seed), seed)
    options = {**recipe, "packing": packing, "micro_batch_tokens": micro_batch_tokens}
    clean, expected = update(items, **options)
    gradients, weights = clean.clipped, {name: value.clone() for name, value in MODULE.state_dict().items()}
    dirty, result = update(dirtied(items, random.Random(seed)), **options)
    assert result == expected
    assert expected.mismatch.count > 0 and expected.mismatch.num_broken == 0
    assert all(torch.equal(gradients[name], dirty.clipped[name]) for name in gradients)
    assert all(torch.equal(weights[name], value) for name, value in MODULE.state_dict().items())


@pytest.mark.parametrize("recipe", RECIPES[:4])
def test_layouts_and_micro_batches_agree(recipe):  # B80, B89
    items = in_turns(make_items(4, 3, seed=2), 2)
    plain, expected = update(items, **recipe)
    gradients = plain.clipped
    assert max(float(grad.abs().max()) for grad in gradients.values()) > 1e-3
    for packing in ("packed", "shared_prefix"):
        for micro_batch_tokens in (20, 8192):
            other, result = update(items, **recipe, packing=packing, micro_batch_tokens=micro_batch_tokens)
            assert largest_gap(gradients, other.clipped) < REORDERED
            assert result.num_tokens == expected.num_tokens == sum(each.num_sampled for each in items)
            for name, stat in result.stats.items():
                assert stat.mean == pytest.approx(expected.stats[name].mean, abs=1e-5), name


@pytest.mark.parametrize("packing", ["padded", "packed", "shared_prefix"])
def test_two_turns_in_one_sample_are_two_samples_of_one_turn(packing):
    """The reference for what an observation is: a part of the prompt of what comes after it."""
    first, second = make_items(1, 2, seed=7)
    ids = (*first.ids, *second.ids, 11, 12, 13)
    mask = (True,) * len(first.ids) + (False,) * len(second.ids) + (True,) * 3
    logprobs = (*first.rollout_logprobs, *(float("nan"),) * len(second.ids), -2.0, -3.0, -4.0)
    whole = TrainItem(first.prompt_ids, ids, logprobs, 0.7, 0, loss_mask=mask)
    parts = [
        TrainItem(first.prompt_ids, first.ids, first.rollout_logprobs, 0.7, 0),
        TrainItem((*first.prompt_ids, *first.ids, *second.ids), (11, 12, 13), (-2.0, -3.0, -4.0), 0.7, 1),
    ]
    others = make_items(2, 2, seed=8)
    joined, result = update([whole, *others], packing=packing, kl_coef=0.1)
    gradients = joined.clipped
    split, expected = update([*parts, *others], packing=packing, kl_coef=0.1)
    assert largest_gap(gradients, split.clipped) < REORDERED
    assert result.num_tokens == expected.num_tokens
    for name in ("loss", "kl_ref", "entropy"):
        assert result.stats[name].mean == pytest.approx(expected.stats[name].mean, abs=1e-6), name
    assert result.mismatch.metrics() == pytest.approx(expected.mismatch.metrics(), abs=1e-6)


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_an_observation_at_the_end_changes_not_a_bit(loss):
    """It is not even fed: the longest sample, whose length a row's width would follow, gets one too."""
    items = make_items(3, 2, seed=4)
    more = [
        replace(
            each,
            ids=(*each.ids, 5, 6, 7),
            rollout_logprobs=(*each.rollout_logprobs, 0.0, float("nan"), 9.0),
            loss_mask=(True,) * len(each.ids) + (False,) * 3,
        )
        for each in items
    ]
    for packing in ("padded", "packed", "shared_prefix"):
        plain, expected = update(items, loss=loss, packing=packing)
        gradients = plain.clipped
        other, result = update(more, loss=loss, packing=packing)
        assert result == expected
        assert all(torch.equal(gradients[name], other.clipped[name]) for name in gradients)


def test_a_kl_in_the_reward_is_zero_at_observations():
    items = in_turns(make_items(2, 2, seed=3), 3)
    samples = [
        Sample(
            prompt=Prompt("train-0", each.prompt_ids, "", ""),
            slot=each.group,
            index=0,
            ids=each.ids,
            logprobs=each.rollout_logprobs,
            text="",
            finish="stop",
            policy_version=0,
            loss_mask=mask,
        )
        for each in items
        for mask in (each.loss_mask, None)
    ]
    rewards = make_actor(Unsharded(MODULE), kl_in="reward", kl_kind="k1", kl_coef=0.5).kl_rewards(samples)
    for masked, whole, each in zip(rewards[::2], rewards[1::2], items, strict=True):
        expected = [value if own else 0.0 for value, own in zip(whole, each.loss_mask, strict=True)]
        assert masked == pytest.approx(expected, abs=1e-6) and any(masked)


def test_a_mask_that_is_not_one_per_id_is_refused():
    (item, *_) = make_items(1, 1)
    with pytest.raises(ValueError, match=r"item 0: expected a place in the loss mask for each of its \d+ completion"):
        update([replace(item, loss_mask=(True,))] if len(item.ids) > 1 else [replace(item, loss_mask=(True, True))])
