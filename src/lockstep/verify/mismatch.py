"""How far the engine's probabilities of its own samples are from the trainer's; an alarm when they look like two policies.

Both score the same tokens with the same weights, so all that may remain is rounding. More means that something is applied on
one side only: temperature, top-k or top-p, raw instead of processed log-probabilities (TRL #4159, NeMo-RL #902), other
weights, a penalty out of a generation_config. The sums and definitions are in `train/mismatch.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lockstep.errors import EngineMismatch
from lockstep.logs import ON_EVERY_RANK
from lockstep.train.mismatch import MismatchSums, mismatch_over_ranks, mismatch_sums

__all__ = ["MismatchSums", "check_metrics", "coarser", "mismatch_over_ranks", "mismatch_sums"]

log = logging.getLogger(__name__)

# Mean |dp| allowed. fp32 engines are measured at 1e-6 to 1e-5 here; bf16 ones, of another kernel, at 4e-3 to 7e-3. float16 has
# three bits more than bfloat16, so an eighth of that is expected of it; its limit leaves twice as much room.
LIMITS = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 8e-3}


@dataclass(frozen=True, slots=True)
class Alarm:
    """When a metric is told, and when it ends the run. None: never."""

    warn: float | None
    stop: float | None
    side: Literal["above", "below"] = "above"


_COMMON = {"rollout_tokens_not_finite": Alarm(None, 0.0)}
ALARMS: dict[str, dict[str, Alarm]] = {
    "float32": {
        **_COMMON,
        "rollout_probs_diff_mean": Alarm(1e-4, LIMITS["float32"]),
        "rollout_actor_probs_pearson_corr": Alarm(0.999, None, "below"),
        "rollout_kl_k3": Alarm(1e-4, None),
        "rollout_eff_sample_size": Alarm(0.99, None, "below"),
        "token_mult_prob_error": Alarm(1.02, 1.05),
    },
    "bfloat16": {
        **_COMMON,
        "rollout_probs_diff_mean": Alarm(1e-2, LIMITS["bfloat16"]),
        "rollout_actor_probs_pearson_corr": Alarm(0.99, None, "below"),
        "rollout_kl_k3": Alarm(1e-3, None),
        "rollout_eff_sample_size": Alarm(0.95, None, "below"),
        "token_mult_prob_error": Alarm(1.05, None),
    },
    "float16": {
        **_COMMON,
        "rollout_probs_diff_mean": Alarm(2e-3, LIMITS["float16"]),
        "rollout_actor_probs_pearson_corr": Alarm(0.999, None, "below"),
        "rollout_kl_k3": Alarm(2e-4, None),
        "rollout_eff_sample_size": Alarm(0.98, None, "below"),
        "token_mult_prob_error": Alarm(1.02, None),
    },
}
"""By the coarser dtype of trainer and engine. NeMo-RL's documentation: k3 below 1e-3; token_mult_prob_error above 1.02 look, above
1.05 stop (in 16 bits plain rounding reaches that: it is told only). A correlation below 0.99 has no source but our own runs."""


def coarser(*dtypes: str) -> str:
    """The key of `ALARMS` for a trainer and an engine that compute with `dtypes`: 16 bits on one side are 16 bits."""
    if set(dtypes) == {"float32"}:
        return "float32"
    return "float16" if set(dtypes) <= {"float32", "float16"} else "bfloat16"


def check_metrics(
    metrics: Mapping[str, float], *, dtype: str, dropout: float, step: int, changed: Mapping[str, Alarm] | None = None
) -> list[str]:
    """The warnings of a step, each logged; raises `EngineMismatch` for a metric beyond its stop.

    `metrics`: `MismatchSums.metrics()` over all ranks, so that the result is the same on every rank. `changed`: alarms instead of
    the default ones, by metric. With dropout the trainer's own probabilities are noisy while it trains, and nothing can be said.
    """
    if dropout > 0:
        return []
    said = []
    for name, alarm in {**ALARMS[dtype], **(changed or {})}.items():
        if name not in metrics:
            continue
        value = metrics[name]
        if _is_beyond(value, alarm.stop, alarm.side):
            raise EngineMismatch(
                f"step {step}: {name} is {value:.3g}, {alarm.side} {alarm.stop:g} (allowed with {dtype}): the engine does not sample "
                "from the policy that is trained. Look at rollout.temperature, top_p and top_k on both sides, and at what the "
                "engine says its log-probabilities are of"
            )
        if _is_beyond(value, alarm.warn, alarm.side):
            said.append(f"step {step}: {name} is {value:.3g}, {alarm.side} {alarm.warn:g}: look into it")
            log.warning(said[-1], extra=ON_EVERY_RANK)
    return said


def _is_beyond(value: float, limit: float | None, side: str) -> bool:
    """NaN is beyond every limit."""
    return limit is not None and not (value <= limit if side == "above" else value >= limit)
