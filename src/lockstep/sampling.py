"""Logits and a `Sampling` in; log-probabilities of the distribution that is sampled, and draws from it, out.

Engine and trainer both call `sampling_logprobs`, so a sampled token has one log-probability on both sides, whatever the
temperature, top-k and top-p are. The draws are counter-based: a row's numbers depend on its name only, never on the
batch, rank or order in which it was sampled.

Shape suffixes: B rows, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from lockstep.types import Draw, Sampling

COLDEST = 1e-5
"""The lowest temperature that is divided by; vLLM takes less for greedy."""
REACH_TOLERANCE = 1e-6
"""A nucleus has reached top_p when it comes this close: sums of fp32 probabilities are exact to no more."""
FIRST_NUCLEUS = 512
"""Tokens looked at before the whole vocabulary is sorted: sorting 64 x 49152 logits takes 0.23 s on one core, almost a
decode step of SmolLM2-135M (0.30 s); the 512 most likely take a tenth of that."""


def check_sampling(sampling: Sampling) -> None:
    """Raises `ValueError` naming the field that is out of range."""
    if not sampling.temperature >= 0 or sampling.temperature == float("inf"):
        raise ValueError(f"temperature must be a finite number >= 0 (0 is greedy); {sampling.temperature} came")
    if 0 < sampling.temperature < COLDEST:
        raise ValueError(
            f"temperature must be 0 (greedy) or at least {COLDEST:g}: logits divided by less overflow; {sampling.temperature} came"
        )
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1 (1 keeps all tokens); {sampling.top_p} came")
    if sampling.top_k < 0:
        raise ValueError(f"top_k must be 0 (keep all tokens) or more; {sampling.top_k} came")
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1; {sampling.max_new_tokens} came")


def sampling_logprobs(logits_BV: Tensor, sampling: Sampling, *, keep_B: Tensor | None = None) -> Tensor:
    """Log-probabilities [B, V], fp32, of the distribution that `sampling` draws from; masked tokens are -inf.

    In this order: divide by the temperature, keep the top k, keep the nucleus of what is left, renormalise. Tokens as
    likely as the last one kept are kept too, so the result does not depend on a sort's order. `keep_B` holds a token id
    per row that stays in whatever happens: a trainer whose logits differ in the last bit must not find a sampled token
    outside its mask. Temperature 0 gives the plain log-softmax. Never writes to its input; differentiable.
    """
    logits_BV = logits_BV.float()
    if sampling.temperature == 0:
        return torch.log_softmax(logits_BV, dim=-1)
    if sampling.temperature != 1:
        logits_BV = logits_BV / sampling.temperature
    if sampling.top_k > 0 or sampling.top_p < 1:
        kept_BV = _kept(logits_BV.detach(), sampling)
        if keep_B is not None:
            kept_BV = kept_BV.scatter(-1, keep_B[:, None], True)
        logits_BV = logits_BV.masked_fill(~kept_BV, float("-inf"))
    return torch.log_softmax(logits_BV, dim=-1)


def draw_rows(draw: Draw, num_prompts: int, num_samples: int) -> list[list[tuple[int, int]]]:
    """(slot, sample index) of every sample that a `generate` call wants of each of its prompts.

    Raises `ValueError` where `draw.rows` names not one sample per prompt, or one twice.
    """
    if not draw.rows:
        return [[(draw.first_slot + i, index) for index in range(num_samples)] for i in range(num_prompts)]
    if num_samples != 1 or len(draw.rows) != num_prompts:
        raise ValueError(
            f"expected a row for each of {num_prompts} prompts and one sample of each; {len(draw.rows)} rows and "
            f"num_samples {num_samples} came"
        )
    rows = [(slot, index) for slot, index in draw.rows]
    twice = [row for row, count in Counter(rows).items() if count > 1]
    if twice:
        raise ValueError(f"expected each row once; (slot, index) {twice[0]} came twice and would draw the same numbers")
    return [[row] for row in rows]


def row_uniforms(draw: Draw, slot: int, index: int, count: int) -> Tensor:
    """`count` float64 numbers in [0, 1) of sample `index` of `slot`: the same for any batch, rank, platform or order.

    Philox4x64 (Salmon et al., 2011) keyed by (seed, step), its counter started at (turn, slot, index). `slot` is the prompt's
    slot in the global batch (`draw.first_slot` is already in it). Only NumPy's raw bit stream is used, which NumPy
    promises to keep.
    """
    key = np.array([draw.seed % 2**64, draw.step % 2**64], dtype=np.uint64)
    counter = np.array([0, draw.turn, slot, index], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(count)
    return torch.from_numpy((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def slot_seed(draw: Draw, slot: int) -> int:
    """Seed for what a slot's environments draw: equal for the samples of a group, which begin alike."""
    entropy = [draw.seed % 2**64, draw.step % 2**64, slot, 0, 1]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed for what a rank draws while it trains a step (dropout): a resumed run draws what an uninterrupted one would."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def draw_tokens(logprobs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Token ids [B] by inverse CDF: the first token whose cumulative probability exceeds the row's uniform number.

    Cumulated in float64. A token of probability 0 adds nothing to the sum and is never the first to exceed it; a
    uniform below 1 times the row's own total stays below that total, so there always is a first. Only a row of NaNs has
    none: it gets the last id, whose log-probability is NaN too and tells the caller.
    """
    cdf_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    target_B1 = uniforms_B[:, None] * cdf_BV[:, -1:]
    return torch.searchsorted(cdf_BV, target_B1, right=True).squeeze(1).clamp(max=logprobs_BV.shape[1] - 1)


def _kept(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Boolean [B, V]: the tokens that top-k and then top-p leave in."""
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        kth_B1 = logits_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, float("-inf"))
    if sampling.top_p == 1:
        return logits_BV > float("-inf")
    return logits_BV >= _nucleus_floor(logits_BV, sampling.top_p)


def _nucleus_floor(logits_BV: Tensor, top_p: float) -> Tensor:
    """[B, 1]: the smallest logit in the smallest set of most likely tokens whose probability reaches `top_p`."""
    size = logits_BV.shape[-1]
    peak_B1 = logits_BV.amax(dim=-1, keepdim=True)
    total_B1 = (logits_BV - peak_B1).exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    enough = top_p - REACH_TOLERANCE
    for width in (min(FIRST_NUCLEUS, size), size):
        top_BK = logits_BV.topk(width, dim=-1).values
        reached_BK = (top_BK - peak_B1).double().exp().cumsum(dim=-1) / total_B1
        if width == size or bool((reached_BK[:, -1] >= enough).all()):
            break
    last_B1 = (reached_BK < enough).sum(dim=-1, keepdim=True).clamp(max=width - 1)
    return top_BK.gather(-1, last_B1)
