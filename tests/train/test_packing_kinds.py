"""Packing by every means that transformers has: positions of several axes, flash and flex attention; and what falls back."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    masking_utils,
)
from transformers.integrations import flex_attention as flex
from transformers.modeling_flash_attention_utils import _is_packed_sequence, prepare_fa_kwargs_from_position_ids

from helpers_models import tiny_qwen2_vl
from helpers_train import PLAIN, adapt, item, make_items
from lockstep.config import TrainConfig
from lockstep.data.packing import MicroBatch, pack
from lockstep.dist import World
from lockstep.errors import ModelError
from lockstep.testing import tiny_llama
from lockstep.train.choices import by_config, choose_packing, decide
from lockstep.train.logprobs import token_logprobs
from lockstep.train.model_inputs import visible
from lockstep.types import TrainItem

MODES = ("padded", "packed", "shared_prefix")
# fp32 sums taken in another order, over two layers of logits of order 1.
EXACT_ARITHMETIC = 1e-5


def one_batch(items: list[TrainItem], mode: Any) -> MicroBatch:
    (batch,) = pack(items, mode=mode, max_tokens=8192, pad_id=0)
    return batch


def alone(model: nn.Module, items: list[TrainItem]) -> Tensor:
    """Every item by itself, unpadded, without positions or masks of ours."""
    out = []
    for each in items:
        logprobs = torch.log_softmax(
            model(input_ids=torch.tensor([[*each.prompt_ids, *each.ids]])).logits[0].float(), -1
        )
        out += [logprobs[len(each.prompt_ids) - 1 + k, token] for k, token in enumerate(each.ids)]
    return torch.stack(out)


def test_text_of_a_model_with_3d_positions_is_the_same_in_every_layout():  # B104
    """Also where there are three rows: as many as axes."""
    model = adapt(tiny_qwen2_vl(), target_modules=r".*language_model.*_proj")
    lengths = [(16, 4), (7, 5), (5, 4), (6, 5), (4, 6)]
    words = [[(11 * k + 3 * i) % 50 + 3 for i in range(sum(pair))] for k, pair in enumerate(lengths)]
    items = [item(row[:p], row[p:], group=k) for k, (row, (p, _)) in enumerate(zip(words, lengths, strict=True))]
    for some in (items, items[:3]):
        expected = alone(model, some)
        weights = torch.linspace(-1, 1, len(expected))
        model.zero_grad()
        (expected * weights).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert len(gradients) > 10
        for mode in MODES:
            batch = one_batch(some, mode)
            if (mode == "padded") == (len(some) == 3):
                assert len(batch.input_ids) == 3
            scored = token_logprobs(model, batch, sampling=PLAIN).logprobs
            torch.testing.assert_close(scored, expected, atol=EXACT_ARITHMETIC, rtol=0)
            model.zero_grad()
            (scored * weights).sum().backward()
            packed = [p.grad for p in model.parameters() if p.grad is not None]
            assert max(float((a - b).abs().max()) for a, b in zip(gradients, packed, strict=True)) < EXACT_ARITHMETIC


def flash_stand_in(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """What flash attention does without padding: blocks are found by transformers' own code, each attends to itself."""
    positions = given["position_ids"]
    assert attention_mask is None and _is_packed_sequence(positions, len(query))
    (ends, _), _ = prepare_fa_kwargs_from_position_ids(positions)
    parts = []
    for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        q, k, v = (each[:, :, start:stop] for each in (query, key, value))
        parts.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=given["scaling"], enable_gqa=True))
    return torch.cat(parts, dim=2).transpose(1, 2), None


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2_vl])
def test_flash_attention_sees_the_blocks_of_packed_rows(build):
    model = build()
    items = [*make_items(3, 2, seed=1), item(range(30), [1, 2, 3], group=9)]
    batch = one_batch(items, "packed")
    assert len(batch.input_ids) > 1 and batch.block_ids.max() > 0
    with torch.no_grad():
        expected = alone(model, items)
        AttentionInterface.register("flash_stand_in", flash_stand_in)
        model.config.get_text_config()._attn_implementation = "flash_stand_in"
        scored = token_logprobs(model, batch, sampling=PLAIN).logprobs
    torch.testing.assert_close(scored, expected, atol=EXACT_ARITHMETIC, rtol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")  # on purpose
@pytest.mark.parametrize("mode", MODES)
def test_flex_attention_computes_every_layout(monkeypatch, mode):
    """Without gradient: torch's flex_attention has no backward on a CPU. Not compiled, which takes long and is torch's to test."""
    monkeypatch.setattr(
        flex, "compile_friendly_flex_attention", lambda *qkv, training, **how: flex_attention(*qkv, **how)
    )
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda *, _compile, **how: create_block_mask(**how))
    model = tiny_llama()
    items = [*make_items(3, 3, seed=1), item(range(30), [1, 2, 3], group=9)]
    with torch.no_grad():
        expected = token_logprobs(model, one_batch(items, "padded"), sampling=PLAIN).logprobs
        model.set_attn_implementation("flex_attention")
        scored = token_logprobs(model, one_batch(items, mode), sampling=PLAIN).logprobs
    torch.testing.assert_close(scored, expected, atol=EXACT_ARITHMETIC, rtol=0)


