"""What the update trains on: advantages by slot, and what the recipe leaves out."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from helpers_data import sample_of
from lockstep.config import TrainConfig
from lockstep.data.advantages import Algorithm
from lockstep.data.items import make_items
from lockstep.dist import World
from lockstep.testing import run_ranks
from lockstep.types import ScoredSample


def scored(*rows: tuple[int, float, str]) -> list[ScoredSample]:
    samples = [replace(sample_of("x"), slot=slot, finish=finish) for slot, _, finish in rows]
    return [ScoredSample(sample, reward, {}) for sample, (_, reward, _) in zip(samples, rows, strict=True)]


MIXED = scored((0, 1.0, "stop"), (1, 0.5, "stop"), (0, 0.0, "length"), (1, 0.5, "stop"))


def test_groups_without_spread_are_left_out_and_counted():
    batch = make_items(MIXED, TrainConfig(algorithm="dr_grpo"), World())
    assert [(item.group, item.advantage) for item in batch.items] == [(0, 0.5), (0, -0.5)]
    assert batch.metrics == {"frac_reward_zero_std": 0.5}
    kept = make_items(MIXED, TrainConfig(algorithm="dr_grpo", drop_zero_std=False), World())
    assert [(item.group, item.advantage) for item in kept.items] == [(0, 0.5), (1, 0.0), (0, -0.5), (1, 0.0)]
    assert kept.metrics == batch.metrics


def test_truncated_samples_count_in_the_baseline_and_are_not_trained_on():
    (item,) = make_items(MIXED, TrainConfig(algorithm="dr_grpo", mask_truncated=True), World()).items
    assert (item.group, item.advantage) == (0, 0.5)
    cut = scored((0, 1.0, "length"), (0, 0.0, "length"))
    assert make_items(cut, TrainConfig(mask_truncated=True), World()).items == []


@pytest.mark.parametrize(("algorithm", "first"), [("grpo", 0.7071), ("dr_grpo", 0.5), ("rloo", 1.0)])
def test_the_algorithm_is_the_recipes(algorithm, first):
    items = make_items(scored((0, 1.0, "stop"), (0, 0.0, "stop")), TrainConfig(algorithm=algorithm), World()).items
    assert items[0].advantage == pytest.approx(first, abs=1e-4)
    sample = MIXED[0].sample
    assert (items[0].prompt_ids, items[0].ids, items[0].rollout_logprobs) == (
        sample.prompt.ids,
        sample.ids,
        sample.logprobs,
    )


WORDY = [
    replace(each, sample=replace(each.sample, ids=(1,) * n, logprobs=(-1.0,) * n))
    for n, each in enumerate(
        scored(
            (0, 1.0, "stop"), (0, 0.0, "stop"), (1, 1.0, "stop"), (1, 0.5, "stop"), (2, 0.3, "stop"), (2, 0.3, "stop")
        ),
        1,
    )
]


def run_split(world: World) -> dict[str, Any]:
    """Samples dealt out one by one, so that every group is on both ranks."""
    mine = WORDY[world.rank :: world.size]
    out: dict[str, Any] = {}
    for algorithm in get_args(Algorithm):
        batch = make_items(mine, TrainConfig(algorithm=algorithm), world)
        out[algorithm] = [(len(item.ids), item.advantage) for item in batch.items], batch.metrics
    penalties = [[-0.1 * k for k in range(len(each.sample.ids))] for each in mine]
    for algorithm in ("rloo", "reinforce_pp"):
        batch = make_items(mine, TrainConfig(algorithm=algorithm), world, token_rewards=penalties)
        out[f"{algorithm} with KL"] = (
            [(len(i.ids), i.token_advantages or i.advantage) for i in batch.items],
            batch.metrics,
        )
    try:
        make_items(scored((3, float("nan") if world.rank else 1.0, "stop")), TrainConfig(), world)
    except ValueError as error:
        out["nan"] = str(error)
    return out


def test_groups_and_batches_split_over_ranks_are_those_of_one():
    alone = run_split(World())
    assert alone["grpo"][1] == {"frac_reward_zero_std": 1 / 3}
    assert len(alone["grpo"][0]) == 4 and len(alone["reinforce_pp"][0]) == 6
    ranks = run_ranks(2, run_split)
    for name, (items, metrics) in ((name, value) for name, value in alone.items() if name != "nan"):
        assert ranks[0][name][1] == ranks[1][name][1] == metrics, name
        both = sorted([*ranks[0][name][0], *ranks[1][name][0]])
        if name == "reinforce_pp with KL":  # sums over ranks in another order, in float64
            for (length, values), (expected_length, expected) in zip(both, items, strict=True):
                assert length == expected_length and values == pytest.approx(expected, abs=1e-12)
        else:
            assert both == items, name
    assert ranks[0]["nan"] == ranks[1]["nan"] and "expected a finite reward, nan came" in ranks[0]["nan"]


def test_a_kl_in_the_reward_counts_for_the_sample_or_for_the_tokens_before_it():
    pair = WORDY[:2]  # 1 and 2 tokens, rewards 1 and 0
    batch = make_items(pair, TrainConfig(algorithm="dr_grpo"), World(), token_rewards=[[-0.2], [-0.3, -0.1]])
    assert [item.advantage for item in batch.items] == pytest.approx([(0.8 + 0.4) / 2, -(0.8 + 0.4) / 2])
    assert batch.metrics == pytest.approx({"frac_reward_zero_std": 0.0, "kl_reward": 0.2})
    batch = make_items(pair, TrainConfig(algorithm="reinforce_pp"), World(), token_rewards=[[-0.2], [-0.3, -0.1]])
    returns = [0.8, -0.4, -0.1]
    mean = sum(returns) / 3
    std = (sum((value - mean) ** 2 for value in returns) / 2) ** 0.5
    found = [value for item in batch.items for value in item.token_advantages or ()]
    assert found == pytest.approx([(value - mean) / std for value in returns], abs=1e-6)


def test_a_group_that_only_its_kl_sets_apart_is_trained_on_and_still_counted_as_flat():
    flat = scored((0, 1.0, "stop"), (0, 1.0, "stop"))
    batch = make_items(flat, TrainConfig(), World(), token_rewards=[[-0.2], [-0.4]])
    assert len(batch.items) == 2 and batch.metrics["frac_reward_zero_std"] == 1.0


def test_groups_matter_only_where_samples_are_compared_with_their_group():
    assert make_items(scored((0, 1.0, "stop"), (0, 1.0, "stop")), TrainConfig(), World()).items == []
    kept = make_items(scored((0, 1.0, "stop"), (1, 0.0, "stop")), TrainConfig(algorithm="reinforce_pp"), World()).items
    assert [item.advantage > 0 for item in kept] == [True, False]
    assert make_items([], TrainConfig(), World()).items == []
