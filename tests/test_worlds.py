"""Worlds of process groups: found again, with their own limits; of a part of the ranks; and who does not come is named."""

from __future__ import annotations

import time

import pytest
import torch

from lockstep.dist import World, sum_over_ranks
from lockstep.errors import LockstepError, RankMissing
from lockstep.sharding.attach import attach
from lockstep.testing import run_ranks
from lockstep.worlds import current_world


def check_limits(world: World) -> None:
    """The run's own world is found, and nobody else's limits become its own; a call's limit is that call's."""
    before = (world.agree_timeout_s, world.timeout_s)
    assert current_world(timeout_s=3) is world
    assert attach(torch.nn.Linear(2, 2), timeout_s=3).world is world
    assert (world.agree_timeout_s, world.timeout_s) == before == (20.0, 60)


def check_parts(world: World) -> None:
    """Half of the ranks are a world of their own, that the others need not know of; made once, with the first call's limit."""
    mine = (0, 1) if world.rank < 2 else (2, 3)
    half = current_world(ranks=mine, timeout_s=30)
    assert (half.rank, half.size, half.ranks, half.agree_timeout_s) == (world.rank % 2, 2, mine, 30)
    assert current_world(ranks=mine, timeout_s=3) is half and half.agree_timeout_s == 30
    assert sum_over_ranks([float(world.rank)], half) == [float(sum(mine))]
    assert [half.rank_of(rank) for rank in mine] == [0, 1]
    with pytest.raises(LockstepError, match=rf"rank {world.rank} holds a model .* without it"):
        current_world(ranks=[rank for rank in range(4) if rank not in mine])


def check_missing(world: World) -> None:
    """Rank 3 makes no world of these three, and leaves an `attach` of all to the others: within the call's limit, by name."""
    if world.rank == 3:
        return
    began = time.monotonic()
    if world.rank == 0:
        with pytest.raises(RankMissing, match=r"waited 1 s in 'joining' for ranks \[3\]"):
            current_world(ranks=(0, 3), timeout_s=1)
    with pytest.raises(RankMissing, match=r"limit 4 s"):
        attach(torch.nn.Linear(2, 2), timeout_s=4)
    assert time.monotonic() - began < 15  # the run's own limit is 20 s


def check_everything(world: World) -> None:
    check_limits(world)
    check_parts(world)
    check_missing(world)


def test_worlds_keep_their_limits():
    run_ranks(4, check_everything)


def test_without_a_process_group_there_is_one_rank():
    alone = current_world(timeout_s=7)
    assert (alone.rank, alone.size, alone.agree_timeout_s) == (0, 1, 7)
    assert sum_over_ranks([2.0], alone) == [2.0]
