"""What the update trains on: advantages by slot, and what the recipe leaves out."""

from dataclasses import replace

import pytest

from helpers_data import sample_of
from lockstep.config import TrainConfig
from lockstep.data.items import make_items
from lockstep.types import ScoredSample


def scored(*rows: tuple[int, float, str]) -> list[ScoredSample]:
    samples = [replace(sample_of("x"), slot=slot, finish=finish) for slot, _, finish in rows]
    return [ScoredSample(sample, reward, {}) for sample, (_, reward, _) in zip(samples, rows, strict=True)]


MIXED = scored((0, 1.0, "stop"), (1, 0.5, "stop"), (0, 0.0, "length"), (1, 0.5, "stop"))


def test_groups_without_spread_are_left_out_and_counted():
    items, num_zero = make_items(MIXED, TrainConfig(algorithm="dr_grpo"))
    assert [(item.group, item.advantage) for item in items] == [(0, 0.5), (0, -0.5)]
    assert num_zero == 1
    kept, num_zero = make_items(MIXED, TrainConfig(algorithm="dr_grpo", drop_zero_std=False))
    assert [(item.group, item.advantage) for item in kept] == [(0, 0.5), (1, 0.0), (0, -0.5), (1, 0.0)]
    assert num_zero == 1


def test_truncated_samples_count_in_the_baseline_and_are_not_trained_on():
    (item,), _ = make_items(MIXED, TrainConfig(algorithm="dr_grpo", mask_truncated=True))
    assert (item.group, item.advantage) == (0, 0.5)
    none, _ = make_items(scored((0, 1.0, "length"), (0, 0.0, "length")), TrainConfig(mask_truncated=True))
    assert none == []


@pytest.mark.parametrize(("algorithm", "first"), [("grpo", 0.7071), ("dr_grpo", 0.5), ("rloo", 1.0)])
def test_the_algorithm_is_the_recipes(algorithm, first):
    items, _ = make_items(scored((0, 1.0, "stop"), (0, 0.0, "stop")), TrainConfig(algorithm=algorithm))
    assert items[0].advantage == pytest.approx(first, abs=1e-4)
    sample = MIXED[0].sample
    assert (items[0].prompt_ids, items[0].ids, items[0].rollout_logprobs) == (
        sample.prompt.ids,
        sample.ids,
        sample.logprobs,
    )
