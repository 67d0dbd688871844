"""A process group that somebody else started in; a `World` for all its ranks, or for some of them, out."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist

from lockstep.dist import World, joined
from lockstep.errors import LockstepError, RankMissing
from lockstep.rendezvous import whole_number


def current_world(
    *,
    ranks: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    timeout_s: float = 60.0,
) -> World:
    """The world of a process group that somebody else started: all its ranks, or these (ascending global ranks).

    Collective over those ranks the first time, when they make a gloo group for agreement (and one for tensors, unless
    `group` is one of exactly these ranks); later calls give the same object back, with the limits that it has: `timeout_s`
    is how long the first call waits for the others, and the limit of agreements on the world that it makes. A world from
    `dist.start` keeps the limits of its run. Without a process group: a world of one.
    Raises `RankMissing` naming the ranks that do not come within `timeout_s`, `LockstepError` on a rank outside of `ranks`.
    """
    if not dist.is_initialized():
        return World(device=device or torch.device("cpu"), agree_timeout_s=timeout_s)
    everyone = tuple(range(dist.get_world_size()))
    members = everyone if ranks is None else tuple(ranks)
    known = next((each for owner, each in joined if owner is dist.group.WORLD and _members(each) == members), None)
    if known is None:
        known = _join(members, group, device or torch.device("cpu"), timeout_s)
        joined.append((dist.group.WORLD, known))
    return known


def _members(world: World) -> tuple[int, ...]:
    return tuple(range(world.size)) if world.ranks is None else world.ranks


def _join(members: tuple[int, ...], group: dist.ProcessGroup | None, device: torch.device, timeout_s: float) -> World:
    me = dist.get_rank()
    if me not in members:
        raise LockstepError(f"rank {me} holds a model that is sharded over the ranks {list(members)}, without it")
    is_everyone = len(members) == dist.get_world_size()
    world = World(members.index(me), len(members), whole_number("LOCAL_RANK", me), device, timeout_s)
    world.ranks = None if is_everyone else members
    if world.size == 1:
        world.data = None if is_everyone else dist.group.WORLD  # never used: nothing travels
        return world
    name = "-".join(map(str, members)) if not is_everyone else "all"
    # torch has no public name for the store that the default group was made with (2.6 to 2.13 have this one).
    world.store = dist.PrefixStore(f"lockstep/{name}", dist.distributed_c10d._get_default_store())
    _wait_for(world, members, timeout_s)
    world.control = _new_group(members, "gloo", world.timeout_s)
    if not is_everyone:
        fits = group is not None and tuple(dist.get_process_group_ranks(group)) == members
        world.data = group if fits else _new_group(members, None, world.timeout_s)
    return world


def _new_group(members: tuple[int, ...], backend: str | None, timeout_s: float) -> dist.ProcessGroup:
    """Collective over the members only: other ranks need not know."""
    timeout = datetime.timedelta(seconds=timeout_s)
    made = dist.new_group(list(members), backend=backend, timeout=timeout, use_local_synchronization=True)
    return cast(dist.ProcessGroup, made)


def _wait_for(world: World, members: tuple[int, ...], timeout_s: float) -> None:
    """Making a group waits for every member, and cannot say for whom: so they meet in the store first."""
    assert world.store is not None
    keys = {rank: f"here/{rank}" for rank in members}
    world.store.set(keys[members[world.rank]], "yes")
    try:
        world.store.wait(list(keys.values()), datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [rank for rank, key in keys.items() if not world.store.check([key])]
        raise RankMissing(
            f"rank {members[world.rank]} waited {timeout_s:.0f} s in 'joining' for ranks {missing}: attach and shard are "
            f"collective, every one of the ranks {list(members)} calls them"
        ) from error
