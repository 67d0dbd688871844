"""Log-probabilities of sampled tokens under a policy p and a reference q in; estimates of KL(p || q) per token out. Pure.

Schulman, "Approximating KL divergence" (2020), for the three values. What they are worth as a *loss* is another question,
because the samples come from the p that is being trained: with x = log p - log q, and E over tokens drawn from p,

    k1 = x                   value unbiased; differentiated directly its expected gradient is 0: no effect at all
    k2 = x^2 / 2             value biased;   its expected gradient is that of KL(p || q)
    k3 = e^-x + x - 1        value unbiased, never < 0; its expected gradient is that of KL(q || p), the other direction

Weighted by exp(log p - log p_old), whose value on-policy is 1, any unbiased value gets its own right gradient
(DeepSeek-V3.2, arXiv 2512.02556, for k3). Where to put which: `KLKind`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lockstep.train.ratios import FAR, LOG_RATIO_LIMIT, log_ratio, reweighted, straight_through

KLKind = Literal["k1", "k2", "k3", "k3_k2", "k3_weighted"]
"""As a loss. k1: weighted, so value and gradient are KL(p || q)'s · k2: right gradient, value for small KL only · k3: the
field's usual one (its gradient is KL(q || p)'s) · k3_k2: k3's value with k2's gradient · k3_weighted: both right."""


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """log p - log q; finite also where one of them is 0."""
    return log_ratio(logprobs, other).clamp(-FAR, FAR)


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """(log p - log q)^2 / 2."""
    return 0.5 * k1(logprobs, other).square()


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """KL(p || q) per token sampled from p: q/p - log(q/p) - 1, with p `logprobs`, q `other`. Never < 0.

    Constant where q/p is above e^20. Not where p/q is: a token that the reference all but excludes is what a KL is there for.
    """
    log_q_p = log_ratio(other, logprobs).clamp(-FAR, LOG_RATIO_LIMIT)
    return torch.expm1(log_q_p) - log_q_p


def kl_loss(kind: KLKind, logprobs: Tensor, ref_logprobs: Tensor, *, old_logprobs: Tensor) -> Tensor:
    """[N] KL to the reference, to be summed into the loss; differentiable in `logprobs`.

    `old_logprobs` [N] are those of the policy that drew the tokens (`logprobs.detach()` with one update per rollout): the
    weighted kinds need them. Neither they nor the reference's get a gradient.
    """
    ref_logprobs = ref_logprobs.detach()
    match kind:
        case "k1":
            return reweighted(k1(logprobs, ref_logprobs), logprobs, old_logprobs)
        case "k2":
            return k2(logprobs, ref_logprobs)
        case "k3":
            return k3(logprobs, ref_logprobs)
        case "k3_k2":
            return straight_through(k3(logprobs, ref_logprobs), k2(logprobs, ref_logprobs))
        case "k3_weighted":
            return reweighted(k3(logprobs, ref_logprobs), logprobs, old_logprobs)
    raise ValueError(f"expected a KL of k1, k2, k3, k3_k2 or k3_weighted; {kind!r} came")


def kl_reward(kind: Literal["k1", "k2", "k3"], old_logprobs: Tensor, ref_logprobs: Tensor, *, coef: float) -> Tensor:
    """[N] detached token rewards -coef * KL (arXiv 2203.02155): the policy gradient does the rest, so k1 is right here."""
    values = {"k1": k1, "k2": k2, "k3": k3}[kind](old_logprobs.detach(), ref_logprobs.detach())
    return -coef * values
