"""Scores of an engine's probe in; whether it serves the trainer's policy, what explains it if not, and the words for it, out. Pure.

*band* by dtypes of trainer and engine, how far log-probabilities may be apart (root mean square over the probe, nats): the measured
noise times `FACTOR`, but never below the floor (a lucky first probe) or above the ceiling (a broken first one).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lockstep.verify.evidence import FEWEST, Evidence, Fit, evidence, rms
from lockstep.verify.hypotheses import Hypothesis

FACTOR = 5.0
"""Rounding may grow this much over the first probe's, as a policy sharpens and other tokens are drawn."""
NEARER = 0.6
"""How much of the way to a lost update the engine must be: below that, unequal rounding alone can tip the scales over many checks."""
PARTIAL = 0.25
"""Part of an update whose loss is told where it is well above the noise (a wrong scale, some modules not bound)."""
ABOVE_NOISE = 5.0
SURE_OF_DRAW = 3.0
"""Log of the likelihood ratio of the probe's tokens from which on it is said which distribution they were drawn from (e^3 = 20)."""


@dataclass(frozen=True, slots=True)
class Band:
    """Allowed root mean square of log-probability differences, in nats."""

    floor: float
    ceiling: float
    exact: float
    """What a single log-probability is exact to at best."""


_BANDS = {"float32": Band(5e-5, 2e-3, 2e-6), "float16": Band(5e-3, 3e-2, 2e-4), "bfloat16": Band(4e-2, 1.5e-1, 2e-3)}


def band_of(trainer: str, engine: str) -> Band:
    """The coarser dtype decides. Raises `ValueError` for a dtype without a band."""
    for name in (trainer, engine):
        if name not in _BANDS:
            raise ValueError(f"no tolerance is known for {name!r}; known are {sorted(_BANDS)}: set canary.tolerance")
    return max(_BANDS[trainer], _BANDS[engine], key=lambda band: band.floor)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """One engine's probe: [N] log-probabilities of the same tokens."""

    engine: Tensor
    trainer: Tensor
    assumed: Mapping[str, Tensor]
    """By hypothesis."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What came out, for the worst engine."""

    fault: str | None
    """Why it is refused; None: it is not."""
    engine: int
    """Which engine this is about."""
    rms: float
    worst: float
    limit: float
    num_tokens: int
    noise: float
    """Largest root mean square of all engines: what calibrates."""
    sums: dict[str, Evidence] = field(default_factory=dict)
    """Evidence for each lost update, with that of earlier checks, by "<engine> <name>"."""
    fits: dict[str, Fit] = field(default_factory=dict)
    """Of this check alone."""
    effects: dict[str, float] = field(default_factory=dict)
    """What each lost update would change (rms, nats), on the engine where that is least."""

    def metrics(self) -> dict[str, float]:
        leads = {f"canary/lead/{name}": fit.lead for name, fit in self.fits.items()}
        return {
            "canary/logprob_rms": self.rms,
            "canary/logprob_max": self.worst,
            "canary/limit": self.limit,
            "canary/tokens": float(self.num_tokens),
            **leads,
        }


def limit_of(band: Band, noise: float | None) -> float:
    """`noise`: of the first check; None before it."""
    return band.ceiling if noise is None else min(max(FACTOR * noise, band.floor), band.ceiling)


def lasting(name: str) -> str:
    """The name under which evidence of a lost update adds up over checks: each has another previous version."""
    return "the previous version" if name.startswith("version") else name


