"""Rewards and values per token in, advantages and returns per token out. Pure; float64; tokens that do not count skipped.

Tokens as in `Sequences`: [N], a sample's tokens behind each other. Observation tokens (masked) are not the policy's
actions: they have no value, no reward and no advantage, and the value of the next action is the value that comes next.
Statistics over a batch come in two parts, so that ranks can add them between: local sums, and what is done with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.data.sequences import Sequences


@dataclass(frozen=True, slots=True, eq=False)
class TokenAdvantages:
    """[N] float64 each, 0 where masked; not normalised."""

    advantages: Tensor
    returns: Tensor
    """advantages + values: what the critic is to predict."""


def gae(
    rewards_N: Tensor,
    values_N: Tensor,
    sequences: Sequences,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Sequence[float] | None = None,
) -> TokenAdvantages:
    """Generalised advantage estimation (arXiv 1506.02438): sums of (gamma lam)^k times the TD errors that follow.

    `bootstrap[s]` is the value of what follows sample s's last token: 0 where the episode ended there (terminal; the
    default), the critic's value of the state it was cut in where it would have gone on (truncated). gamma = lam = 1 with
    no critic (values 0) gives the reward still to come.
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"expected gamma and lam between 0 and 1; {gamma} and {lam} came")
    if bootstrap is not None and len(bootstrap) != sequences.num:
        raise ValueError(f"expected a bootstrap value per sample, {sequences.num}; {len(bootstrap)} came")
    rewards, values = (sequences.clean(tensor.detach().double()) for tensor in (rewards_N, values_N))
    after = [0.0] * sequences.num if bootstrap is None else list(bootstrap)
    next_value = rewards.new_tensor(after)
    running = torch.zeros_like(next_value)
    grids = [sequences.grid(tensor) for tensor in (rewards, values)]
    acts = sequences.grid(sequences.clean(torch.ones_like(rewards))) > 0
    columns = []
    for column in reversed(range(sequences.longest)):
        reward, value = (grid[:, column] for grid in grids)
        step = reward + gamma * next_value - value + gamma * lam * running
        running = torch.where(acts[:, column], step, running)
        next_value = torch.where(acts[:, column], value, next_value)
        columns.append(running)
    if not columns:
        return TokenAdvantages(rewards, rewards.clone())
    found = sequences.clean(torch.stack(columns[::-1], 1)[sequences.ids, sequences.columns])
    return TokenAdvantages(found, found + values)


def rewards_to_go(rewards_N: Tensor, sequences: Sequences, *, gamma: float = 1.0) -> Tensor:
    """[N] float64: discounted sum of a token's reward and those after it, which REINFORCE++ (arXiv 2501.03262) normalises."""
    return gae(rewards_N, torch.zeros_like(rewards_N), sequences, gamma=gamma).advantages


def outcome_rewards(rewards_S: Sequence[float], sequences: Sequences) -> Tensor:
    """[N] float64: each sample's reward at its last token that counts, 0 elsewhere; add token rewards (a KL) to it."""
    grid = sequences.grid(sequences.clean(torch.ones_like(sequences.ids, dtype=torch.float64)))
    last = grid.shape[1] - 1 - grid.flip(1).argmax(1) if sequences.longest else sequences.counts.long()
    reward = sequences.spread(grid.new_tensor(list(rewards_S)))
    return sequences.clean(torch.where(sequences.columns == sequences.spread(last), reward, 0.0))


def sum_and_count(values_N: Tensor, sequences: Sequences) -> tuple[float, float]:
    """This rank's part of a mean over tokens that count. Add both over ranks and micro-batches, then divide."""
    return float(sequences.clean(values_N.double()).sum()), float(sequences.counts.sum())


def squared_deviations(values_N: Tensor, sequences: Sequences, *, mean: float) -> float:
    """This rank's part of the variance around the *global* mean. Add over ranks, then divide by the count less one."""
    return float(sequences.clean((sequences.clean(values_N.double()) - mean).square()).sum())


def whiten_tokens(values_N: Tensor, sequences: Sequences, *, mean: float, variance: float, eps: float = 1e-8) -> Tensor:
    """[N] float64: (value - mean) / sqrt(variance + eps), 0 where masked."""
    return sequences.clean((sequences.clean(values_N.double()) - mean) / (variance + eps) ** 0.5)
