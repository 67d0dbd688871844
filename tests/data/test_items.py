"""What the update trains on: advantages by slot, and what the recipe leaves out."""

from dataclasses import replace

import pytest

from helpers_data import sample_of
from lockstep.config import TrainConfig
from lockstep.data.items import make_items
from lockstep.dist import World
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