def test_the_rule_of_shared_prefixes_is_their_mask():
    batch = one_batch(make_items(4, 3, seed=2), "shared_prefix")
    rows, length = batch.input_ids.shape
    row, query, key = torch.meshgrid(torch.arange(rows), torch.arange(length), torch.arange(length), indexing="ij")
    mask = batch.attention_mask()
    assert mask is not None and mask.ndim == 4 and batch.branch_ids.max() == 3
    assert torch.equal(visible(batch, row, query, key), mask[:, 0])


def tiny_mistral() -> MistralForCausalLM:
    torch.manual_seed(0)
    small = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return MistralForCausalLM(MistralConfig(vocab_size=64, sliding_window=6, **small)).eval()


def tiny_opt() -> OPTForCausalLM:
    """It takes positions from the mask, not from position_ids; of a window its config knows nothing."""
    torch.manual_seed(0)
    small = dict(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, init_std=0.3)
    return OPTForCausalLM(OPTConfig(vocab_size=64, **small)).eval()


def chosen(asked: str, model: nn.Module) -> str:
    return choose_packing(asked, model, World(), sampling=PLAIN, pad_id=1)


def test_auto_takes_what_the_model_can_do_and_says_what_it_cannot(caplog):
    with caplog.at_level(logging.WARNING):
        assert chosen("auto", tiny_llama()) == "shared_prefix"
        assert not caplog.records
        assert chosen("auto", tiny_mistral()) == "packed"
        assert "not shared_prefix with mistral" in caplog.text and "sliding-window" in caplog.text
        caplog.clear()
        opt = tiny_opt()
        opt.config.sliding_window = 8  # so that shared prefixes are ruled out, and packed rows are tried
        assert chosen("auto", opt) == "padded"
        assert "packed gives opt other log-probabilities than padded" in caplog.text
    with pytest.raises(ModelError, match="packed gives opt other log-probabilities"):
        chosen("packed", opt)
    with pytest.raises(ModelError, match="sliding-window"):
        chosen("shared_prefix", tiny_mistral())
    assert chosen("padded", opt) == "padded"


def test_an_actor_without_a_recipe_goes_by_the_config():
    assert TrainConfig().packing == "auto"
    assert by_config(TrainConfig(), tiny_llama()).packing == "shared_prefix"
    assert by_config(TrainConfig(), tiny_mistral()).packing == "packed"
    assert by_config(TrainConfig(packing="padded"), tiny_llama()).packing == "padded"


def test_offloading_on_a_cpu_does_nothing_and_says_so(caplog):
    asked = TrainConfig(offload_optimizer=True, offload_activations=True)
    with caplog.at_level(logging.WARNING):
        decided = decide(asked, tiny_llama(), World(), sampling=PLAIN, pad_id=0)
    assert not decided.offload_optimizer and not decided.offload_activations
    assert "train.offload_optimizer and train.offload_activations: this run is on a CPU" in caplog.text
