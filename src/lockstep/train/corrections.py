"""Log-probabilities of the rollout engine and of the trainer's old policy in; detached weights per token out. Pure.

The engine samples from nearly the policy it was given (other kernels, other dtype, older weights). The loss is corrected by
w = p_old / p_rollout, kept within bounds: by truncation (biased, smooth) or by leaving out what lies outside.

    TIS, IcePop, MIS: arXiv 2510.18855 (Ring-1T, two-sided masking); Yao et al., "Your efficient RL framework secretly
    brings you off-policy RL training" (2025); Liu et al., "When speed kills stability" (2025, masks, geometric mean, veto)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lockstep.config import CORRECTION_BOUNDS
from lockstep.data.sequences import Sequences
from lockstep.train.ratios import Level, log_ratio, log_ratio_at
from lockstep.types import Stat

Action = Literal["truncate", "mask", "reject"]
"""truncate: the ratio, cut to the bounds · mask: the ratio within the bounds, 0 outside · reject: 1 within, 0 outside."""


@dataclass(frozen=True, slots=True)
class Correction:
    """One rule. Several multiply: e.g. a sample's geometric ratio decides whether it counts, token ratios how much."""

    level: Level
    action: Action
    high: float
    """Largest ratio; inf: no bound."""
    low: float = 0.0
    """Smallest ratio; 0: no bound."""
    veto: float = 0.0
    """A sample with a token whose own ratio is below this is left out whole; 0: never. Usual: 1e-4."""

    def __post_init__(self) -> None:
        if self.level not in get_args(Level) or self.action not in get_args(Action):
            raise ValueError(
                f"expected a level of {', '.join(get_args(Level))} and an action of {', '.join(get_args(Action))}; {self} came"
            )
        if not (0 <= self.low <= self.high and self.high > 0 and 0 <= self.veto < math.inf):
            raise ValueError(f"expected 0 <= low <= high, high above 0, veto at least 0; {self} came")


def _named(name: str, level: Level, action: Action, *, veto: float = 0.0) -> Correction:
    low, high = CORRECTION_BOUNDS[name]
    return Correction(level, action, high, low, veto)


NAMED: Mapping[str, Correction] = {
    "token_tis": _named("token_tis", "token", "truncate"),
    "sequence_tis": _named("sequence_tis", "sequence", "truncate"),
    "sequence_mask": _named("sequence_mask", "sequence", "mask"),
    "icepop": _named("icepop", "token", "mask"),
    "geometric_reject": _named("geometric_reject", "geometric", "reject", veto=1e-4),
}
"""A recipe's, with its usual bounds; geometric ones are per token, hence so near 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """[N] each, detached."""

    weight: Tensor
    """Factor of the token's loss; 0 where left out."""
    keep: Tensor
    """bool: False where a mask, a rejection or a veto leaves the token out. Such a token adds nothing to the loss, neither
    to its KL nor its entropy; the denominators still count it."""
    stats: dict[str, Stat]


def correct(
    corrections: Sequence[Correction], old_logprobs_N: Tensor, rollout_logprobs_N: Tensor, sequences: Sequences
) -> Weights:
    """Weights of the tokens that the engine drew. `old_logprobs_N`: the trainer's own, of the policy that was sampled from
    (with one update per rollout: the current ones).

    Stats, over tokens that count: is_ratio (raw), is_weight, is_weight_squared, is_above and is_below (share of *raw*
    ratios out of bounds, at the rule's level), is_left_out; over samples: is_samples_left_out (every token left out).
    """
    old, rollout = old_logprobs_N.detach(), rollout_logprobs_N.detach()
    tokens = log_ratio_at("token", old, rollout, sequences)
    weight, keep = torch.ones_like(tokens), torch.ones_like(tokens, dtype=torch.bool)
    above, below = torch.zeros_like(keep), torch.zeros_like(keep)
    for rule in corrections:
        raw = log_ratio_at(rule.level, old, rollout, sequences).exp()
        over, under = raw > rule.high, raw < rule.low
        above, below = above | over, below | under
        weight = weight * _weight(rule, raw)
        if rule.action != "truncate":
            keep = keep & ~over & ~under
        if rule.veto > 0:
            # Of the ratios as they are: clamped ones never fall below a veto of less than e^-20.
            least = sequences.minima(log_ratio(old, rollout))
            keep = keep & sequences.spread(least >= math.log(rule.veto))
    weight = torch.where(keep, sequences.clean(weight), 0.0)
    return Weights(weight, keep, _stats(tokens.exp(), weight, keep, above, below, sequences))


def _weight(rule: Correction, raw: Tensor) -> Tensor:
    match rule.action:
        case "truncate":
            return raw.clamp(rule.low, rule.high)
        case "mask":
            return raw
        case "reject":
            return torch.ones_like(raw)


def _stats(
    raw: Tensor, weight: Tensor, keep: Tensor, above: Tensor, below: Tensor, sequences: Sequences
) -> dict[str, Stat]:
    per_token = {
        "is_ratio": raw,
        "is_weight": weight,
        "is_weight_squared": weight.square(),
        "is_above": above,
        "is_below": below,
        "is_left_out": ~keep,
    }
    real = sequences.counts > 0
    gone = real & (sequences.sums(keep.double()) == 0)
    sums = [sequences.clean(values.double()).sum() for values in per_token.values()]
    count, samples, left_out, *totals = torch.stack([sequences.counts.sum(), real.sum(), gone.sum(), *sums]).tolist()
    stats = {name: Stat(total, count) for name, total in zip(per_token, totals, strict=True)}
    return stats | {"is_samples_left_out": Stat(left_out, samples)}


def effective_share(stats: Mapping[str, Stat]) -> float:
    """(sum w)^2 / (n sum w^2) of summed stats, between 1/n and 1: how many equally weighted tokens these are worth, as a
    share of n (Kish). NaN where every weight is 0."""
    squares = stats["is_weight_squared"]
    return stats["is_weight"].total ** 2 / (squares.count * squares.total) if squares.total else float("nan")
