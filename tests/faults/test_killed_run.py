"""A whole run whose rank is killed in the middle of a sync: the other ends with a name, and resumed it equals one that never was."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers_loop import make_model_folder, recipe
from lockstep.config import build_config
from lockstep.errors import RankMissing
from lockstep.loop import train_in
from lockstep.rollout.hf import HFEngine
from lockstep.testing import collect_ranks, run_ranks

NUM_STEPS, KILLED_AT = 4, 3  # checkpoints after steps 2 and 4
# The canary compares with earlier versions, which a resumed run has not seen.
CLOCK = ("seconds.", "tokens_per_second.", "step_seconds", "canary/", "sync/")


def config(model: str, run: Path | str):
    sections = {"eval": {"before": False, "after": False}, "run": {"num_steps": NUM_STEPS}}
    return build_config(recipe(model, run, **sections))


def train(world, model, run, resume=False):
    train_in(world, config(model, run), resume=resume)


def train_until_killed(world, model, run):
    """Rank 1's engine has the new weights in place when its process is killed."""
    commit = HFEngine.commit

    def killed(self, digest):
        commit(self, digest)
        if world.rank == 1 and self.policy_version == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    HFEngine.commit = killed
    with pytest.raises(RankMissing) as caught:
        train(world, model, run)
    return str(caught.value)


def written(run: Path):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [{name: value for name, value in line.items() if not name.startswith(CLOCK)} for line in lines]
    return steps, load_file(run / "checkpoints" / f"step-{NUM_STEPS:06d}" / "adapter" / "adapter_model.safetensors")


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_run_killed_in_a_sync_is_resumed_and_equals_one_that_never_was(tmp_path):
    model = make_model_folder(tmp_path / "model")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_ranks(2, train, model, str(whole), timeout_s=150)
    (ok, said), (is_alive, _) = collect_ranks(2, train_until_killed, model, str(broken), timeout_s=150)
    assert ok and not is_alive, said
    assert "for rank 1" in said or "one of: rank 1" in said
    run_ranks(2, train, model, str(broken), True, timeout_s=150)
    (steps, left), (expected, right) = written(broken), written(whole)
    assert steps == expected and len(steps) == NUM_STEPS
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
