"""An update's gradient and statistics do not depend on how its samples are laid out, dealt to ranks, or sharded."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers_train import Unsharded, largest_gap, make_actor, make_items
from helpers_update import (
    SEVERAL,
    SINGLE,
    TWICE_TWO,
    Gradients,
    Way,
    alone,
    families_of,
    items_of,
    make_sharded,
    run_several,
    run_way,
    share_of,
    whole,
)
from lockstep.dist import World
from lockstep.testing import run_ranks, tiny_llama
from lockstep.train.step import UpdateResult

# fp32 sums in another order, over a few dozen tokens: 1e-7 at most was seen. Gradients are of order 0.01 to 1, also after three
# steps of AdamW, which could make more of rounding in elements near zero.
REORDERED = 1e-6
# Log-probabilities of two layouts agree to 1e-5, and so do the means of what is made of them.
STATS = 1e-5

FAMILIES = [*SINGLE, *(f"several: {name}" for name in SEVERAL)]
WAYS: dict[int, list[Way]] = {2: ["fsdp2", "fsdp1"], 4: ["fsdp2", "fsdp1", "hsdp"]}


def options_of(family: str) -> dict[str, Any]:
    several = family.removeprefix("several: ")
    return {**TWICE_TWO, **SEVERAL[several]} if several != family else SINGLE[family]


def update_alone(family: str, *, order: int | None = None, **options: Any) -> tuple[Unsharded, UpdateResult]:
    sharded, items = alone(), items_of(family)
    if order is not None:
        random.Random(order).shuffle(items)
    values = {"micro_batch_tokens": 8192, **options_of(family), **options}
    return sharded, make_actor(sharded, **values).update(items, step=0)


def check_equal(left: UpdateResult, right: UpdateResult, *, tolerance: float) -> None:
    assert left.num_tokens == right.num_tokens
    assert left.num_optimizer_steps == right.num_optimizer_steps
    assert left.grad_norm == pytest.approx(right.grad_norm, abs=tolerance)
    assert left.mismatch.metrics() == pytest.approx(right.mismatch.metrics(), rel=1e-4, abs=tolerance)
    for one, other in zip(left.mini_batches, right.mini_batches, strict=True):
        assert one.stats.keys() == other.stats.keys()
        for name, stat in one.stats.items():
            assert stat.count == other.stats[name].count, name
            assert stat.mean == pytest.approx(other.stats[name].mean, rel=1e-4, abs=tolerance), name


def run_ten(world: World, folder: str) -> Gradients:
    """Ten steps at a learning rate of 1e-5; this rank's elements of the adapter."""
    sharded = make_sharded(world, folder, "fsdp2")
    actor = make_actor(sharded, world, lr=1e-5, packing="shared_prefix")
    for step in range(10):
        actor.update(share_of(make_items(4, 3, seed=step), world), step=step)
    return {
        name: (sharded.ranges(name)[world.rank][0], sharded.local_flat(name).numpy().copy())
        for name, _ in sharded.trainable()
    }


def run_all(world: World, folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {way: run_way(world, folder, way) for way in WAYS[world.size]}
    out["ten"] = run_ten(world, folder)
    out["again"] = [run_several(world, folder, "fsdp2", "ppo, k3_weighted") for _ in range(2)]
    return out


Ranks = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Ranks:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return cache(lambda size: run_ranks(size, run_all, str(folder)))


@pytest.mark.parametrize("size", WAYS)
def test_an_update_is_reproducible_to_the_last_bit(ranks, size):
    for rank in ranks(size):
        (one, first), (two, second) = rank["again"]
        assert first == second
        assert all(np.array_equal(one[name][1], two[name][1]) for name in one)


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_and_shardings_have_the_update_of_one_process(ranks, family):  # B34, B89, B90; HSDP 2x2
    plain, expected = update_alone(family)
    assert max(float(grad.abs().max()) for grad in plain.clipped.values()) > 1e-3
    for size, way in ((size, way) for size, ways in WAYS.items() for way in ways if family in families_of(size, way)):
        results = [rank[way][family] for rank in ranks(size)]
        gap = largest_gap(whole([seen for seen, _ in results], plain.clipped), plain.clipped)
        assert gap < REORDERED, (size, way, gap)
        for _, result in results:
            check_equal(result, expected, tolerance=STATS)


@pytest.mark.parametrize("size", WAYS)
def test_ten_small_steps_are_those_of_adamw_in_one_process(ranks, size):  # B50
    plain = alone()
    before = {name: param.detach().clone() for name, param in plain.trainable()}
    actor = make_actor(plain, lr=1e-5)
    for step in range(10):
        actor.update(make_items(4, 3, seed=step), step=step)
    expected = {name: param.detach() for name, param in plain.trainable()}
    assert 1e-5 < largest_gap(before, expected) < 1.1e-4
    assert largest_gap(whole([rank["ten"] for rank in ranks(size)], expected), expected) < 1e-6


def test_families_do_what_they_are_here_for():
    """Each statistic that says so is between none and all, so that the comparisons above compare something."""
    for family in FAMILIES:
        _, result = update_alone(family)
        for name, kind in {"icepop": "is_left_out", "tis": "is_above", "geometric": "is_samples_left_out"}.items():
            if name in family:
                assert 0 < result.stats[kind].mean < 1, family
        if family == "sequence_mask":
            assert 0 < result.stats["is_samples_left_out"].mean < 1
        if family.startswith("several"):
            assert result.num_optimizer_steps == 4
            assert result.mini_batches[0].stats["ratio"].mean == pytest.approx(1.0, abs=1e-6)
            assert result.mini_batches[0].stats["clip_low"].total == 0
            later = [each.stats for each in result.mini_batches[1:]]
            assert sum(stats["clip_low"].total + stats["clip_high"].total for stats in later) > 0, family
    assert sum(each.stats["clip_dual"].total for each in update_alone("several: ppo, dual")[1].mini_batches) > 0


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[Any, UpdateResult]]:
    return {family: update_alone(family, packing="padded") for family in SINGLE}


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_layout_micro_batches_and_order_change_nothing(references, data):  # B80, B89: 1x8 == 8x1
    family = data.draw(st.sampled_from(sorted(SINGLE)))
    options = {
        "packing": data.draw(st.sampled_from(["padded", "packed", "shared_prefix"])),
        "micro_batch_tokens": data.draw(st.sampled_from([1, 20, 45, 100, 8192])),
        "order": data.draw(st.integers(0, 9)),
    }
    plain, expected = references[family]
    sharded, result = update_alone(family, **options)
    assert largest_gap(sharded.clipped, plain.clipped) < REORDERED
    check_equal(result, expected, tolerance=STATS)
