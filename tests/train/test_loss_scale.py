"""float16 bases: the loss is scaled as torch's scaler does it, overflows leave steps out, and what only scaling saves is saved."""

from __future__ import annotations

import math
import random

import pytest
import torch

from helpers_train import Unsharded, adapt, item, largest_gap, make_actor, make_items
from lockstep.errors import LockstepError
from lockstep.testing import tiny_llama
from lockstep.train.loss_scale import LossScaler


def half() -> Unsharded:
    """A float16 base under an fp32 adapter, as a recipe makes it."""
    module = adapt(tiny_llama().half())
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return Unsharded(module)


def values(sharded: Unsharded) -> list[torch.Tensor]:
    return [parameter.detach().clone() for _, parameter in sharded.trainable()]


def test_the_factor_follows_torchs_scaler():
    draw = random.Random(0)
    ours, theirs = LossScaler(good_steps_to_grow=5), torch.amp.GradScaler("cpu", growth_interval=5)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    factors = []
    for step in range(80):
        overflows = draw.random() < 0.15
        theirs.scale(parameter.sum()).backward()
        if overflows:
            parameter.grad[0] = math.inf
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        if overflows:
            ours.overflowed(step=step)
        else:
            ours.stepped()
        factors.append(ours.scale)
        assert ours.scale == theirs.get_scale()
    assert len(set(factors)) > 4 and (ours.scale, LossScaler().scale) == (factors[-1], 2.0**16)
    kept = LossScaler()
    kept.load(ours.state())
    assert (kept.scale, kept.good_steps) == (ours.scale, ours.good_steps)


def test_only_float16_is_scaled_and_its_gradient_is_that_of_fp32():  # B47
    items = make_items(3, 3, seed=2)
    plain = Unsharded(adapt(tiny_llama()))
    actor = make_actor(plain)
    assert actor.scaler is None and "loss_scale" not in actor.update(items, step=0).stats
    assert make_actor(Unsharded(adapt(tiny_llama().bfloat16()))).scaler is None
    sharded = half()
    result = make_actor(sharded).update(items, step=0)
    # float16 keeps 11 bits of every activation; gradients here are up to 0.05.
    assert largest_gap(sharded.clipped, plain.clipped) < 1e-3
    assert max(float(grad.abs().max()) for grad in plain.clipped.values()) > 0.04
    assert (result.stats["loss_scale"].mean, result.stats["grad_overflow"].mean) == (2.0**16, 0.0)
    assert result.num_optimizer_steps == 1


def test_gradients_that_float16_cannot_hold_are_saved_by_the_factor():
    """Advantages of 1e-6 make gradients of activations below float16's smallest number, 6e-8."""
    items = [item(each.prompt_ids, each.ids, group=each.group, advantage=1e-6) for each in make_items(3, 3, seed=2)]
    plain, scaled, bare = Unsharded(adapt(tiny_llama())), half(), half()
    make_actor(plain).update(items, step=0)
    make_actor(scaled).update(items, step=0)
    actor = make_actor(bare)
    assert actor.scaler is not None
    actor.scaler.scale = 1.0
    actor.update(items, step=0)
    largest = max(float(grad.abs().max()) for grad in plain.clipped.values())
    assert largest_gap(scaled.clipped, plain.clipped) < 0.02 * largest
    assert largest_gap(bare.clipped, plain.clipped) > 0.5 * largest


def test_an_overflow_leaves_the_step_out_halves_the_factor_and_is_counted():
    sharded = half()
    actor = make_actor(sharded, epochs=3)
    assert actor.scaler is not None
    actor.scaler.scale = 2.0**40  # overflows, and half of it does
    before = values(sharded)
    result = actor.update(make_items(2, 3), step=0)
    assert [each.overflowed for each in result.mini_batches] == [True, True, True]
    assert (result.num_optimizer_steps, result.grad_norm) == (0, 0.0)
    assert (result.stats["grad_overflow"].mean, result.stats["loss_scale"].mean) == (1.0, 2.0**37)
    assert all(torch.equal(old, new) for old, new in zip(before, values(sharded), strict=True))
    assert all(parameter.grad is None for _, parameter in sharded.trainable())
    assert actor.optimizer.torch.state_dict()["state"] == {}
    actor.scaler.scale = 2.0**10
    result = actor.update(make_items(2, 3), step=1)
    assert (result.num_optimizer_steps, result.stats["grad_overflow"].mean) == (3, 0.0)
    assert result.mini_batches[0].grad_norm == pytest.approx(result.grad_norm, rel=0.5)
    assert not torch.equal(before[0], values(sharded)[0])
    empty = actor.update([], step=2)
    assert empty.stats.keys() == result.stats.keys()


def test_a_gradient_that_overflows_without_any_factor_ends_the_run():
    sharded = half()
    actor = make_actor(sharded)
    huge = [item(each.prompt_ids, each.ids, group=each.group, advantage=1e9) for each in make_items(2, 3)]
    for _ in range(16):
        assert actor.update(huge, step=3).num_optimizer_steps == 0
    with pytest.raises(LockstepError, match="step 3: the gradient overflows float16 although the loss is not enlarged"):
        actor.update(huge, step=3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_no_overflow(bad):
    actor = make_actor(half())
    with pytest.raises(LockstepError, match="step 7: the gradient norm is nan"):
        actor.update([*make_items(1, 2), item([1, 2], [3], advantage=bad)], step=7)
    assert actor.scaler is not None and actor.scaler.scale == 2.0**16
