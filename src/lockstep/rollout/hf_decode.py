"""A batch of prompts, a model and random numbers in; completion ids, their log-probabilities and lengths out.

The prompts' common beginning is computed once, every distinct prompt once, and only the last position goes through the
head. Rows that have finished leave the batch, and columns that no row attends to any more leave with them.

Shape suffixes: N rows (samples) of the batch, P distinct prompts, R rows still in the batch, T new tokens, C columns of
the cache, L columns of one forward pass, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from transformers.cache_utils import Cache

from lockstep.rollout.hf_batch import Batch, Group
from lockstep.rollout.hf_cache import Take, join, new_cache, shrink
from lockstep.sampling import draw_tokens, sampling_logprobs
from lockstep.types import Sampling

LEAVE_AT = 8
"""Finished rows leave once they are an eighth of the batch. Carrying a row costs about 4 ms a step, copying one that
stays 0.45 ms (SmolLM2-135M, 64 rows, one core): from an eighth on, leaving pays for itself within the next step."""

CHOOSE_ROWS = 256
"""Rows whose tokens are drawn at once: bounds the fp32 and fp64 copies of the logits (0.6 GB with 151936 tokens)."""


@dataclass(frozen=True, slots=True)
class Completions:
    """What the rows of a batch drew, on the CPU."""

    ids_NT: Tensor
    logprobs_NT: Tensor
    """fp32, of the drawn tokens; beyond a row's length both hold nothing of meaning."""
    lengths_N: Tensor
    """Number of tokens, the EOS token included."""


class LastLogits:
    """The model's forward pass, reduced to the logits of the last position, whichever transformers release this is."""

    def __init__(self, model: nn.Module):
        self._model = model
        accepted = inspect.signature(model.forward).parameters
        # transformers renamed `past_key_values` to `cache` in 5.24.
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._takes_positions = "position_ids" in accepted
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def __call__(self, ids_RL: Tensor, mask_RC: Tensor, positions_RL: Tensor, cache: Cache) -> Tensor:
        """Logits [R, V]; the cache has grown by L columns. Models without `position_ids` derive them from the mask."""
        options = {**self._options, self._cache_name: cache}
        if self._takes_positions:
            options["position_ids"] = positions_RL
        output = self._model(input_ids=ids_RL, attention_mask=mask_RC, use_cache=True, **options)
        return output.logits[:, -1]


@dataclass(slots=True)
class _Rows:
    """The rows still in the batch, one entry of each tensor per row."""

    cache: Cache
    logits_RV: Tensor
    """Of the next token."""
    mask_RC: Tensor
    positions_R: Tensor
    """Position of the next token."""
    origin_R: Tensor
    """The row's number in the batch as it began."""
    finished_R: Tensor


@torch.inference_mode()
def complete(forward: LastLogits, batch: Batch, sampling: Sampling, *, uniforms_NT: Tensor, eos: Tensor) -> Completions:
    """Sample all rows of the batch, in the order of `batch.rows`. Greedy sampling does not look at `uniforms_NT`."""
    device = eos.device
    num_rows, num_tokens = len(batch.rows), sampling.max_new_tokens
    ids_NT = torch.zeros(num_rows, num_tokens, dtype=torch.long, device=device)
    logprobs_NT = torch.zeros(num_rows, num_tokens, dtype=torch.float32, device=device)
    lengths_N = torch.full((num_rows,), num_tokens, dtype=torch.long, device=device)
    uniforms_NT = uniforms_NT.to(device)
    with record_function("rollout::prefill"):
        rows = _start_rows(forward, batch, device, room=num_tokens)
    for step in range(num_tokens):
        tokens_R, chosen_R = _choose(rows.logits_RV, sampling, uniforms_NT[rows.origin_R, step])
        ids_NT[rows.origin_R, step] = tokens_R
        logprobs_NT[rows.origin_R, step] = chosen_R
        ends_R = torch.isin(tokens_R, eos) & ~rows.finished_R
        lengths_N[rows.origin_R[ends_R]] = step + 1
        rows.finished_R = rows.finished_R | ends_R
        num_left = len(rows.finished_R) - int(rows.finished_R.sum())
        if step + 1 == num_tokens or num_left == 0:
            break
        if (len(rows.finished_R) - num_left) * LEAVE_AT >= len(rows.finished_R):
            tokens_R = tokens_R[~rows.finished_R]
            with record_function("rollout::finished rows leave"):
                _drop_finished(rows, room=num_tokens - step)
        with record_function("rollout::decode"):
            _advance(forward, rows, tokens_R)
    return Completions(ids_NT.cpu(), logprobs_NT.cpu(), lengths_N.cpu())


