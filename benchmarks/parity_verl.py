"""A parity batch in; what verl's own functions, unmodified and from the released package, make of it, out."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

# Read at verl's first import.
os.environ.update(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="verl_cpu_platform", VERL_LOGGING_LEVEL="ERROR")

import numpy as np
import torch
from parity_batch import GROUPS, MAX_TOKENS, REWARDS, Batch, Result, with_gradients
from torch import Tensor
from verl.trainer.distillation.fsdp.losses import kl_divergence
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import ActorConfig

MODES = {
    "token_mean": "token-mean",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "constant_length": "seq-mean-token-sum-norm",
}


def outcome(batch: Batch, rewards: tuple[float, ...] = REWARDS) -> Tensor:
    """[B, T]: the reward at the last token, as verl's reward managers put it."""
    grid = torch.zeros_like(batch.mask)
    grid[torch.arange(len(rewards)), batch.mask.sum(1).long() - 1] = torch.tensor(rewards, dtype=torch.float64)
    return grid


def advantages(batch: Batch, estimator: str, *, groups: tuple[int, ...] = GROUPS, **arguments: Any) -> Result:
    """[N] by the registered estimator."""
    compute = core_algos.get_adv_estimator_fn(estimator)
    found, _ = compute(
        token_level_rewards=outcome(batch), response_mask=batch.mask, index=np.array(groups), **arguments
    )
    return Result(batch.unpadded(found))


def reinforce_pp(batch: Batch) -> Result:
    compute = core_algos.get_adv_estimator_fn("reinforce_plus_plus")
    config = SimpleNamespace(gamma=1.0)
    found, _ = compute(token_level_rewards=outcome(batch), response_mask=batch.mask, config=config)
    return Result(batch.unpadded(found))


def gae(batch: Batch, gamma: float, lam: float) -> tuple[Result, Result]:
    """Whitened advantages and returns, [N] each."""
    rewards, values = (batch.padded(batch.flat[name].detach()) for name in ("token_rewards", "old_values"))
    found, returns = core_algos.compute_gae_advantage_return(rewards, values, batch.mask, gamma, lam)
    return Result(batch.unpadded(found)), Result(batch.unpadded(returns))


def policy_loss(
    batch: Batch, name: str, aggregation: str, *, weights: Tensor | None = None, on_policy: bool = False, **config: Any
) -> Result:
    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=3,
        use_dynamic_bsz=True,
        global_batch_info={"loss_scale_factor": MAX_TOKENS if aggregation == "constant_length" else None},
        **config,
    )
    logprobs = batch.padded(batch.flat["logprobs"])
    old = logprobs.detach() if on_policy else batch.padded(batch.flat["old"])
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=old,
        log_prob=logprobs,
        advantages=batch.padded(batch.flat["advantages"]),
        response_mask=batch.mask,
        loss_agg_mode=MODES[aggregation],
        config=actor,
        rollout_is_weights=weights,
    )
    return with_gradients(batch, loss)


def value_loss(batch: Batch, clip: float) -> Result:
    values, old, returns = (batch.padded(batch.flat[name]) for name in ("values", "old_values", "token_rewards"))
    loss, _ = core_algos.compute_value_loss(values, returns, old, batch.mask, clip)
    return with_gradients(batch, loss)


def kl(batch: Batch, kind: str) -> Result:
    """Token mean of verl's KL penalty, as its actor adds it to the loss."""
    logprobs, ref = (batch.padded(batch.flat[name]) for name in ("logprobs", "ref"))
    return with_gradients(
        batch, core_algos.agg_loss(core_algos.kl_penalty(logprobs, ref, kind), batch.mask, "token-mean")
    )


def weights(batch: Batch, level: str, threshold: str | float) -> Result:
    found, _ = compute_rollout_correction_weights(log_ratio(batch), batch.mask, level, threshold)
    return Result(batch.unpadded(found))


def kept(batch: Batch, option: str, threshold: str) -> Result:
    found, _ = compute_rollout_rejection_mask(log_ratio(batch), batch.mask, option, threshold)
    return Result(batch.unpadded(found))


def log_ratio(batch: Batch) -> Tensor:
    return batch.padded(batch.flat["old"] - batch.flat["rollout"]).detach()


def topk_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """verl's sum of p (log p - log q) over the K tokens given."""
    return kl_divergence(log_q=log_q, log_p=log_p)
