"""Layouts of items in rows: what predicts what, what sees what, and how many micro-batches there are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BloomConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OpenAIGPTConfig,
    Qwen3Config,
    Qwen3NextConfig,
    T5Config,
)
from transformers.masking_utils import find_packed_sequence_indices

from helpers_train import item, make_items
from lockstep.data.packing import MicroBatch, check_packing_supported, dummy_micro_batch, pack
from lockstep.errors import ModelError
from lockstep.types import TrainItem

MODES = ("padded", "packed", "shared_prefix")


def seen_by(batch: MicroBatch) -> list[list[int]]:
    """For each flat position, the tokens that attention lets it see, in column order."""
    rows, length = batch.input_ids.shape
    if batch.mode == "padded":
        mask = batch.attention_mask()[:, None, None] & torch.ones(length, length, dtype=torch.bool).tril()
    elif batch.mode == "packed":
        blocks = find_packed_sequence_indices(batch.position_ids)
        blocks = torch.zeros(rows, length) if blocks is None else blocks
        mask = (blocks[:, None, :, None] == blocks[:, None, None, :]) & torch.ones(length, length).bool().tril()
    else:
        mask = batch.attention_mask()
    return [batch.input_ids[row][mask[row, 0, column]].tolist() for row in range(rows) for column in range(length)]


def check_batches(items: list[TrainItem], batches: list[MicroBatch]) -> None:
    """Every completion token once, predicted by a position that sees exactly what came before it, at its own place."""
    found: dict[int, list[int]] = {}
    for batch in batches:
        seen = seen_by(batch)
        assert batch.items == tuple(sorted(batch.items))
        places: dict[int, int] = {}
        for position, target, index in zip(batch.predictors, batch.targets, batch.item_ids, strict=True):
            owner = items[int(index)]
            k = places.get(int(index), 0)
            places[int(index)] = k + 1
            assert seen[int(position)] == [*owner.prompt_ids, *owner.ids[:k]]
            assert batch.position_ids.flatten()[position] == len(owner.prompt_ids) + k - 1
            found.setdefault(int(index), []).append(int(target))
        assert tuple(places) == batch.items
    assert found == {index: list(owner.ids) for index, owner in enumerate(items) if owner.ids}


lengths = st.tuples(st.integers(1, 8), st.integers(0, 7), st.integers(0, 2))


@settings(deadline=None, max_examples=60)
@given(shapes=st.lists(lengths, max_size=12), max_tokens=st.integers(1, 60), mode=st.sampled_from(MODES))
def test_every_completion_token_is_predicted_once_from_exactly_what_precedes_it(shapes, max_tokens, mode):
    # Equal prompts within a group for some, different ones for others: both must come out right.
    items = [item(range(1, 1 + p), [(i * 5 + k) % 9 for k in range(c)], group=g) for i, (p, c, g) in enumerate(shapes)]
    batches = pack(items, mode=mode, max_tokens=max_tokens, pad_id=0)
    check_batches(items, batches)
    for batch in batches:
        assert batch.padded_tokens <= max_tokens or batch.input_ids.shape[0] == 1
    again = pack(items, mode=mode, max_tokens=max_tokens, pad_id=0)
    assert [b.input_ids.tolist() for b in batches] == [b.input_ids.tolist() for b in again]


@pytest.mark.parametrize("mode", MODES)
def test_prompt_of_3_and_response_of_2_are_predicted_at_positions_2_and_3(mode):  # B94
    (batch,) = pack([item([5, 6, 7], [8, 9])], mode=mode, max_tokens=64, pad_id=0)
    assert batch.predictors.tolist() == [2, 3]
    assert batch.targets.tolist() == [8, 9]
    assert batch.item_ids.tolist() == [0, 0]


def test_the_attention_mask_comes_from_lengths_not_from_the_loss_mask():  # B80
    items = [item([3, 4, 5], [6, 7]), item([3, 4], [5], group=1)]
    (batch,) = pack(items, mode="padded", max_tokens=64, pad_id=0)
    by_length = batch.attention_mask().long().tolist()
    assert sorted(by_length) == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_read_off_token_values(mode):  # B84: several EOS ids, pad equal to one of them
    items = [item([2, 7], [5, 7]), item([2, 7], [5, 2, 2], group=1), item([2, 2, 2], [2], group=2)]
    check_batches(items, pack(items, mode=mode, max_tokens=64, pad_id=2))


def test_a_group_shares_one_prompt_and_completions_do_not_see_each_other():
    items = [item([1, 2, 3], [4, 5, 6]), item([1, 2, 3], [7, 8])]
    (batch,) = pack(items, mode="shared_prefix", max_tokens=64, pad_id=0)
    # The last token of a completion predicts nothing and is not fed.
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert batch.predictors.tolist() == [2, 3, 4, 2, 5]
    assert batch.targets.tolist() == [4, 5, 6, 7, 8]
    assert batch.attention_mask()[0, 0].long().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]


@pytest.mark.parametrize("mode", MODES)
def test_no_position_sees_nothing(mode):
    # A row of attention without a single True is NaN, and NaN spreads from padding to everything.
    for batch in pack(make_items(4, 3), mode=mode, max_tokens=200, pad_id=0):
        assert all(seen_by(batch))


def test_padding_of_packed_rows_is_a_sequence_of_its_own():
    items = [item([1] * 6, [2, 3]), item([4] * 5, [5])]
    (batch,) = pack(items, mode="packed", max_tokens=64, pad_id=9)
    assert batch.input_ids.tolist() == [[1] * 6 + [2], [4] * 5 + [9, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 0, 1]]
    assert batch.attention_mask() is None


def test_short_blocks_share_rows_that_a_longer_block_asks_for():
    items = [item([1] * 20, [2]), *(item([3] * 5, [4], group=g) for g in range(1, 5))]
    (batch,) = pack(items, mode="packed", max_tokens=64, pad_id=0)
    assert tuple(batch.input_ids.shape) == (2, 20)


def test_a_group_is_split_where_one_long_row_would_cost_more_than_the_prompt_again():
    long_answers = [item([1] * 4, [2] * 900) for _ in range(4)]
    (batch,) = pack(long_answers, mode="shared_prefix", max_tokens=8192, pad_id=0)
    assert batch.input_ids.shape[0] == 4
    long_prompt = [item([1] * 900, [2] * 4) for _ in range(4)]
    (batch,) = pack(long_prompt, mode="shared_prefix", max_tokens=8192, pad_id=0)
    assert tuple(batch.input_ids.shape) == (1, 912)


def test_an_item_longer_than_the_limit_gets_a_micro_batch_of_its_own():
    items = [item([1] * 30, [2, 3]), *(item([1, 2], [3], group=g) for g in (1, 2))]
    for mode in MODES:
        batches = pack(items, mode=mode, max_tokens=10, pad_id=0)
        assert [batch.items for batch in batches] == [(0,), (1, 2)]


def test_padded_rows_make_the_fewest_micro_batches():
    items = make_items(6, 5, seed=4)
    sizes = sorted(len(i.prompt_ids) + len(i.ids) for i in items)
    limit = 70
    fewest = [0] + [len(sizes)] * len(sizes)  # over cuts of the sorted rows: fewest[n] for the first n
    for n in range(1, len(sizes) + 1):
        starts = [s for s in range(n) if (n - s) * sizes[n - 1] <= limit or s == n - 1]
        fewest[n] = 1 + min(fewest[s] for s in starts)
    assert len(pack(items, mode="padded", max_tokens=limit, pad_id=0)) == fewest[-1]


def test_sharing_prompts_feeds_a_quarter_of_the_tokens():
    prompts = [[g] * 46 for g in range(8)]
    items = [item(prompts[g], [1] * 8, group=g) for g in range(8) for _ in range(8)]
    padded, shared = (
        sum(batch.padded_tokens for batch in pack(items, mode=mode, max_tokens=8192, pad_id=0))
        for mode in ("padded", "shared_prefix")
    )
    assert (padded, shared) == (64 * 54, 8 * 102)


@pytest.mark.parametrize("mode", MODES)
def test_items_without_completion_are_left_out(mode):
    items = [item([1, 2], []), item([], [], group=1), item([1, 2], [3], group=2)]
    (batch,) = pack(items, mode=mode, max_tokens=64, pad_id=0)
    assert batch.items == (2,)
    assert pack(items[:2], mode=mode, max_tokens=64, pad_id=0) == []


def test_a_completion_without_prompt_is_refused():
    with pytest.raises(ValueError, match="item 1: the prompt is empty"):
        pack([item([1], [2]), item([], [2])], mode="packed", max_tokens=64, pad_id=0)


def test_the_dummy_has_no_completion_token():
    batch = dummy_micro_batch(3)
    assert batch.num_tokens == 0
    assert batch.input_ids.tolist() == [[3, 3]]
    assert batch.attention_mask() is None


def kernel(config, name="sdpa"):
    config._attn_implementation = name
    return config


@pytest.mark.parametrize(
    ("config", "mode", "reason"),
    [
        (kernel(LlamaConfig(), "flash_attention_2"), "shared_prefix", "cannot take a 4-D mask; use packed"),
        (kernel(MistralConfig()), "shared_prefix", "sliding-window"),
        (kernel(Gemma3TextConfig()), "shared_prefix", "sliding-window"),
        (kernel(MambaConfig()), "packed", "recurrent"),
        (kernel(Qwen3NextConfig()), "packed", "recurrent"),
        (kernel(BloomConfig()), "packed", "ALiBi"),
        (kernel(FalconConfig(alibi=True)), "packed", "ALiBi"),
        (kernel(T5Config()), "packed", "encoder-decoder"),
        (kernel(OpenAIGPTConfig()), "shared_prefix", "its own causal mask"),
    ],
)
def test_layouts_that_a_model_would_compute_wrongly_are_refused(config, mode, reason):
    with pytest.raises(ModelError, match=reason):
        check_packing_supported(config, mode)
    check_packing_supported(config, "padded")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", [LlamaConfig(), GPT2Config(), Qwen3Config(), MistralConfig(sliding_window=None)])
def test_full_attention_takes_every_layout(config, mode):
    for name in ("sdpa", "eager"):
        check_packing_supported(kernel(config, name), mode)


def test_windows_and_flash_attention_can_be_packed():
    check_packing_supported(kernel(MistralConfig()), "packed")
    check_packing_supported(kernel(LlamaConfig(), "flash_attention_2"), "packed")
