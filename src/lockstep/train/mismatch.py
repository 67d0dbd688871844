"""Trainer's and engine's log-probabilities of the same sampled tokens in; sums out that give every mismatch metric.

Sums add over micro-batches and ranks, and are divided only then: neither changes a metric. What they mean is in
`docs/verification.md`; the definitions are verl's, NeMo-RL's and TRL's. Only completion tokens are ever in the arrays ([N], see
`data.packing`), so nothing can leak in from a masked place; a token whose log-probability is not finite is counted apart.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from lockstep.dist import World, max_over_ranks, sum_over_ranks
from lockstep.train.losses import LOG_RATIO_LIMIT

_MAXIMA = ("diff_max", "ratio_max", "ratio_min_negated")


@dataclass(frozen=True, slots=True)
class MismatchSums:
    """p is the trainer's probability of a sampled token, q the engine's, r = p / q, d = log p - log q. Sums over tokens, float64."""

    count: float = 0.0
    num_broken: float = 0.0
    """Tokens left out, since one side's log-probability is not finite."""
    diff: float = 0.0
    """|p - q|"""
    diff2: float = 0.0
    p: float = 0.0
    q: float = 0.0
    pp: float = 0.0
    qq: float = 0.0
    pq: float = 0.0
    k1: float = 0.0
    """-d"""
    k3: float = 0.0
    """r - 1 - d"""
    ratio: float = 0.0
    """r; log r is held within +-20, so that one token cannot make it infinite."""
    ratio2: float = 0.0
    mult_error: float = 0.0
    """exp |d|"""
    diff_max: float = 0.0
    ratio_max: float = -math.inf
    ratio_min_negated: float = -math.inf

    def __add__(self, other: MismatchSums) -> MismatchSums:
        pairs = zip(fields(self), astuple(self), astuple(other), strict=True)
        return MismatchSums(*(max(a, b) if field.name in _MAXIMA else a + b for field, a, b in pairs))

    def metrics(self) -> dict[str, float]:
        """By name, of the tokens so far; none where there are none. The correlation is left out where p or q is constant."""
        n = self.count
        out = {"rollout_tokens_not_finite": self.num_broken}
        if n == 0:
            return out
        out |= {
            "rollout_probs_diff_mean": self.diff / n,
            "rollout_probs_diff_max": self.diff_max,
            "rollout_probs_diff_std": _spread(self.diff, self.diff2, n),
            "rollout_kl_k1": self.k1 / n,
            "rollout_kl_k3": self.k3 / n,
            "rollout_ratio_mean": self.ratio / n,
            "rollout_ratio_min": -self.ratio_min_negated,
            "rollout_ratio_max": self.ratio_max,
            "rollout_eff_sample_size": self.ratio**2 / (n * self.ratio2),
            "token_mult_prob_error": self.mult_error / n,
        }
        correlation = self._correlation()
        return out if correlation is None else out | {"rollout_actor_probs_pearson_corr": correlation}

    def _correlation(self) -> float | None:
        n = self.count
        var_p, var_q = self.pp - self.p**2 / n, self.qq - self.q**2 / n
        # Sums of float64 are exact to about 1e-16 of themselves: less spread than that is none.
        if min(var_p / max(self.pp, 1e-300), var_q / max(self.qq, 1e-300)) < 1e-12:
            return None
        return max(-1.0, min(1.0, (self.pq - self.p * self.q / n) / math.sqrt(var_p * var_q)))


def mismatch_sums(trainer_logprobs: Tensor, rollout_logprobs: Tensor) -> MismatchSums:
    """[N] each, of one dtype or another; detached here. One transfer from the device. Raises `ValueError` for unequal lengths."""
    if trainer_logprobs.shape != rollout_logprobs.shape or trainer_logprobs.ndim != 1:
        raise ValueError(
            f"expected two arrays [N] of equal length; {list(trainer_logprobs.shape)} (trainer) and "
            f"{list(rollout_logprobs.shape)} (rollout) came"
        )
    ours, theirs = trainer_logprobs.detach().double(), rollout_logprobs.detach().double()
    good = ours.isfinite() & theirs.isfinite()
    num_broken = ours.numel() - int(good.sum())
    if num_broken:
        ours, theirs = ours[good], theirs[good]
    if not ours.numel():
        return MismatchSums(num_broken=num_broken)
    d = (ours - theirs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    p, q, r = ours.exp(), theirs.exp(), d.exp()
    diff = (p - q).abs()
    rows = [diff, diff**2, p, q, p * p, q * q, p * q, theirs - ours, torch.expm1(d) - d, r, r * r, d.abs().exp()]
    sums = torch.stack([*(row.sum() for row in rows), diff.max(), r.max(), -r.min()]).tolist()
    return MismatchSums(float(ours.numel()), float(num_broken), *sums)


def mismatch_over_ranks(sums: MismatchSums, world: World) -> MismatchSums:
    """Collective. The sums of all ranks' tokens, on every rank."""
    names = [field.name for field in fields(sums)]
    added = [name for name in names if name not in _MAXIMA]
    totals = dict(zip(added, sum_over_ranks([getattr(sums, name) for name in added], world), strict=True))
    most = dict(zip(_MAXIMA, max_over_ranks([getattr(sums, name) for name in _MAXIMA], world), strict=True))
    return MismatchSums(**totals, **most)


def _spread(total: float, squares: float, n: float) -> float:
    """Standard deviation as torch.std takes it (n - 1 below); 0 of a single value, where torch has NaN."""
    return math.sqrt(max(squares - total**2 / n, 0.0) / (n - 1)) if n > 1 else 0.0
