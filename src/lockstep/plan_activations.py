"""A model on meta and a recipe in; what a forward and backward pass of its largest micro-batch holds beside parameters and logits, out.

The pass is run, on meta, where tensors have shapes and no memory: the run's own packing, forward and autograd, and every tensor that
is made is watched (`plan_peaks.LiveBytes`). Tests find the same bytes in passes over real tensors.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.config import Config
from lockstep.data.packing import MicroBatch, pack
from lockstep.data.room import least, positions_of
from lockstep.known_warnings import while_recomputing
from lockstep.model.value_model import ValueHead
from lockstep.plan_peaks import LiveBytes
from lockstep.plan_run import RunModels
from lockstep.rollout.hf_cache import new_cache
from lockstep.rollout.hf_decode import LastLogits
from lockstep.train.choices import by_config
from lockstep.train.logprobs import forward_with_head, head_of
from lockstep.types import TrainItem

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Activations:
    """Of the largest micro-batch that a recipe allows, in bytes; logits are not among them."""

    num_tokens: int
    """Padding included."""
    saved: int
    """What forward leaves for backward."""
    peak: int
    """The most that is there at a time, in forward and backward."""
    refused: str = ""
    """Why it could not be counted; the rest is then 0."""


def longest_batch(config: Config, model: Any, num_ranks: int) -> MicroBatch:
    """The largest micro-batch of a rank whose prompts and completions are all as long as the recipe allows, on meta."""
    rollout, (prompt, completion) = config.rollout, longest_sample(config, model)
    most = config.train.micro_batch_tokens // completion + 1  # further samples are in other micro-batches
    groups = min(most_prompts(config, num_ranks), -(-most // rollout.group_size))
    items = [
        TrainItem((1,) * prompt, (1,) * completion, (0.0,) * completion, 0.0, group)
        for group in range(groups)
        for _ in range(rollout.group_size)
    ]
    train = by_config(config.train, model)
    mode: Any = train.packing
    batches = pack(items, mode=mode, max_tokens=train.micro_batch_tokens, pad_id=0)
    # Where a mask says who attends to whom, no values have to be looked at; transformers makes the same mask of the other layouts.
    largest = max(batches, key=lambda batch: (batch.padded_tokens, batch.num_tokens))
    return replace(largest, mode="shared_prefix").to(META)


def measure_activations(
    model: Any, head: nn.Module, batch: MicroBatch, *, with_gradient: bool, recomputes: bool = False
) -> Activations:
    """`model` stays on meta, its buffers too. `head`: its output layer, left out here. `recomputes`: gradient checkpointing."""
    model.to(META).train(with_gradient)
    if recomputes:
        with while_recomputing():
            kept = {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), FusedAttention())}
            model.gradient_checkpointing_enable(kept)
    known = [*model.parameters(), *model.buffers(), batch.input_ids, batch.position_ids, batch.block_ids]
    known += [batch.branch_ids, batch.predictors, batch.targets]
    live = LiveBytes(known)
    try:
        with torch.set_grad_enabled(with_gradient), live, FusedAttention():
            rows = forward_with_head(model, head, batch, lambda rows_ND: rows_ND, may_change=True)
            saved = live.now
            if with_gradient:
                rows.sum().backward()
    except RuntimeError as error:
        # A model that looks at values on its way (experts that count their tokens) has none to look at.
        return Activations(batch.padded_tokens, 0, 0, f"{type(model).__name__} cannot be run without values: {error}")
    model.zero_grad()
    return Activations(batch.padded_tokens, saved, live.peak)


def run_activations(run: RunModels, num_ranks: int) -> dict[str, Activations]:
    """By role. A critic that is a head has none worth counting. Moves the models' buffers to meta."""
    config, out = run.config, {}
    batch = longest_batch(config, run.sharded[0].model, num_ranks)
    for each in run.sharded:
        heads = [part for part in each.model.modules() if isinstance(part, ValueHead)]
        if each.model in heads:
            continue
        head = heads[0] if heads else head_of(each.model)
        recomputes = config.model.gradient_checkpointing and each.train is not None
        out[each.role] = measure_activations(
            each.model, head, batch, with_gradient=each.train is not None, recomputes=recomputes
        )
    return out


def cache_bytes(run: RunModels, num_ranks: int) -> int | None:
    """Keys and values of the embedded engine when its batch is as full as the recipe allows; None where the model cannot be run on meta.

    By the engine's own forward, of two tokens.
    """
    assert run.engine is not None
    two, cache = torch.zeros(1, 2, dtype=torch.long, device=META), new_cache(2)
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=META)
    try:
        with torch.no_grad(), FusedAttention():
            LastLogits(run.engine.to(META))(two, mask, two, cache)
    except RuntimeError:  # as in `measure_activations`
        return None
    per_token = sum(cast(Any, layer).keys.nbytes + cast(Any, layer).values.nbytes for layer in cache.layers) // 2
    return per_token * min(run.config.rollout.batch_tokens, most_tokens(run.config, run.engine, num_ranks))


def most_prompts(config: Config, num_ranks: int) -> int:
    """Of a step, on the rank that has most."""
    return -(-config.rollout.prompts_per_step // num_ranks)


def most_tokens(config: Config, model: Any, num_ranks: int) -> int:
    """Prompts and completions of a rank's samples in a step, when all are as long as the recipe allows."""
    return most_prompts(config, num_ranks) * config.rollout.group_size * sum(longest_sample(config, model))


def longest_sample(config: Config, model: Any) -> tuple[int, int]:
    """Tokens of its prompt, and of what follows, observations included: as the recipe allows, and as the model has positions for."""
    environment, new, positions = config.environment, config.rollout.max_new_tokens, positions_of(model.config)
    prompt = config.data.prompt.max_tokens
    if positions is not None:
        prompt = max(1, min(prompt, positions - new))
    if environment is None:
        return prompt, new
    # Nothing stands behind the last reply, and the first one is sampled whatever the limits are (`Episodes`).
    turns = environment.max_turns
    follows = turns * new + (turns - 1) * environment.max_observation_tokens
    limit = least([environment.max_tokens, positions])
    return prompt, follows if limit is None else max(new, min(follows, limit - prompt))


class FusedAttention(TorchFunctionMode):
    """torch's attention on meta would be the unfused one, whose [T, T] no real device keeps: the CPU's fused kernel instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return _fused(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch prepares it for that kernel: heads repeated, a boolean mask as numbers to add."""
    if enable_gqa:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        numbers = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = numbers.masked_fill_(attn_mask.logical_not(), float("-inf"))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
