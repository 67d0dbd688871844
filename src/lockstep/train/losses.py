"""Per-token log-probabilities and advantages in; a sum of losses and sums of statistics out. Pure: no model, no ranks.

Only completion tokens are in the arrays ([N], see `data.packing`), so nothing is masked here and nothing can leak from a
masked place. Nothing is averaged here either: whoever knows the global count divides, so neither micro-batches nor ranks
change the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.types import Stat

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-this before exp: e^20 is out of every clip range, and finite."""


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    loss_sum: Tensor
    """Scalar, differentiable: the sum of token losses."""
    stats: dict[str, Stat]
    """Sums over tokens, with the number of tokens as count."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
) -> LossSums:
    """PPO's clipped surrogate, per token (arXiv 1707.06347, with DAPO's separate bounds, arXiv 2503.14476), plus k3 KL.

    All inputs are [N] fp32; only `logprobs` carries a gradient. loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    with r = exp(logprobs - old_logprobs), plus kl_coef * k3(reference). With `old_logprobs = logprobs.detach()` r is
    exactly 1 and the gradient is REINFORCE's.

    Stats: ratio; clip_low and clip_high (share of tokens whose gradient the lower or upper bound stops); approx_kl (k3
    of old to current); kl_ref, only where a reference is given.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    sums = {
        "ratio": ratio,
        "clip_low": (ratio < 1 - clip_low) & (advantages < 0),
        "clip_high": (ratio > 1 + clip_high) & (advantages > 0),
        "approx_kl": k3(old_logprobs, logprobs),
    }
    if ref_logprobs is not None:
        kl = k3(logprobs, ref_logprobs)
        loss = loss + kl_coef * kl
        sums["kl_ref"] = kl
    return LossSums(loss.sum(), token_stats(sums))


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """KL(p || q) per token sampled from p: q/p - log(q/p) - 1, with p `logprobs`, q `other` (Schulman, 2020). Never < 0."""
    log_ratio = (other - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(log_ratio) - log_ratio


def token_stats(values: dict[str, Tensor]) -> dict[str, Stat]:
    """Sum (in float64) and count of each [N] tensor; one transfer from the device for all of them."""
    totals = torch.stack([value.detach().sum(dtype=torch.float64) for value in values.values()]).tolist()
    return {name: Stat(total, value.numel()) for (name, value), total in zip(values.items(), totals, strict=True)}
