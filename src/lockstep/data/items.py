"""Scored samples in, what the actor update trains on out: advantages by group, and what carries no gradient left out."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.config import TrainConfig
from lockstep.data.advantages import advantages, zero_std_groups
from lockstep.types import ScoredSample, TrainItem


def make_items(scored: Sequence[ScoredSample], train: TrainConfig) -> tuple[list[TrainItem], int]:
    """Items for one update, and the number of groups whose rewards are all equal (they carry no gradient).

    Groups are found by slot; a group must not be split over calls. Leaves out groups without spread (`drop_zero_std`)
    and completions cut at max_new_tokens (`mask_truncated`): a sample left out still counts in its group's baseline.
    """
    groups = [item.sample.slot for item in scored]
    rewards = [item.reward for item in scored]
    values = advantages(rewards, groups, algorithm=train.algorithm)
    zero = zero_std_groups(rewards, groups)
    items = [
        TrainItem(item.sample.prompt.ids, item.sample.ids, item.sample.logprobs, value, item.sample.slot)
        for item, value in zip(scored, values, strict=True)
        if not (train.drop_zero_std and item.sample.slot in zero)
        and not (train.mask_truncated and item.sample.finish == "length")
    ]
    return items, len(zero)
