"""Two sets of log-probabilities per token in; probability ratios per token or per sample out. Pure; logs clamped before exp."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lockstep.data.sequences import Sequences

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-this before exp: e^20 is out of every clip range, and finite."""
FAR = 1e4
"""Log-ratios that no exp is taken of are clamped to +-this, which only infinities reach: a KL must pull however far the policy went."""

Level = Literal["token", "sequence", "geometric"]
"""token: each token's own ratio · sequence: the product over the sample's tokens, which grows with its length ·
geometric: the product's n-th root, n the sample's tokens, which does not."""


def in_full(values: Tensor) -> Tensor:
    """fp32 where it is bf16 or fp16, in which 1.004 follows 1 and a clip range of 3e-4 is none; else as it is."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """Raises `ValueError` for unequal shapes: [N] against [N, 1] would be [N, N]."""
    if logprobs.shape != other.shape:
        raise ValueError(f"expected two tensors of one shape; {list(logprobs.shape)} and {list(other.shape)} came")
    return in_full(logprobs) - in_full(other)


def clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(logprobs - other), exactly 1 where they are equal; no gradient beyond the clamp."""
    return clamped(log_ratio(logprobs, other)).exp()


def log_ratio_at(level: Level, logprobs_N: Tensor, other_N: Tensor, sequences: Sequences) -> Tensor:
    """[N] log-ratios at `level`, each token carrying its sample's; clamped, also token by token before they are summed,
    so that one token of probability 0 does not make a NaN of a sum."""
    tokens = clamped(log_ratio(sequences.clean(logprobs_N), sequences.clean(other_N)))
    match level:
        case "token":
            return tokens
        case "sequence":
            return clamped(sequences.spread(sequences.sums(tokens)))
        case "geometric":
            return sequences.spread(sequences.means(tokens))


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """Exactly `value` forward, the gradient of `gradient_of` backward."""
    return value.detach() + (gradient_of - gradient_of.detach())


def reweighted(value: Tensor, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """value * exp(logprobs - old_logprobs): its expectation under the old policy is value's under the current one, so the
    gradient through the sampling distribution (the score term) is in it too."""
    return value * ratio(logprobs, old_logprobs.detach())
