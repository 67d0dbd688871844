"""Scored samples of all ranks in, what the actor update trains on out: advantages by group, what has no gradient left out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lockstep.config import TrainConfig
from lockstep.data.advantages import WHITEN_EPS, advantages, uses_groups, zero_std_groups
from lockstep.data.masks import sampled, spread
from lockstep.dist import World, gather_texts, sum_over_ranks
from lockstep.types import ScoredSample, TrainItem


@dataclass(frozen=True, slots=True)
class ItemBatch:
    items: list[TrainItem]
    """This rank's."""
    places: list[int]
    """Of `items`, among the samples that were given."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The same on every rank: frac_reward_zero_std (share of groups whose samples all earn the same, before any KL);
    kl_reward (what a KL in the reward takes per token), where there is one."""


@dataclass(frozen=True, slots=True)
class _Gathered:
    """One entry per sample of the global batch."""

    raw: list[float]
    rewards: list[float]
    """With the sample's KL, where the recipe has it in the reward."""
    groups: list[int]
    lengths: list[int]
    """Tokens that the policy sampled."""
    start: int
    """Where this rank's samples begin."""


def make_items(
    scored: Sequence[ScoredSample],
    train: TrainConfig,
    world: World,
    *,
    token_rewards: Sequence[Sequence[float]] | None = None,
    token_advantages: Sequence[tuple[float, ...]] | None = None,
) -> ItemBatch:
    """Collective. Items for one update.

    Groups are found by slot, over all ranks: a group may be split, and what is normalised over the batch is normalised over
    the global one. `token_rewards`: one per id of each sample (`Actor.kl_rewards`); their sum counts as the sample's,
    but in reinforce_pp a token is credited with those that follow it. What stands at observation tokens counts nowhere.
    Leaves out groups without spread (`drop_zero_std`, where samples are compared within groups) and completions cut at
    max_new_tokens (`mask_truncated`): a sample left out still counts in its group's baseline.
    `token_advantages`: one per id of each sample, what a critic makes of both (`Critic.estimate`); gae needs it, and no other
    algorithm takes it. Raises `ValueError` where that is not so, and for a reward that is not finite.
    """
    if token_advantages is not None and train.algorithm != "gae":
        raise ValueError(f"token_advantages came, which train.algorithm gae alone takes; it is {train.algorithm}")
    mine = _gather(scored, token_rewards, world)
    by_token, values = token_advantages, [0.0] * len(mine.rewards)
    if train.algorithm == "gae":
        if token_advantages is None:
            raise ValueError("train.algorithm gae: expected token_advantages, which a critic makes; none came")
    elif train.algorithm == "reinforce_pp" and token_rewards is not None:
        by_token = _whitened_returns(scored, token_rewards, world)
    else:
        values = advantages(mine.rewards, mine.groups, algorithm=train.algorithm, lengths=mine.lengths)
    drops = train.drop_zero_std and train.algorithm != "gae" and uses_groups(train.algorithm)
    flat = zero_std_groups(mine.rewards, mine.groups) if drops else set()
    places = [
        index
        for index, item in enumerate(scored)
        if item.sample.slot not in flat and not (train.mask_truncated and item.sample.finish == "length")
    ]
    items = [
        TrainItem(
            sample.prompt.ids,
            sample.ids,
            sample.logprobs,
            values[mine.start + index],
            sample.slot,
            None if by_token is None else by_token[index],
            sample.loss_mask,
        )
        for index, sample in ((index, scored[index].sample) for index in places)
    ]
    return ItemBatch(items, places, _metrics(mine, with_kl=token_rewards is not None))


def _gather(scored: Sequence[ScoredSample], token_rewards: Sequence[Sequence[float]] | None, world: World) -> _Gathered:
    """Collective. JSON keeps a float64 to the last bit."""
    extra = [0.0] * len(scored)
    if token_rewards is not None:
        extra = [math.fsum(each) for each in _of_sampled(scored, token_rewards)]
    rows = [
        (item.reward, item.reward + more, item.sample.slot, item.sample.num_sampled)
        for item, more in zip(scored, extra, strict=True)
    ]
    parts = [json.loads(text) for text in gather_texts(world, json.dumps(rows), phase="advantages")]
    raw, rewards, groups, lengths = (
        zip(*(row for part in parts for row in part), strict=True) if any(parts) else [()] * 4
    )
    start = sum(len(part) for part in parts[: world.rank])
    return _Gathered(list(raw), list(rewards), list(groups), list(lengths), start)


def _whitened_returns(
    scored: Sequence[ScoredSample], token_rewards: Sequence[Sequence[float]], world: World
) -> list[tuple[float, ...]]:
    """Collective. REINFORCE++ with rewards per token (arXiv 2501.03262; discount 1): what is still to come, normalised
    over all tokens of the batch with the unbiased variance."""
    returns = [
        [item.reward + later for later in reversed(list(accumulate(reversed(each))))]
        for item, each in zip(scored, _of_sampled(scored, token_rewards), strict=True)
    ]
    flat = [value for each in returns for value in each]
    total, count = sum_over_ranks([math.fsum(flat), len(flat)], world)
    mean = total / max(count, 1.0)
    (squares,) = sum_over_ranks([math.fsum((value - mean) ** 2 for value in flat)], world)
    scale = 1 / math.sqrt(squares / max(count - 1, 1.0) + WHITEN_EPS)
    return [
        spread([(value - mean) * scale for value in each], item.sample.loss_mask)
        for item, each in zip(scored, returns, strict=True)
    ]


def _of_sampled(scored: Sequence[ScoredSample], token_rewards: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Without the places of observation tokens."""
    return [sampled(each, item.sample.loss_mask) for item, each in zip(scored, token_rewards, strict=True)]


def _metrics(gathered: _Gathered, *, with_kl: bool) -> dict[str, float]:
    groups = set(gathered.groups)
    metrics = {"frac_reward_zero_std": len(zero_std_groups(gathered.raw, gathered.groups)) / max(len(groups), 1)}
    if with_kl:
        lost = math.fsum(gathered.raw) - math.fsum(gathered.rewards)
        metrics["kl_reward"] = lost / max(sum(gathered.lengths), 1)
    return metrics
