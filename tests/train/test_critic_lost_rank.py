"""A rank that dies while a critic scores or learns: the other is told which, and in what, within seconds."""

import os
import time
from pathlib import Path

import pytest

from helpers_critic import config_of, critic_of, scored_samples
from lockstep.data.items import make_items
from lockstep.dist import World
from lockstep.errors import RankMissing
from lockstep.testing import collect_ranks, tiny_llama

SCORED = scored_samples(2, 2)


def loses_rank_1(world: World, folder: str, phase: str) -> float:
    """Seconds until rank 0 knows."""
    config = config_of(folder, {"kind": "model"}, sharding={"backend": "fsdp2"})
    critic = critic_of(world, config)
    mine = SCORED[2 * world.rank : 2 * world.rank + 2]
    dies_in = {"values": 1, "critic 0": 2}[phase]  # of the forward passes: estimate makes one, the update the next
    passes = 0
    values = critic.valuer.values

    def counted(*args):
        nonlocal passes
        passes += 1
        if world.rank == 1 and passes == dies_in:
            os._exit(3)
        return values(*args)

    critic.valuer.values = counted
    began = time.perf_counter()
    named = rf"rank 0 waited in '{phase}' for a rank that came too, .* one of: rank 1 \(last seen in '{phase}'\)"
    with pytest.raises(RankMissing, match=named):
        look = critic.estimate(mine)
        batch = make_items(mine, config.train, world, token_advantages=look.estimates.advantages)
        critic.update(batch.items, batch.places, look, step=0)
    return time.perf_counter() - began


@pytest.mark.parametrize("phase", ["values", "critic 0"])
def test_a_rank_that_dies_is_named_with_the_phase(tmp_path: Path, phase):
    folder = str(tmp_path / "model")
    tiny_llama().save_pretrained(folder)
    (knows, seconds), (finished, _) = collect_ranks(2, loses_rank_1, folder, phase, timeout_s=60)
    assert knows, seconds
    assert seconds < 20 and not finished
