"""A block of a run that fails in; the same failure, with the steps so far saved before it ends the run, out.

An engine that is gone, an update that it refuses, a canary or a reward that fails: none of these touches the trainer's weights
or its optimizer. What must not be saved is a state that some rank cannot vouch for, and no rank may wait for one that does not
come. So the ranks first hold a *roll call* over the store (no collective: those who meet in one by accident would hang): each
says that it is here and that its values are finite, or why it takes no part. Only where all are here, and agree, they save.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lockstep.dist import World, announce
from lockstep.errors import RankMissing, RanksDisagree
from lockstep.sharding.base import ShardedModel

log = logging.getLogger(__name__)

ROLL_CALL_S = 5.0
"""How long a rank waits for the others to say that they end too. A failure is told to all ranks at once, so they come together."""
_KEY = "lockstep/rescue/{phases}/{rank}"
_HERE = "here"


@contextmanager
def rescued(
    sharded: ShardedModel,
    save: Sequence[Callable[[], object]],
    *,
    is_due: bool = True,
    critic: ShardedModel | None = None,
) -> Iterator[None]:
    """Where the block raises: save (the calls in turn, each collective), then raise what it raised.

    Collective where an error is every rank's, as those of `Serving` are; of one that is this rank's alone the others do not hear,
    and nothing is saved. What goes wrong while saving is logged and noted on the error: it never takes its place. `is_due`: there is
    something to save.
    """
    try:
        yield
    except Exception as error:
        if is_due:
            _save_before_end(error, [sharded, *([critic] if critic else [])], save)
        raise


def _save_before_end(error: Exception, trained: Sequence[ShardedModel], save: Sequence[Callable[[], object]]) -> None:
    try:
        reason = _roll_call(trained[0].world, _own_reason(error, trained))
        if not reason:
            for call in save:
                call()
    except Exception as second:
        reason = f"{type(second).__name__}: {second}"
    told = f"not saved before the run ended: {reason}" if reason else "saved before the run ended: go on with --resume"
    error.add_note(f"the steps since the last checkpoint were {told}")
    log.warning("the run ends with %s; the steps since the last checkpoint were %s", type(error).__name__, told)


def _own_reason(error: Exception, trained: Sequence[ShardedModel]) -> str:
    """Why this rank cannot take part; empty: it can. Not collective."""
    world = trained[0].world
    if world.is_torn or isinstance(error, RankMissing | RanksDisagree):
        return f"rank {world.rank} is out of step with the others ({type(error).__name__})"
    values = ((name, sharded.local_flat(name)) for sharded in trained for name, _ in sharded.trainable())
    odd = next((name for name, mine in values if not bool(mine.isfinite().all())), None)
    return f"{odd} has values that are not finite" if odd else ""


def _roll_call(world: World, reason: str) -> str:
    """The first rank's reason not to save; empty: every rank is here, and can. Waits `ROLL_CALL_S` at most.

    Ranks whose last phase is another one wait for other keys, and so never take each other for being here.
    """
    if world.size == 1:
        return reason
    if world.store is None:
        return "the ranks have no store in which to find out who is here"
    announce(
        world, "saving before the run ends"
    )  # a number of its own, so that no earlier roll call's answers are read
    keys = [_KEY.format(phases=world.num_phases, rank=rank) for rank in range(world.size)]
    world.store.set(keys[world.rank], reason or _HERE)
    if reason:
        return reason
    world.store.wait(keys, datetime.timedelta(seconds=min(ROLL_CALL_S, world.agree_timeout_s)))
    said = [world.store.get(key).decode() for key in keys]
    return next((text for text in said if text != _HERE), "")
