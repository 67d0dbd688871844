"""A canary that goes on from a checkpoint: it judges by what version 0 was, also an engine that is wrong from the first check on."""

import copy
import json

import pytest

from helpers_rollout import make_engine
from helpers_sharded import save_model
from helpers_verify import answer, deliver, make_canary, make_trainer, probe_model, scaled, update
from lockstep.errors import CanaryFailed
from lockstep.testing import run_ranks


def best(words: str) -> str:
    return words.partition("Best explanation: ")[2].partition(", which leaves")[0].partition(" (this probe")[0]


def said(canary, engine, version: int) -> str:
    with pytest.raises(CanaryFailed) as caught:
        canary.check(answer(canary, engine, version=version), version=version)
    return str(caught.value)


def check_resumed(world, folder) -> dict[str, str]:
    """An adapter that was trained before (its version 0 is not the base), two updates, a checkpoint, and new canaries that go on."""
    model = probe_model()
    sharded = make_trainer(world, folder)
    update(sharded, seed=7, size=0.02)
    engine, canary = make_engine(model, eos_ids=()), make_canary(sharded)
    start = {name: sharded.local_flat(name).clone() for name, _ in sharded.trainable()}
    first = make_engine(model, eos_ids=())
    for version in range(3):
        if version:
            update(sharded, seed=version)
        deliver(sharded, engine, version)
        if not version:
            deliver(sharded, first, 0)
        canary.check(answer(canary, engine), version=version)
    saved = json.loads(json.dumps(canary.state()))
    now = {name: sharded.local_flat(name).clone() for name, _ in sharded.trainable()}

    def resumed(state=saved):
        """As a resumed run makes it: the start values are there before the checkpoint's are loaded."""
        other = make_canary(sharded)
        write(sharded, start)
        other.remember(0)
        write(sharded, now)
        if state is not None:
            other.restore(state)
        return other

    found = {"version 0": said(resumed(), first, 2)}
    found["adapter off"] = said(resumed(), make_engine(model, eos_ids=()), 2)
    with scaled(engine, lambda name, scale: 1.0):
        found["alpha lost"] = said(resumed(), engine, 2)
    half = make_engine(copy.deepcopy(model).half().float(), eos_ids=())
    deliver(sharded, half, 2)
    found["base in float16"] = said(resumed(), half, 2)
    anew = resumed(None).check(answer(canary, half, version=2), version=2)
    assert anew.metrics["canary/limit"] == 2e-3, "one that calibrates anew takes such an engine for a right one"

    going_on = resumed({**saved, "plain": {}})  # so that lost updates are looked for, and are evidence
    result = going_on.check(answer(canary, engine), version=2)
    assert result.metrics["canary/limit"] == 5e-5
    assert going_on.state()["sums"] == saved["sums"], "the same tokens of the same version are no further evidence"
    update(sharded, seed=3)
    deliver(sharded, engine, 3)
    going_on.check(answer(canary, engine), version=3)
    after = going_on.state()
    assert (after["num_checks"], after["last_checked"]) == (saved["num_checks"] + 2, 3)
    return found


def write(sharded, values) -> None:
    for name, value in values.items():
        sharded.write_local(name, value)


def test_a_fault_from_the_first_check_after_a_resume_on_is_named(tmp_path):
    for found in run_ranks(2, check_resumed, save_model(probe_model(), tmp_path)):
        for fault, words in found.items():
            assert best(words) == fault and "allowed 5e-05" in words, words