def judge(tested: Sequence[Scores], *, band: Band, noise: float | None, before: Mapping[str, Evidence]) -> Judged:
    """The first engine with a fault, or the one that is furthest off. `noise`: calibrated; None before the first check."""
    limit = limit_of(band, noise)
    sizes = [rms(each.engine - each.trainer) for each in tested]
    sums, effects = dict(before), dict[str, float]()
    results = []
    for number, (each, size) in enumerate(zip(tested, sizes, strict=True)):
        fits, fault = {}, None
        for name, assumed in each.assumed.items():
            found = evidence(each.engine, each.trainer, assumed)
            short = lasting(name)
            key = f"{number} {short}"
            sums[key] = sums.get(key, Evidence()) + found
            fits[short] = found.fit(max(band.exact, noise or 0.0))
            effects[short] = min(fits[short].effect, effects.get(short, math.inf))
            fault = fault or _lost(
                short, fits[short], sums[key].fit(max(band.exact, noise or 0.0)), noise=noise or band.ceiling
            )
        if not size <= limit:
            fault = "its log-probabilities differ by more than rounding explains"
        worst = float((each.engine - each.trainer).abs().max()) if each.engine.numel() else 0.0
        results.append((fault, number, size, worst, each.engine.numel(), fits))
    chosen = next((each for each in results if each[0]), None) or max(results, key=lambda each: each[2])
    fault, number, size, worst, count, fits = chosen
    return Judged(fault, number, size, worst, limit, count, max(sizes), sums, fits, effects)


def _lost(name: str, now: Fit, summed: Fit, *, noise: float) -> str | None:
    for fit, when in ((now, ""), (summed, " over the checks so far")):
        if fit.share > NEARER and fit.explains_better:
            return f"it is nearer to {name} than to the trainer{when} ({_share(fit)} of the way)"
    is_partial = abs(now.share) > PARTIAL and abs(now.share) > 6 * now.error and now.support > FEWEST
    if is_partial and now.effect > ABOVE_NOISE * noise:
        return f"part of the update is not what it serves ({_share(now)} of the way to {name})"
    return None


def _share(fit: Fit) -> str:
    return f"{fit.share:.2f} +- {fit.error:.2g}"


@dataclass(frozen=True, slots=True)
class Explained:
    """The explanation that leaves least of the difference, if it leaves little."""

    best: Hypothesis | None
    residual: float
    """Root mean square that it (or the nearest one) leaves, in nats."""
    nearest: str
    alike: tuple[str, ...] = ()
    """Others that this probe cannot tell from it."""


def best_explanation(scores: Scores, suspects: Sequence[Hypothesis], *, exact: float) -> Explained:
    """Least residual; among equals the first. Explanations that only differ in what was drawn are told apart by the tokens."""
    left = {name: rms(scores.engine - assumed) for name, assumed in scores.assumed.items()}
    if not left:
        return Explained(None, rms(scores.engine - scores.trainer), "none")
    least = min(left.values())
    tied = [each for each in suspects if left[each.name] <= 1.1 * least + exact]
    best = next((each for each in tied if _was_drawn_so(each, scores)), tied[0])
    alike = tuple(each.name for each in tied if each is not best and not _is_told_apart(best, each, scores))
    if left[best.name] > 0.5 * rms(scores.engine - scores.trainer):
        return Explained(None, least, best.name)
    return Explained(best, least, best.name, alike)


def _was_drawn_so(hypothesis: Hypothesis, scores: Scores) -> bool:
    """Are the tokens likelier under it than under the trainer's distribution (where it says that they were drawn from it)?"""
    return hypothesis.is_drawn and float((scores.assumed[hypothesis.name] - scores.trainer).sum()) > 0


def _is_told_apart(best: Hypothesis, other: Hypothesis, scores: Scores) -> bool:
    """By the tokens, where one says that they were drawn from the distribution and the other that they were not."""
    return best.is_drawn != other.is_drawn and abs(float((scores.engine - scores.trainer).sum())) > SURE_OF_DRAW


def failure(judged: Judged, explained: Explained, *, version: int, engine: int | None) -> str:
    where = "the engine" if engine is None else f"rank {engine}'s engine"
    head = (
        f"canary at version {version}: {where} does not serve what the trainer has: {judged.fault}. Over {judged.num_tokens} tokens "
        f"log-probabilities differ by {judged.rms:.2g} (rms; allowed {judged.limit:.2g}), at most {judged.worst:.2g}. "
    )
    if explained.best is None:
        return (
            head
            + f"No known explanation fits; the nearest, {explained.nearest!r}, leaves {explained.residual:.2g}. Compare the "
            "engine's model, dtype, sampling options and adapter configuration with the trainer's"
        )
    also = f" (this probe cannot tell it from: {', '.join(explained.alike)})" if explained.alike else ""
    return (
        head
        + f"Best explanation: {explained.best.name}{also}, which leaves {explained.residual:.2g}: {explained.best.says}"
    )
