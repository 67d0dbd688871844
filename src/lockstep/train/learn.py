"""A step's scored samples in; a critic, where there is one, and a policy that have learned from them out.

KL in the reward -> values and GAE -> advantages -> critic.update -> actor.update
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.config import TrainConfig
from lockstep.data.items import make_items
from lockstep.dist import World
from lockstep.sampling import step_seed
from lockstep.train.critic import Critic
from lockstep.train.step import Actor, UpdateResult
from lockstep.types import ScoredSample


@dataclass(frozen=True, slots=True)
class Learned:
    """The same on every rank, but for `num_tokens`."""

    update: UpdateResult
    """The policy's."""
    metrics: dict[str, float]
    """Of the advantages, and of the critic."""
    num_tokens: int
    """Prompt and completion tokens of this rank's items."""


def learn(
    scored: Sequence[ScoredSample],
    actor: Actor,
    critic: Critic | None,
    *,
    train: TrainConfig,
    world: World,
    seed: int,
    step: int,
) -> Learned:
    """Collective. Raises what the updates raise.

    While a critic is warmed up the policy gets nothing to train on: the step counts, and its weights stay.
    """
    kl_rewards = actor.kl_rewards([each.sample for each in scored])
    look = critic.estimate(scored, token_rewards=kl_rewards) if critic else None
    advantages = look.estimates.advantages if look else None
    batch = make_items(scored, train, world, token_rewards=kl_rewards, token_advantages=advantages)
    torch.manual_seed(step_seed(seed, step, world.rank))  # dropout
    items, metrics = batch.items, batch.metrics
    if critic is not None and look is not None:
        metrics = metrics | critic.update(batch.items, batch.places, look, step=step).metrics()
        items = [] if critic.trains_alone(step) else items
    update = actor.update(items, step=step)
    return Learned(update, metrics, sum(len(item.prompt_ids) + len(item.ids) for item in batch.items))
