"""Scored samples of all ranks and a critic's values of their tokens in; advantages and returns per token out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from lockstep.data.advantages import WHITEN_EPS
from lockstep.data.gae import gae, outcome_rewards, squared_deviations, sum_and_count, whiten_tokens
from lockstep.data.masks import sampled, spread
from lockstep.data.sequences import Sequences
from lockstep.dist import World, sum_over_ranks
from lockstep.types import ScoredSample


@dataclass(frozen=True, slots=True, eq=False)
class Estimates:
    """One entry per sample of this rank, in the order that they came in."""

    advantages: list[tuple[float, ...]]
    """One per id, 0 at observations; mean 0 and variance 1 over all sampled tokens of all ranks."""
    returns: list[tuple[float, ...]]
    """One per id, 0 at observations: advantage before that normalisation, plus value."""


def estimate(
    scored: Sequence[ScoredSample],
    values: Sequence[Sequence[float]],
    world: World,
    *,
    gamma: float,
    lam: float,
    token_rewards: Sequence[Sequence[float]] | None = None,
) -> Estimates:
    """Collective. GAE (arXiv 1506.02438) over each sample's sampled tokens, whitened over all ranks' as PPO's code does.

    `values`: of the state before each sampled token. The sample's reward is its last sampled token's; `token_rewards` (one per id,
    `Actor.kl_rewards`) are added where they stand. A sample's end is an end also where it was cut at max_new_tokens: the
    reward functions judged it as it stands, and nothing would come after it. No bootstrap (verl and TRL likewise); what should
    not be learned from at all is left out by train.mask_truncated.
    """
    sequences = Sequences.of([each.sample.num_sampled for each in scored])
    rewards_N = outcome_rewards([each.reward for each in scored], sequences)
    if token_rewards is not None:
        masks = [each.sample.loss_mask for each in scored]
        rewards_N += _flat([sampled(each, mask) for each, mask in zip(token_rewards, masks, strict=True)])
    found = gae(rewards_N, _flat(values), sequences, gamma=gamma, lam=lam)
    total, count = sum_over_ranks(sum_and_count(found.advantages, sequences), world)
    mean = total / max(count, 1.0)
    (squares,) = sum_over_ranks([squared_deviations(found.advantages, sequences, mean=mean)], world)
    variance = squares / max(count - 1, 1.0)
    white_N = whiten_tokens(found.advantages, sequences, mean=mean, variance=variance, eps=WHITEN_EPS)
    return Estimates(_by_id(white_N, scored), _by_id(found.returns, scored))


def _flat(values: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(list(chain.from_iterable(values)), dtype=torch.float64)


def _by_id(values_N: Tensor, scored: Sequence[ScoredSample]) -> list[tuple[float, ...]]:
    parts = values_N.split([each.sample.num_sampled for each in scored])
    return [spread(part.tolist(), each.sample.loss_mask) for part, each in zip(parts, scored, strict=True)]
