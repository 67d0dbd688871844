"""From the recipe's words to the loss, and several optimizer steps on one rollout: what the options say is what happens."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from helpers_train import PLAIN, Unsharded, adapt, item, largest_gap, make_actor, make_items
from lockstep.config import TrainConfig, build_config, without_effect
from lockstep.data.advantages import Algorithm
from lockstep.data.packing import dummy_micro_batch, pack
from lockstep.data.sequences import Sequences
from lockstep.errors import ConfigError, LockstepError
from lockstep.testing import tiny_llama
from lockstep.train.corrections import NAMED, Correction
from lockstep.train.kl import KLKind
from lockstep.train.logprobs import TokenLogprobs, token_logprobs
from lockstep.train.losses import CISPO, GSPO, Aggregation, Clip, KLTerm, TokenInputs, actor_loss, policy_loss
from lockstep.train.mini_batches import deal
from lockstep.train.objective import Objective
from lockstep.train.step import UpdateResult
from lockstep.types import Prompt, Sample, TrainItem

REORDERED = 1e-6  # as in test_step.py


def objective(**train: Any) -> Objective:
    return Objective.of(TrainConfig(**train), max_new_tokens=16)


def update(items: list[TrainItem], **train: Any) -> tuple[Unsharded, UpdateResult]:
    sharded = Unsharded(adapt(tiny_llama()))
    return sharded, make_actor(sharded, **train).update(items, step=0)


def weights(sharded: Unsharded) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in sharded.trainable()}


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("algorithm", (*get_args(Algorithm), "gae")),
        ("aggregation", ("auto", *get_args(Aggregation))),
        ("kl_kind", get_args(KLKind)),
        ("correction", ("none", *NAMED)),
    ],
)
def test_a_recipe_can_ask_for_all_that_there_is(option, names):
    assert set(get_args(TrainConfig.model_fields[option].annotation)) == set(names)


def test_the_default_is_ppo_with_the_bounds_of_dapo_and_a_dual_clip_over_all_tokens():
    assert objective() == Objective(Clip(0.2, 0.28, dual=3.0), "token_mean", None, 0.0, (), 16)


@pytest.mark.parametrize(
    ("train", "field", "expected"),
    [
        ({"loss": "gspo"}, "surrogate", GSPO(3e-4, 4e-4)),
        ({"loss": "gspo"}, "aggregation", "seq_mean_token_mean"),
        ({"loss": "gspo", "aggregation": "token_mean"}, "aggregation", "token_mean"),
        ({"loss": "gspo", "algorithm": "dr_grpo"}, "aggregation", "constant_length"),
        ({"loss": "gspo", "clip_low": 0.0}, "surrogate", GSPO(0.0, 4e-4)),
        (
            {"loss": "gspo", "algorithm": "reinforce_pp", "kl_in": "reward", "kl_coef": 0.1},
            "surrogate",
            GSPO(gradient="token"),
        ),
        ({"loss": "cispo", "clip_high": 2}, "surrogate", CISPO(1.0, 2.0)),
        ({"clip_low": 0.1, "clip_high": 0.3, "clip_dual": 0}, "surrogate", Clip(0.1, 0.3)),
        ({"clip_high": 9, "clip_dual": 20}, "surrogate", Clip(0.2, 9.0, dual=20.0)),
        ({"clip_high": 9}, "surrogate", Clip(0.2, 9.0)),
        ({"algorithm": "dr_grpo"}, "aggregation", "constant_length"),
        ({"kl_coef": 0.1, "kl_kind": "k1"}, "kl", KLTerm("k1", 0.1)),
        ({"kl_coef": 0.1, "kl_kind": "k1", "kl_in": "reward"}, "kl", None),
        ({"entropy_coef": 0.01}, "entropy_coef", 0.01),
        ({"correction": "token_tis"}, "corrections", (NAMED["token_tis"],)),
        ({"correction": "icepop", "correction_low": 0}, "corrections", (Correction("token", "mask", high=5.0),)),
    ],
)
def test_options_become_the_loss(train, field, expected):
    assert getattr(objective(**train), field) == expected


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"loss": "gspo", "clip_dual": 3}, "clip_dual=3.0 belongs to loss: ppo, and loss is gspo"),
        ({"clip_dual": 1.2}, "must be above the clip range, which ends at 1.28"),
        ({"kl_in": "reward", "kl_kind": "k3_weighted"}, "kl_kind=k3_weighted shapes a gradient"),
        ({"correction_high": 2}, "correction is none; name one"),
        ({"correction": "icepop", "correction_low": 3, "correction_high": 2}, "is above correction_high"),
        ({"correction": "token_tis", "correction_low": 3}, "is above correction_high=2 "),
        ({"correction": "icepop", "correction_high": 0.4}, "correction_low=0.5 is above"),
        ({"correction": "token_tis", "correction_high": 0.5}, "leave out the ratio 1"),
        ({"correction": "sequence_mask", "correction_low": 1.5}, "leave out the ratio 1"),
        ({"stop_kl": 0.1}, "stop_kl has no effect with a single update"),
        ({"mini_batches": 9}, "train.mini_batches=9 cannot share rollout.prompts_per_step=8"),
    ],
)
def test_combinations_without_meaning_are_refused(train, said):
    tree = {"model": {"path": "x"}, "data": {"train": {"task": "sums"}}, "reward": [{"name": "last_number"}]}
    with pytest.raises(ConfigError, match=said):
        build_config({**tree, "train": train})


def test_only_reinforce_pp_has_no_need_of_groups():
    tree: dict[str, Any] = {"model": {"path": "x"}, "data": {"train": {"task": "sums"}}}
    tree |= {"reward": [{"name": "last_number"}], "rollout": {"group_size": 1}}
    assert build_config({**tree, "train": {"algorithm": "reinforce_pp"}}).train.algorithm == "reinforce_pp"
    with pytest.raises(ConfigError, match=r"group_size is 1: reinforce_pp_baseline compares"):
        build_config({**tree, "train": {"algorithm": "reinforce_pp_baseline"}})


@pytest.mark.parametrize("rollout", [{"top_k": 1}, {"group_size": 1, "prompts_per_step": 1}])
def test_samples_that_can_teach_nothing_are_refused(rollout):
    tree: dict[str, Any] = {"model": {"path": "x"}, "data": {"train": {"task": "sums"}}}
    tree |= {"reward": [{"name": "last_number"}], "train": {"algorithm": "reinforce_pp"}}
    with pytest.raises(ConfigError, match=r"all equal and teach nothing|compares the samples of a step"):
        build_config({**tree, "rollout": rollout})


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({}, []),
        ({"kl_coef": 0.1, "kl_kind": "k1", "kl_in": "reward", "reference": "base"}, []),
        ({"kl_kind": "k2", "reference": "base"}, ["train.kl_kind=k2 and train.reference=base: no effect"]),
        ({"kl_in": "reward"}, ["train.kl_in=reward: no effect, since train.kl_coef is 0"]),
        ({"warmup_steps": 10}, []),
        ({"warmup_steps": 40, "lr": 1e-3}, ["gets to 0.00025 and never to train.lr=0.001"]),
        (
            {"algorithm": "distill", "clip_high": 0.3, "correction": "token_tis"},
            ["train.clip_high=0.3 and train.correction="],
        ),
        ({"algorithm": "distill", "correction": "icepop"}, []),  # what it leaves out, the teacher's KL loses too
    ],
)
def test_what_has_no_effect_is_told(train, said):
    found = without_effect(TrainConfig(**train), num_steps=10, has_teacher=False)
    assert len(found) == len(said)
    assert all(part in text for part, text in zip(said, found, strict=True))


def test_groups_that_a_teacher_cannot_reach_are_told():
    for train, count in (
        (TrainConfig(), 1),
        (TrainConfig(drop_zero_std=False), 0),
        (TrainConfig(algorithm="distill"), 0),
    ):
        assert len(without_effect(train, num_steps=10, has_teacher=True)) == count


@pytest.mark.parametrize("train", [{}, {"kl_coef": 0.1}, {"algorithm": "dr_grpo"}])
@pytest.mark.parametrize("packing", ["padded", "shared_prefix"])
def test_the_default_update_is_bit_for_bit_what_it_was_before_there_were_options(train, packing):  # B82
    """The first release's arithmetic, written out: PPO's clip at ratio 1 and k3, token sums over one global count."""
    items = make_items(4, 3, seed=2)
    sharded, _ = update(items, packing=packing, micro_batch_tokens=60, **train)
    module = adapt(tiny_llama())
    tokens = sum(len(each.ids) for each in items)
    count = len(items) * 16 if train.get("algorithm") == "dr_grpo" else tokens
    for batch in pack(items, mode=packing, max_tokens=60, pad_id=0):
        ref = None
        if "kl_coef" in train:
            module.eval()
            with torch.no_grad(), module.disable_adapter():
                ref = token_logprobs(module, batch, sampling=PLAIN).logprobs
        module.train()
        scored = token_logprobs(module, batch, sampling=PLAIN).logprobs
        advantages = torch.tensor([items[i].advantage for i in batch.item_ids])
        how = {"clip_low": 0.2, "clip_high": 0.28, "ref_logprobs": ref, "kl_coef": train.get("kl_coef", 0.0)}
        (policy_loss(scored, scored.detach(), advantages, **how).loss_sum * (1 / count)).backward()
    assert all(torch.equal(sharded.clipped[name], p.grad) for name, p in Unsharded(module).trainable())


def test_each_log_probability_plays_its_own_part():  # B97
    """Current, old, engine's and reference's all differ; the loss is written out with each in its place."""
    items = [item([1, 2], [3, 4, 5], advantage=0.7), item([1, 2], [6, 7], advantage=-0.4, group=1)]
    rollout = [(-1.3, -2.1, -0.9), (-1.7, -2.2)]
    items = [TrainItem(i.prompt_ids, i.ids, lp, i.advantage, i.group) for i, lp in zip(items, rollout, strict=True)]
    (batch,) = pack(items, mode="packed", max_tokens=99, pad_id=0)
    current = torch.tensor([-1.0, -2.0, -0.8, -1.9, -2.4], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.1, -1.8, -1.0, -2.0, -2.1], dtype=torch.float64)
    ref = torch.tensor([-1.2, -2.3, -0.7, -1.6, -2.0], dtype=torch.float64)
    how = objective(kl_coef=0.3, correction="token_tis", correction_high=1.1, clip_low=0.15, clip_high=0.15)
    sums = how.loss(TokenLogprobs(current, None), batch, items, old=old, reference=ref)
    by_hand = 0.0
    engine = [lp for each in rollout for lp in each]
    for k, advantage in enumerate([0.7] * 3 + [-0.4] * 2):
        now, before, ours = float(current.detach()[k]), float(old[k]), float(ref[k])
        ratio, weight = math.exp(now - before), min(math.exp(before - engine[k]), 1.1)
        pg = -min(ratio * advantage, min(max(ratio, 0.85), 1.15) * advantage)
        by_hand += weight * pg + 0.3 * (math.exp(ours - now) - (ours - now) - 1)
    assert float(sums.loss_sum.detach()) == pytest.approx(
        by_hand, abs=1e-6
    )  # advantages and the engine's values are fp32


def test_a_part_of_a_sample_in_a_micro_batch_is_refused():
    items = make_items(1, 2)
    (batch,) = pack(items, mode="packed", max_tokens=99, pad_id=0)
    cut = [TrainItem(i.prompt_ids, (*i.ids, 1), (*i.rollout_logprobs, -1.0), i.advantage, i.group) for i in items]
    scored = TokenLogprobs(torch.zeros(batch.num_tokens), None)
    with pytest.raises(LockstepError, match="expected whole samples"):
        objective().loss(scored, batch, cut, old=None, reference=None)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_a_micro_batch_without_tokens_has_loss_zero_a_gradient_and_all_statistics(loss):  # dummies
    batch = dummy_micro_batch(0)
    logprobs, entropy = torch.zeros(0, requires_grad=True), torch.zeros(0, requires_grad=True)
    how = objective(loss=loss, kl_coef=0.1, correction="sequence_mask", entropy_coef=0.1)
    sums = how.loss(TokenLogprobs(logprobs, entropy), batch, [], old=None, reference=torch.zeros(0))
    sums.loss_sum.backward()
    assert float(sums.loss_sum.detach()) == 0.0 and logprobs.grad is not None
    assert sums.stats.keys() == how.empty_stats().keys()
    assert all((stat.total, stat.count) == (0, 0) for name, stat in sums.stats.items() if name != "loss")


def test_mini_batches_hold_every_group_once_and_depend_on_ids_alone():
    for num in (1, 2, 3, 5):
        dealt = deal([7, 1, 1, 9, 4, 30], epochs=3, mini_batches=num, seed="a")
        assert dealt == deal([30, 9, 4, 7, 1], epochs=3, mini_batches=num, seed="a")
        for epoch in dealt:
            assert sorted(group for each in epoch for group in each) == [1, 4, 7, 9, 30]
            assert len(epoch) == num and max(map(len, epoch)) - min(map(len, epoch)) <= 1
    assert [len(epoch) for epoch in deal([1, 2], epochs=2, mini_batches=8, seed="a")] == [2, 2]
    assert deal([], epochs=2, mini_batches=3, seed="a") == [[], []]
    many = list(range(40))
    first, second = deal(many, epochs=2, mini_batches=1, seed="a")
    assert first != second != many
    assert deal(many, epochs=1, mini_batches=1, seed="b")[0] != first


def test_several_steps_are_the_loop_written_out():
    """Old log-probabilities once, before the first step; the global count of each mini-batch; AdamW in between."""
    items = make_items(5, 3, seed=3)
    how = {"epochs": 2, "mini_batches": 2, "lr": 1e-2, "clip_low": 0.1, "clip_high": 0.1, "loss": "gspo"}
    sharded, result = update(items, **how)
    module = adapt(tiny_llama())
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
    (everything,) = pack(items, mode="padded", max_tokens=8192, pad_id=0)
    with torch.no_grad():
        before = token_logprobs(module, everything, sampling=PLAIN).logprobs.split([len(i.ids) for i in items])
    for epoch in deal([each.group for each in items], epochs=2, mini_batches=2, seed="0 0"):
        for groups in epoch:
            mine = [index for index, each in enumerate(items) if each.group in groups]
            chosen = [items[index] for index in mine]
            (batch,) = pack(chosen, mode="padded", max_tokens=8192, pad_id=0)
            logprobs = token_logprobs(module, batch, sampling=PLAIN).logprobs
            sequences = Sequences.of([len(each.ids) for each in chosen])
            advantages = torch.tensor([each.advantage for each in chosen for _ in each.ids])
            tokens = TokenInputs(logprobs, torch.cat([before[index] for index in mine]), advantages, sequences)
            sums = actor_loss(tokens, GSPO(0.1, 0.1), aggregation="seq_mean_token_mean")
            optimizer.zero_grad()
            (sums.loss_sum / len(chosen)).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    assert result.num_optimizer_steps == 4
    gap = largest_gap(weights(sharded), {name: p.detach() for name, p in Unsharded(module).trainable()})
    # Adam makes of rounding in a gradient element near zero a part of the learning rate.
    assert gap < 1e-4
    assert result.stats["clip_low"].total + result.stats["clip_high"].total > 0
    assert result.num_tokens == sum(len(each.ids) for each in items) == result.mismatch.count


def test_the_first_of_several_steps_has_ratio_one_to_the_last_bit_and_later_ones_do_not():  # B82
    _, result = update(make_items(6, 2), mini_batches=3, epochs=2, packing="shared_prefix", micro_batch_tokens=40)
    first, *later = [each.stats for each in result.mini_batches]
    assert len(later) == 5
    assert first["ratio"].total == first["ratio"].count and first["approx_kl"].total == 0.0
    assert all(each["approx_kl"].mean > 1e-7 for each in later)
    assert result.stats["ratio"].count == 2 * result.num_tokens
    assert result.grad_norm == pytest.approx(sum(each.grad_norm or 0 for each in result.mini_batches) / 6)


def test_mismatch_is_measured_before_the_update():
    items = make_items(4, 2)
    _, one = update(items)
    _, several = update(items, mini_batches=2, epochs=3, lr=0.1)
    assert several.mismatch.metrics() == pytest.approx(one.mismatch.metrics(), rel=1e-5, abs=1e-6)


def test_a_step_that_went_too_far_is_the_last_and_what_follows_is_left_out():
    items = make_items(4, 2)
    how = {"mini_batches": 2, "epochs": 2, "lr": 0.2}
    _, free = update(items, **how)
    sharded, stopped = update(items, **how, stop_kl=1e-9)
    assert (stopped.num_optimizer_steps, len(stopped.mini_batches), free.num_optimizer_steps) == (1, 2, 4)
    assert stopped.mini_batches[1].grad_norm is None
    assert stopped.mini_batches[1].stats["approx_kl"] == free.mini_batches[1].stats["approx_kl"]
    assert all(parameter.grad is None for _, parameter in sharded.trainable())
    # One step was taken: that on the first mini-batch, as if there had been nothing else.
    groups = deal([each.group for each in items], epochs=1, mini_batches=2, seed="0 0")[0][0]
    alone, _ = update([each for each in items if each.group in groups], lr=0.2)
    left, right = weights(sharded), weights(alone)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_an_entropy_bonus_raises_the_entropy():
    items = [item(i.prompt_ids, i.ids, group=i.group, advantage=0.0) for i in make_items(2, 3)]
    sharded = Unsharded(adapt(tiny_llama(), seed=5))
    actor = make_actor(sharded, entropy_coef=1.0, lr=0.02)
    values = [actor.update(items, step=step).stats["entropy"].mean for step in range(6)]
    assert values[-1] > values[0] + 1e-3


def samples_of(items: list[TrainItem]) -> list[Sample]:
    return [
        Sample(Prompt("p", i.prompt_ids, "", ""), i.group, n, i.ids, i.rollout_logprobs, "", "stop", 0)
        for n, i in enumerate(items)
    ]


def test_kl_in_the_reward_is_per_token_of_the_policy_that_was_sampled():
    items = [*make_items(2, 3), item([1, 2], [], group=5)]
    sharded = Unsharded(adapt(tiny_llama()))
    actor = make_actor(sharded, kl_coef=0.2, kl_kind="k1", kl_in="reward", packing="shared_prefix")
    rewards = actor.kl_rewards(samples_of(items))
    assert rewards is not None and [len(each) for each in rewards] == [len(each.ids) for each in items]
    (batch,) = pack(items, mode="padded", max_tokens=8192, pad_id=0)
    with torch.no_grad():
        now = token_logprobs(sharded.module, batch, sampling=PLAIN).logprobs
        with sharded.adapter_off():
            reference = token_logprobs(sharded.module, batch, sampling=PLAIN).logprobs
    # fp32 log-probabilities in another layout
    assert [value for each in rewards for value in each] == pytest.approx((-0.2 * (now - reference)).tolist(), abs=1e-5)
    assert max(abs(value) for each in rewards for value in each) > 1e-3
    assert make_actor(sharded, kl_coef=0.2).kl_rewards(samples_of(items)) is None
    assert "kl_ref" not in actor.update(items, step=0).stats


def test_kl_in_the_reward_of_a_new_adapter_is_exactly_nothing():  # B83
    items = make_items(2, 3)
    actor = make_actor(Unsharded(adapt(tiny_llama(), zero_b=True)), kl_coef=0.2, kl_in="reward")
    assert {abs(value) for each in actor.kl_rewards(samples_of(items)) or [] for value in each} == {0.0}


def test_token_advantages_reach_their_tokens():
    items = make_items(2, 3)
    alike = [
        TrainItem(i.prompt_ids, i.ids, i.rollout_logprobs, 99.0, i.group, (i.advantage,) * len(i.ids)) for i in items
    ]
    plain, _ = update(items)
    same, _ = update(alike)
    assert all(torch.equal(plain.clipped[name], grad) for name, grad in same.clipped.items())
    first_only = [TrainItem(*_fields(i), (i.advantage, *[0.0] * (len(i.ids) - 1))) for i in items]
    # The same tokens behind the same prompts with nothing after them, over the other count.
    short = [TrainItem(i.prompt_ids, i.ids[:1], i.rollout_logprobs[:1], i.advantage, i.group) for i in items]
    scale = len(items) / sum(len(i.ids) for i in items)
    one, _ = update(first_only)
    other, _ = update(short)
    assert largest_gap(one.clipped, {name: grad * scale for name, grad in other.clipped.items()}) < REORDERED
    with pytest.raises(ValueError, match="item 0: expected an advantage for each of its"):
        update([TrainItem(*_fields(items[0]), (1.0,) * (len(items[0].ids) + 1))])


def _fields(each: TrainItem) -> tuple[Any, ...]:
    return each.prompt_ids, each.ids, each.rollout_logprobs, 0.0, each.group
