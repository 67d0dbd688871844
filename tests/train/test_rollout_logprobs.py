"""Log-probabilities from the engine that are not finite: refused by name before any ratio, unless they stand where nothing counts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from helpers_train import Unsharded, adapt, item, make_actor, make_items
from lockstep.testing import tiny_llama
from lockstep.types import Prompt, Sample

BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("options", [{}, {"correction": "token_tis"}, {"epochs": 2, "mini_batches": 2}])
def test_the_item_the_token_and_the_value_are_named_and_nothing_moves(bad, options):
    items = make_items(2, 2)
    items[3] = replace(item([1, 2], [30, 40, 50], group=1), rollout_logprobs=(-1.0, bad, math.nan))
    sharded = Unsharded(adapt(tiny_llama()))
    before = [param.detach().clone() for _, param in sharded.trainable()]
    expected = rf"item 3: .*completion token 1 \(id 40\) is {bad}, expected a finite number.*leave the sample out"
    with pytest.raises(ValueError, match=expected):
        make_actor(sharded, **options).update(items, step=0)
    assert all(torch.equal(old, new) for old, (_, new) in zip(before, sharded.trainable(), strict=True))


@pytest.mark.parametrize("bad", BAD)
def test_garbage_at_observations_is_not_looked_at(bad):
    def update(value: float) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        masked = replace(
            item([1, 2, 3], [4, 5, 6]), rollout_logprobs=(-1.0, value, -2.0), loss_mask=(True, False, True)
        )
        sharded = Unsharded(adapt(tiny_llama()))
        result = make_actor(sharded, correction="token_tis").update([masked, *make_items(1, 2)], step=0)
        return sharded.clipped, {name: stat.mean for name, stat in result.stats.items()}

    (clean, stats), (dirty, same) = update(-1.0), update(bad)
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)
    assert stats == same


def test_a_kl_in_the_reward_is_not_computed_from_it_either():
    sample = Sample(
        Prompt("one", (1, 2), "", ""), slot=0, index=0, ids=(3, 4), logprobs=(math.nan, -1.0), text="", finish="stop",
        policy_version=0,
    )  # fmt: skip
    actor = make_actor(Unsharded(adapt(tiny_llama())), kl_in="reward", kl_coef=0.1, kl_kind="k1")
    with pytest.raises(ValueError, match=r"item 0: .*completion token 0 \(id 3\) is nan"):
        actor.kl_rewards([sample])
