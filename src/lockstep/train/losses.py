"""Per-token log-probabilities and advantages in; a sum of losses and sums of statistics out. Pure: no model, no ranks.

Nothing is averaged here: a loss is a sum over tokens, weighted within their sample only (`Aggregation`), and whoever knows
the global counts divides by `denominator`. So neither micro-batches nor ranks nor the order of samples change the gradient.
Masked tokens (`Sequences.mask`) are cleaned before any arithmetic: whatever stands there, inf and NaN included, reaches
neither the loss nor a gradient nor a statistic.

    surrogate      logprobs, old logprobs, advantages -> [N] token losses       (Clip | GSPO | CISPO)
    actor_loss     surrogate * correction weights + coef * KL - coef * entropy + coef * divergence (from a teacher) -> LossSums
    policy_loss    the plain case in one call: PPO's clip, token sums
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lockstep.data.sequences import Sequences
from lockstep.train.corrections import Weights
from lockstep.train.kl import KLKind, k3, kl_loss
from lockstep.train.ratios import LOG_RATIO_LIMIT, clamped, in_full, straight_through
from lockstep.types import Stat

__all__ = [
    "CISPO", "GSPO", "LOG_RATIO_LIMIT", "Aggregation", "Clip", "KLTerm", "LossSums", "Surrogate", "TokenInputs",
    "actor_loss", "aggregate", "denominator", "k3", "policy_loss", "surrogate", "token_stats",
]  # fmt: skip

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length"]
"""token_mean: all tokens of the batch weigh the same (DAPO, arXiv 2503.14476) · seq_mean_token_mean: all samples do (GRPO,
arXiv 2402.03300; GSPO) · seq_mean_token_sum: tokens summed within a sample (REINFORCE, RLOO) · constant_length: that over
a length that does not depend on the samples (Dr.GRPO, arXiv 2503.20783)."""


@dataclass(frozen=True, slots=True)
class Clip:
    """PPO's clipped surrogate (arXiv 1707.06347), with DAPO's separate bounds: -min(r A, clip(r, 1 - low, 1 + high) A).

    `dual` (arXiv 1912.09729): where A < 0 the loss is at most -dual * A, so a ratio far above 1 has no gradient either.
    """

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None

    def __post_init__(self) -> None:
        if not (self.low >= 0 and self.high >= 0):
            raise ValueError(f"expected low and high at least 0; {self} came")
        if self.dual is not None and not self.dual > 1 + self.high:
            raise ValueError(f"dual must be above the clip range, 1 + high = {1 + self.high}; {self.dual} came")


@dataclass(frozen=True, slots=True)
class GSPO:
    """The clipped surrogate on a sample's ratio: the geometric mean of its tokens' (arXiv 2507.18071).

    sequence: r is the sample's, and so is its gradient · token: r has the sample's value and the token's gradient
    (GSPO-token, for advantages that differ within a sample; equal gradients where they do not).
    """

    low: float = 3e-4
    high: float = 4e-4
    gradient: Literal["sequence", "token"] = "sequence"

    def __post_init__(self) -> None:
        if self.gradient not in ("sequence", "token"):
            raise ValueError(f"expected a gradient of sequence or token; {self} came")
        if not (self.low >= 0 and self.high >= 0):
            raise ValueError(f"expected low and high at least 0; {self} came")


@dataclass(frozen=True, slots=True)
class CISPO:
    """-sg(clip(r, 1 - low, 1 + high)) A log p: the weight is clipped and has no gradient, so every token keeps one
    (MiniMax-M1, arXiv 2506.13585, which uses no lower bound: low = 1)."""

    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        if not (self.low >= 0 and self.high >= 0):
            raise ValueError(f"expected low and high at least 0; {self} came")


Surrogate = Clip | GSPO | CISPO


@dataclass(frozen=True, slots=True)
class KLTerm:
    kind: KLKind
    coef: float


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """What is known of a micro-batch's tokens: [N] each. Gradients reach `logprobs`, `entropy` and `divergence` alone; bf16
    and fp16 are computed with in fp32."""

    logprobs: Tensor
    old_logprobs: Tensor
    """Of the policy that the ratio compares with; `logprobs.detach()` with one update per rollout (ratio exactly 1)."""
    advantages: Tensor
    sequences: Sequences
    ref_logprobs: Tensor | None = None
    """Of the reference; None: no KL."""
    entropy: Tensor | None = None
    """None: no entropy bonus, no entropy in the stats."""
    weights: Weights | None = None
    """Correction for the engine's mismatch; None: all weights 1."""
    divergence: Tensor | None = None
    """From a teacher, with a gradient; None: no teacher."""


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    loss_sum: Tensor
    """Scalar, differentiable: the (within its sample weighted) sum of token losses; divide by `denominator`."""
    stats: dict[str, Stat]
    """Sums over tokens, with the number of tokens as count."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """[N] each."""

    loss: Tensor
    sums: dict[str, Tensor]
    """For `token_stats`."""


def actor_loss(
    tokens: TokenInputs,
    kind: Surrogate,
    *,
    aggregation: Aggregation,
    kl: KLTerm | None = None,
    entropy_coef: float = 0.0,
    divergence_coef: float = 0.0,
) -> LossSums:
    """Sum over the micro-batch of surrogate * weight + kl.coef * KL - entropy_coef * entropy + divergence_coef * divergence,
    masked tokens left out.

    Stats, as sums and counts of tokens that count: pg_loss; ratio; clip_low, clip_high (share whose gradient that bound
    stops; for CISPO: whose weight it cuts); clip_dual with a dual clip; approx_kl (k3 of old to current); kl_ref (its k3
    value whatever the kind, so that runs compare), where a reference is given; entropy, where given; distill/kl, where a
    divergence is; the correction's.

    Raises `ValueError` if a coefficient is not 0 and its tensor is missing, the entropy has no gradient, or a tensor is not [N].
    """
    tokens = _clean(tokens)
    _check_terms(tokens, kl, entropy_coef)
    found = surrogate(kind, tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.sequences)
    loss, sums = found.loss, found.sums | {"approx_kl": k3(tokens.old_logprobs, tokens.logprobs)}
    if tokens.weights is not None:
        loss = loss * tokens.weights.weight
    sums["pg_loss"] = loss
    if tokens.ref_logprobs is not None:
        sums["kl_ref"] = k3(tokens.logprobs, tokens.ref_logprobs)
        if kl is not None and kl.coef != 0:
            loss = loss + kl.coef * kl_loss(
                kl.kind, tokens.logprobs, tokens.ref_logprobs, old_logprobs=tokens.old_logprobs
            )
    if tokens.entropy is not None:
        sums["entropy"] = tokens.entropy
        if entropy_coef != 0:
            loss = loss - entropy_coef * tokens.entropy
    if tokens.divergence is not None:
        sums["distill/kl"] = tokens.divergence
        loss = loss + divergence_coef * tokens.divergence
    if tokens.weights is not None:
        loss = torch.where(tokens.weights.keep, loss, 0.0)
    stats = token_stats(sums, tokens.sequences)
    return LossSums(
        aggregate(loss, tokens.sequences, aggregation), stats | (tokens.weights.stats if tokens.weights else {})
    )


def surrogate(
    kind: Surrogate, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Sequences
) -> TokenLosses:
    """[N] policy losses before any weight; the gradient of `logprobs` is minus the policy gradient. Inputs clean."""
    match kind:
        case Clip():
            return _clip(clamped(logprobs - old_logprobs).exp(), advantages, kind.low, kind.high, kind.dual)
        case GSPO():
            log_ratio = sequences.spread(sequences.means(logprobs - old_logprobs))
            if kind.gradient == "token":
                log_ratio = straight_through(log_ratio, logprobs)
            return _clip(clamped(log_ratio).exp(), advantages, kind.low, kind.high, None)
        case CISPO():
            return _cispo(kind, logprobs, old_logprobs, advantages)


def _clip(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> TokenLosses:
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    sums = {
        "ratio": ratio,
        "clip_low": (ratio < 1 - low) & (advantages < 0),
        "clip_high": (ratio > 1 + high) & (advantages > 0),
    }
    if dual is not None:
        worst = -dual * advantages
        sums["clip_dual"] = (advantages < 0) & (loss > worst)
        loss = torch.where(advantages < 0, torch.minimum(loss, worst), loss)
    return TokenLosses(loss, sums)


def _cispo(kind: CISPO, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> TokenLosses:
    ratio = clamped(logprobs - old_logprobs).detach().exp()
    loss = -ratio.clamp(1 - kind.low, 1 + kind.high) * advantages * logprobs
    return TokenLosses(loss, {"ratio": ratio, "clip_low": ratio < 1 - kind.low, "clip_high": ratio > 1 + kind.high})


def aggregate(loss_N: Tensor, sequences: Sequences, how: Aggregation) -> Tensor:
    """Scalar sum; within a sample weighted by 1 / its tokens for seq_mean_token_mean. Raises `ValueError` for an unknown `how`."""
    if how not in get_args(Aggregation):
        raise ValueError(f"expected one of {', '.join(get_args(Aggregation))}; {how!r} came")
    loss = sequences.clean(loss_N)
    if how == "seq_mean_token_mean":
        return sequences.means(loss).sum()
    return loss.sum()


def denominator(how: Aggregation, *, num_tokens: float, num_sequences: float, max_tokens: int) -> float:
    """What the sums of all micro-batches and ranks are divided by. At least 1, so that nothing to train on gives 0.

    `num_tokens` tokens that count and `num_sequences` samples with at least one of them, over the whole global batch;
    `max_tokens` the longest possible completion.
    """
    match how:
        case "token_mean":
            return max(float(num_tokens), 1.0)
        case "seq_mean_token_mean" | "seq_mean_token_sum":
            return max(float(num_sequences), 1.0)
        case "constant_length":
            return max(float(num_sequences) * max_tokens, 1.0)
    raise ValueError(f"expected one of {', '.join(get_args(Aggregation))}; {how!r} came")


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
    """PPO's clipped surrogate plus kl_coef * k3, summed over tokens; nothing masked. All inputs [N].

    With `old_logprobs = logprobs.detach()` the ratio is exactly 1 and the gradient is REINFORCE's. Stats as `actor_loss`,
    kl_ref only where a reference is given.
    """
    tokens = TokenInputs(
        logprobs, old_logprobs, advantages, Sequences.of([logprobs.numel()], device=logprobs.device), ref_logprobs
    )
    return actor_loss(tokens, Clip(clip_low, clip_high), aggregation="token_mean", kl=KLTerm("k3", kl_coef))


def token_stats(values: Mapping[str, Tensor], sequences: Sequences | None = None) -> dict[str, Stat]:
    """Sum (in float64) and count of each [N] tensor; one transfer from the device for all of them."""
    if not values:
        return {}
    clean = (lambda tensor: tensor) if sequences is None else sequences.clean
    totals = torch.stack([clean(tensor.detach()).sum(dtype=torch.float64) for tensor in values.values()])
    counts = totals.new_tensor([tensor.numel() for tensor in values.values()])
    if sequences is not None:
        counts = sequences.counts.sum().expand_as(totals)
    pairs = torch.stack([totals, counts], 1).tolist()
    return {name: Stat(total, count) for name, (total, count) in zip(values, pairs, strict=True)}


def _clean(tokens: TokenInputs) -> TokenInputs:
    """A ratio whose old log-probabilities move with the current ones would have no gradient at all: these are detached here."""

    def clean(tensor: Tensor) -> Tensor:
        return tokens.sequences.clean(in_full(tensor))

    def optional(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else clean(tensor)

    return TokenInputs(
        clean(tokens.logprobs),
        clean(tokens.old_logprobs.detach()),
        clean(tokens.advantages.detach()),
        tokens.sequences,
        optional(None if tokens.ref_logprobs is None else tokens.ref_logprobs.detach()),
        optional(tokens.entropy),
        tokens.weights,
        optional(tokens.divergence),
    )


def _check_terms(tokens: TokenInputs, kl: KLTerm | None, entropy_coef: float) -> None:
    if kl is not None and kl.coef != 0 and tokens.ref_logprobs is None:
        raise ValueError(f"a KL term of weight {kl.coef} needs the reference's log-probabilities; none came")
    if entropy_coef == 0:
        return
    if tokens.entropy is None:
        raise ValueError(f"an entropy bonus of weight {entropy_coef} needs the entropy; none came")
    if torch.is_grad_enabled() and not tokens.entropy.requires_grad:
        raise ValueError(f"an entropy bonus of weight {entropy_coef} needs an entropy with a gradient; it is detached")
