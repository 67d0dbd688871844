"""Log-probabilities of an engine, of the trainer, and of the trainer under another assumption in; which explains better, out.

With d = engine - trainer and x = assumption - trainer, per token, d = a * x + noise: a = 0 says that the engine serves what the
trainer has, a = 1 that it serves what was assumed. Least squares over tokens gives a and its standard error (White, 1980: the
noise of a token may depend on the token). The two are told apart at a = 1/2 and not at 0: the trainer's own rounding is in d and
in x alike, so a tends to 1/2, and not to 0, where the assumption makes no difference at all.

Pure: no model, no ranks. Everything is in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SURE = 6.0
"""Standard errors between a and 1/2 from which on a check says so. A healthy engine is wrong by this much once in 1e9 checks of
normal noise; tokens of one sequence are not quite independent, so the margin is wide."""
FEWEST = 5.0
"""Tokens that must carry x: one token with a large error fits itself, whatever its error's estimate says."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What the regression of d on x says."""

    share: float
    """a: 0 is the trainer, 1 the assumption. NaN where x is 0 throughout: nothing can be said."""
    error: float
    """Its standard error; infinite where nothing can be said."""
    residual: float
    """Root mean square of d - x (nats): what the assumption leaves unexplained."""
    effect: float
    """Root mean square of x (nats): how much is at stake."""
    support: float
    """By how many equally weighted tokens x is carried: (sum x^2)^2 / sum x^4."""

    @property
    def lead(self) -> float:
        """Standard errors by which the assumption is nearer than the trainer (negative: the trainer is nearer)."""
        return (self.share - 0.5) / self.error if math.isfinite(self.error) else 0.0

    @property
    def explains_better(self) -> bool:
        return self.lead > SURE and self.support > FEWEST

    @property
    def is_ruled_out(self) -> bool:
        """Is it sure that the engine does not serve this? Otherwise the check had no power against it."""
        return self.lead < -SURE / 2


@dataclass(frozen=True, slots=True)
class Evidence:
    """Sums over tokens, which add over checks: a fault that lasts shows sooner or later, however small one update is."""

    num_tokens: int = 0
    xx: float = 0.0
    xd: float = 0.0
    dd: float = 0.0
    x2d2: float = 0.0
    x3d: float = 0.0
    x4: float = 0.0

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(
            self.num_tokens + other.num_tokens,
            self.xx + other.xx,
            self.xd + other.xd,
            self.dd + other.dd,
            self.x2d2 + other.x2d2,
            self.x3d + other.x3d,
            self.x4 + other.x4,
        )

    def fit(self, noise: float) -> Fit:
        """`noise`: what a token's log-probability is exact to (nats, rms); no residual counts as smaller."""
        n = max(self.num_tokens, 1)
        effect = math.sqrt(self.xx / n)
        residual = math.sqrt(max(self.dd - 2 * self.xd + self.xx, 0.0) / n)
        if self.xx <= n * (noise / 100) ** 2:
            return Fit(math.nan, math.inf, residual, effect, 0.0)
        share = self.xd / self.xx
        # sum of x^2 (d - a x)^2, with at least `noise` for d - a x
        spread = max(self.x2d2 - 2 * share * self.x3d + share**2 * self.x4, 0.0) + noise**2 * self.xx
        support = self.xx**2 / self.x4
        return Fit(share, math.sqrt(spread * n / max(n - 1, 1)) / self.xx, residual, effect, support)


def evidence(engine: Tensor, trainer: Tensor, assumed: Tensor) -> Evidence:
    """[N] each. Raises `ValueError` for unequal lengths."""
    if not engine.shape == trainer.shape == assumed.shape:
        raise ValueError(
            f"expected equal lengths; {list(engine.shape)}, {list(trainer.shape)}, {list(assumed.shape)} came"
        )
    d, x = engine.double() - trainer.double(), assumed.double() - trainer.double()
    sums = torch.stack([x * x, x * d, d * d, x * x * d * d, x**3 * d, x**4]).sum(1).tolist()
    return Evidence(engine.numel(), *sums)


def rms(values: Tensor) -> float:
    """Root mean square; 0 of nothing."""
    return math.sqrt(float(values.double().square().mean())) if values.numel() else 0.0
