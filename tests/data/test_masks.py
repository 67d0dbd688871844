"""Which of a sample's ids count: selection, spreading back, layouts in which observations are read and never predicted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_data import sample_of
from helpers_train import item
from lockstep.config import TrainConfig
from lockstep.data.items import make_items
from lockstep.data.masks import num_read, sampled, spread
from lockstep.data.packing import pack
from lockstep.dist import World
from lockstep.observe.metrics import reward_stats
from lockstep.types import ScoredSample, TrainItem

MODES = ("padded", "packed", "shared_prefix")
NAN = float("nan")
masks = st.lists(st.booleans(), max_size=9).map(tuple)


@given(masks)
def test_what_is_selected_comes_back_to_its_place(mask):
    values = [float(place) for place in range(1, len(mask) + 1)]
    chosen = sampled(values, mask)
    assert len(chosen) == sum(mask)
    assert spread(chosen, mask) == tuple(value if own else 0.0 for value, own in zip(values, mask, strict=True))
    assert not any(mask[num_read(mask, len(mask)) :]) and (not any(mask) or mask[num_read(mask, len(mask)) - 1])


def test_without_a_mask_everything_is_the_policys():
    assert list(sampled([1.0, 2.0], None)) == [1.0, 2.0] == list(spread([1.0, 2.0], None))
    assert num_read(None, 3) == 3 and item([1], [2, 3]).num_sampled == 2 and sample_of("x").num_sampled == 1


def test_lengths_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="expected a value for each of the 3 ids of a loss mask; 2 came"):
        sampled([1, 2], (True, False, True))
    with pytest.raises(ValueError, match="expected a value for each of the 2 sampled ids; 3 came"):
        spread([1.0, 2.0, 3.0], (True, False, True))


def masked(prompt: list[int], ids: list[int], mask: tuple[bool, ...], group: int = 0) -> TrainItem:
    return replace(item(prompt, ids, group=group), loss_mask=mask)


@pytest.mark.parametrize("mode", MODES)
def test_the_mask_is_of_the_predicted_token_not_of_the_predicting_one(mode):  # B94
    two_turns = masked([1, 2, 3], [4, 5, 6, 7, 8, 9], (True, True, False, False, True, False))
    (batch,) = pack([two_turns], mode=mode, max_tokens=64, pad_id=0)
    # Columns: prompt 0-2, first turn 3-4, observation 5-6, second turn 7; the token behind it is not even read.
    assert batch.predictors.tolist() == [2, 3, 6]
    assert batch.targets.tolist() == [4, 5, 8]
    assert batch.item_ids.tolist() == [0, 0, 0]
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8] if mode == "padded" else [1, 2, 3, 4, 5, 6, 7]]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 5), masks, st.integers(0, 2)), min_size=1, max_size=7),
    st.integers(1, 50),
    st.sampled_from(MODES),
)
def test_masked_layouts_are_the_whole_ones_without_the_masked_predictions(shapes, max_tokens, mode):
    """Every item behind one that is whole and ends where it does: same rows, same columns, fewer predictions."""
    items = [
        masked(list(range(1, 1 + p)), [9 + (5 * i + k) % 7 for k in range(len(mask))], mask, group)
        for i, (p, mask, group) in enumerate(shapes)
    ]
    whole = [replace(each, ids=each.ids[: num_read(each.loss_mask, len(each.ids))], loss_mask=None) for each in items]
    batches = pack(items, mode=mode, max_tokens=max_tokens, pad_id=0)
    plain = pack(whole, mode=mode, max_tokens=max_tokens, pad_id=0)
    assert [batch.input_ids.tolist() for batch in batches] == [batch.input_ids.tolist() for batch in plain]
    assert [batch.position_ids.tolist() for batch in batches] == [batch.position_ids.tolist() for batch in plain]
    for batch, other in zip(batches, plain, strict=True):
        assert batch.items == other.items
        keep = [own for i in batch.items for own in (items[i].loss_mask or ())[: len(whole[i].ids)]]
        assert batch.predictors.tolist() == [x for x, own in zip(other.predictors.tolist(), keep, strict=True) if own]
        assert batch.targets.tolist() == [x for x, own in zip(other.targets.tolist(), keep, strict=True) if own]


@pytest.mark.parametrize("mode", MODES)
def test_an_item_without_a_sampled_token_is_left_out(mode):
    items = [masked([1], [2, 3], (False, False)), masked([1, 2], [3], (True,), group=1)]
    (batch,) = pack(items, mode=mode, max_tokens=64, pad_id=0)
    assert batch.items == (1,)


def scored(*rows: tuple[int, float, tuple[bool, ...]]) -> list[ScoredSample]:
    """Samples of these slots, rewards and masks; NaN where the engine said nothing."""
    return [
        ScoredSample(
            replace(
                sample_of("x"),
                slot=slot,
                ids=(3,) * len(mask),
                logprobs=tuple(-0.5 if own else NAN for own in mask),
                loss_mask=mask,
            ),
            reward,
            {},
        )
        for slot, reward, mask in rows
    ]


PAIR = scored((0, 1.0, (True, False, False, True)), (0, 0.0, (True, True, False, False)))


def test_the_mask_reaches_the_items_and_only_sampled_tokens_are_counted():
    items = make_items(PAIR, TrainConfig(algorithm="dr_grpo"), World()).items
    assert [each.loss_mask for each in items] == [each.sample.loss_mask for each in PAIR]
    assert [each.num_sampled for each in items] == [2, 2]
    assert reward_stats(PAIR, ())["completion_tokens"].total == 4


def test_what_is_normalised_over_tokens_counts_sampled_ones():
    """Weights 3 and 1, not 4 and 4: mean 0.75."""
    uneven = scored((0, 1.0, (True, True, True, False)), (1, 0.0, (False, True, False, False)))
    items = make_items(uneven, TrainConfig(algorithm="reinforce_pp"), World()).items
    scale = 1 / math.sqrt((3 * 0.25**2 + 0.75**2) / 3 + 1e-8)
    assert [each.advantage for each in items] == pytest.approx([0.25 * scale, -0.75 * scale])


@pytest.mark.parametrize("algorithm", ["dr_grpo", "reinforce_pp"])
@pytest.mark.parametrize("garbage", [NAN, math.inf, 1e4])
def test_token_rewards_at_observations_count_nowhere(algorithm, garbage):  # B92
    def batch(at_observations: float):
        rewards = [[-0.1 if own else at_observations for own in each.sample.loss_mask] for each in PAIR]
        return make_items(PAIR, TrainConfig(algorithm=algorithm), World(), token_rewards=rewards)

    clean, dirty = batch(0.0), batch(garbage)
    assert clean.metrics == dirty.metrics and clean.metrics["kl_reward"] == pytest.approx(0.1)
    assert [each.advantage for each in clean.items] == [each.advantage for each in dirty.items]
    assert [each.token_advantages for each in clean.items] == [each.token_advantages for each in dirty.items]
    for each in clean.items if algorithm == "reinforce_pp" else ():
        assert [value == 0.0 for value in each.token_advantages] == [not own for own in each.loss_mask]