def _choose(logits_RV: Tensor, sampling: Sampling, uniforms_R: Tensor) -> tuple[Tensor, Tensor]:
    """The next token of every row and its log-probability."""
    tokens, chosen = [], []
    for logits_BV, uniforms_B in zip(logits_RV.split(CHOOSE_ROWS), uniforms_R.split(CHOOSE_ROWS), strict=True):
        logprobs_BV = sampling_logprobs(logits_BV, sampling)
        tokens_B = logprobs_BV.argmax(dim=-1) if sampling.temperature == 0 else draw_tokens(logprobs_BV, uniforms_B)
        tokens.append(tokens_B)
        chosen.append(logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1))
    return torch.cat(tokens), torch.cat(chosen)


def _advance(forward: LastLogits, rows: _Rows, tokens_R: Tensor) -> None:
    rows.mask_RC = torch.cat([rows.mask_RC, rows.mask_RC.new_ones(len(tokens_R), 1)], dim=1)
    rows.logits_RV = forward(tokens_R[:, None], rows.mask_RC, rows.positions_R[:, None], rows.cache)
    rows.positions_R = rows.positions_R + 1


def _drop_finished(rows: _Rows, *, room: int) -> None:
    """Finished rows leave, and columns that only they attended to. `logits_RV` is left as it is: it has been used."""
    stay = (~rows.finished_R).nonzero().squeeze(1)
    mask_RC = rows.mask_RC[stay]
    columns = mask_RC.any(dim=0).nonzero().squeeze(1)
    all_columns = len(columns) == mask_RC.shape[1]
    shrink(Take(rows.cache, stay, None if all_columns else columns), room=room)
    rows.mask_RC = mask_RC if all_columns else mask_RC[:, columns]
    rows.positions_R = rows.positions_R[stay]
    rows.origin_R = rows.origin_R[stay]
    rows.finished_R = rows.finished_R[stay]


def _start_rows(forward: LastLogits, batch: Batch, device: torch.device, *, room: int) -> _Rows:
    """Every prompt once through the model, then one row per sample."""
    prefix = _prefill_prefix(forward, batch, device) if batch.shared else None
    parts, logits, masks = [], [], []
    for chunk in batch.chunks:
        cache, logits_PV, mask_PC = _prefill_chunk(forward, chunk, batch.shared, prefix, device)
        copies = torch.tensor([len(group.rows) for group in chunk], device=device)
        rows = torch.arange(len(chunk), device=device).repeat_interleave(copies)
        parts.append(Take(cache, rows))
        logits.append(logits_PV[rows])
        masks.append(mask_PC[rows])
    width = max(mask.shape[1] for mask in masks)
    mask_NC = torch.cat([nn.functional.pad(mask, (width - mask.shape[1], 0)) for mask in masks])
    return _Rows(
        cache=join(parts, room=room),
        logits_RV=torch.cat(logits),
        mask_RC=mask_NC,
        positions_R=mask_NC.sum(dim=1),
        origin_R=torch.arange(len(mask_NC), device=device),
        finished_R=torch.zeros(len(mask_NC), dtype=torch.bool, device=device),
    )


def _prefill_prefix(forward: LastLogits, batch: Batch, device: torch.device) -> Cache:
    """Keys and values of the leading tokens that all prompts share: one row."""
    cache = new_cache(batch.shared)
    ids_1L = torch.tensor([batch.groups[0].ids[: batch.shared]], device=device)
    forward(ids_1L, torch.ones_like(ids_1L), torch.arange(batch.shared, device=device)[None], cache)
    return cache


def _prefill_chunk(
    forward: LastLogits, chunk: Sequence[Group], shared: int, prefix: Cache | None, device: torch.device
) -> tuple[Cache, Tensor, Tensor]:
    """Cache, next token's logits [P, V] and mask [P, C] of the chunk's prompts: shared columns, padding, own tokens."""
    width = max(len(group.ids) for group in chunk) - shared
    rests = [group.ids[shared:] for group in chunk]
    # Any id will do for padding: it is masked wherever it stands.
    ids_PL = torch.tensor([(0,) * (width - len(rest)) + rest for rest in rests], device=device)
    padding_P1 = torch.tensor([[width - len(rest)] for rest in rests], device=device)
    columns_1L = torch.arange(width, device=device)[None]
    mask_PL = (columns_1L >= padding_P1).long()
    mask_PC = nn.functional.pad(mask_PL, (shared, 0), value=1)
    positions_PL = (shared + columns_1L - padding_P1).clamp(min=0)
    if prefix is None:
        cache = new_cache(width)
    else:
        cache = join([Take(prefix, torch.zeros(len(chunk), dtype=torch.long, device=device))], room=width)
    return cache, forward(ids_PL, mask_PC, positions_PL, cache), mask_PC
