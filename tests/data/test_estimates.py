"""Advantages and returns from a critic's values, by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest

from lockstep.config import TrainConfig
from lockstep.data.estimates import estimate
from lockstep.data.items import make_items
from lockstep.dist import World
from lockstep.types import Prompt, Sample, ScoredSample

PROMPT = Prompt("p", (1, 2), "", "")


def scored(
    reward: float, num_ids: int, *, slot: int = 0, mask: tuple[bool, ...] | None = None, finish: str = "stop"
) -> ScoredSample:
    ids = tuple(range(3, 3 + num_ids))
    sample = Sample(PROMPT, slot, 0, ids, (-1.0,) * num_ids, "", finish, 0, mask)  # type: ignore[arg-type]
    return ScoredSample(sample, reward, {})


def white(values: Sequence[float]) -> list[float]:
    mean, variance = statistics.fmean(values), statistics.variance(values)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in values]


def test_by_hand():
    # Sample 1: deltas (.9 * .5 - .2) = .25 and 1 - .5 = .5, so .25 + .72 * .5 = .61 and .5. Sample 2: -.1.
    found = estimate([scored(1, 2), scored(0, 1)], [(0.2, 0.5), (0.1,)], World(), gamma=0.9, lam=0.8)
    first, second = found.returns
    assert first == pytest.approx((0.81, 1.0), abs=1e-12)
    assert second == pytest.approx((0.0,), abs=1e-12)
    flat = [value for each in found.advantages for value in each]
    assert flat == pytest.approx(white([0.61, 0.5, -0.1]), abs=1e-9)
    assert math.fsum(flat) == pytest.approx(0, abs=1e-9)


def test_rewards_of_tokens_go_in_where_they_stand():
    found = estimate([scored(1, 3)], [(0.0, 0.0, 0.0)], World(), gamma=1, lam=1, token_rewards=[(-0.1, -0.2, -0.4)])
    assert found.returns[0] == pytest.approx((0.3, 0.4, 0.6), abs=1e-12)


def test_a_cut_completion_ends_where_it_was_cut():
    values = [(0.2, 0.5)]
    cut, whole = (estimate([scored(1, 2, finish=f)], values, World(), gamma=0.9, lam=0.8) for f in ("length", "stop"))
    assert cut.returns == whole.returns


def test_observations_have_no_value_and_break_no_chain():  # multi-turn: the value of the next action comes next
    masked = scored(1, 4, mask=(True, False, False, True))
    bad = float("nan")
    found = estimate([masked], [(0.2, 0.5)], World(), gamma=0.9, lam=0.8, token_rewards=[(-0.1, bad, bad, -0.2)])
    # Deltas -.1 + .45 - .2 = .15 and .8 - .5 = .3.
    assert found.returns[0] == pytest.approx((0.2 + 0.15 + 0.72 * 0.3, 0, 0, 0.8), abs=1e-12)
    assert found.advantages[0][1:3] == (0, 0) and len(found.advantages[0]) == 4


def test_few_tokens_or_none():
    nothing = estimate([scored(1, 0)], [()], World(), gamma=1, lam=1)
    assert nothing.advantages == nothing.returns == [()]
    assert estimate([], [], World(), gamma=1, lam=1).returns == []
    assert estimate([scored(3, 1)], [(0.0,)], World(), gamma=1, lam=1).advantages == [(0.0,)]  # nothing to compare with


def test_items_carry_them_and_say_which_sample_they_are():
    train = TrainConfig(algorithm="gae", mask_truncated=True)
    batch = make_items(
        [scored(1, 2, finish="length"), scored(1, 2, slot=1)],  # equal rewards in a group of one: kept, unlike in grpo
        train,
        World(),
        token_advantages=[(9.0, 9.0), (0.5, -0.5)],
    )
    assert batch.places == [1]
    assert [item.token_advantages for item in batch.items] == [(0.5, -0.5)]
    with pytest.raises(ValueError, match="gae: expected token_advantages, which a critic makes; none came"):
        make_items([scored(1, 2)], train, World())
    with pytest.raises(ValueError, match=r"which train\.algorithm gae alone takes; it is grpo"):
        make_items([scored(1, 2)], TrainConfig(), World(), token_advantages=[(0.5, -0.5)])
