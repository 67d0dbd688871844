"""How far the engine's probabilities of its own samples are from the trainer's; an error when they are two policies.

`rollout_probs_diff_mean` is the mean over response tokens of |p_trainer - p_engine| (verl's `calculate_debug_metrics`). Both
score the same tokens with the same weights, so all that may remain is rounding. More means that something is applied on
one side only: temperature, top-k or top-p, raw instead of processed log-probabilities (TRL #4159, NeMo-RL #902), other
weights, a penalty out of a generation_config.
"""

from __future__ import annotations

from lockstep.errors import EngineMismatch
from lockstep.types import Stat

# Mean |dp| allowed. fp32 engines are measured at 1e-6 to 1e-5 here; bf16 ones, of another kernel, at 4e-3 to 7e-3.
LIMITS = {"float32": 1e-3, "bfloat16": 3e-2}


def check_mismatch(update: dict[str, Stat], *, dtype: str, dropout: float, step: int) -> None:
    """Raises `EngineMismatch` if the engine did not sample from the policy that the trainer updates.

    `update` are the stats of the actor's update on the samples, over all ranks; the same result on every rank. With dropout
    the trainer's own probabilities are noisy while it trains, and nothing can be said.
    """
    gap = update["rollout_probs_diff_mean"]
    if dropout > 0 or not gap.count or gap.mean <= LIMITS[dtype]:
        return
    raise EngineMismatch(
        f"step {step}: the engine's probabilities of its own samples differ from the trainer's by {gap.mean:.2g} on average "
        f"(allowed with {dtype}: {LIMITS[dtype]:.0e}, largest {update['rollout_probs_diff_max'].mean:.2g}): it does not sample "
        "from the policy that is trained. Look at rollout.temperature, top_p and top_k on both sides, and at what the engine "
        "says its log-probabilities are of"
    )
