"""A run that the engine ends: the steps so far are saved first, and resumed they equal a run that was never ended."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from helpers_loop import TIMES, make_model_folder, recipe
from lockstep import checkpoint
from lockstep.config import build_config
from lockstep.data.rewards import RewardSet
from lockstep.dist import World
from lockstep.errors import CanaryFailed, EngineDied, LockstepError, RankMissing, RewardError, TransportError
from lockstep.loop import run_training, train_in
from lockstep.rescue import rescued
from lockstep.rollout.hf import HFEngine
from lockstep.testing import run_ranks
from lockstep.train.step import Actor

NUM_STEPS, FAILS_AT = 5, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def config(model: str, run: Path | str, /, **sections):
    """No checkpoint is due before the run's end."""
    tree = recipe(model, run, **{"eval": {"before": False, "after": False}, **sections})
    tree["run"]["num_steps"], tree["checkpoint"] = NUM_STEPS, {"every_steps": 10, "keep": 2}
    return build_config(tree)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    run_training(config(model, run), resume=False)
    return run


def metrics(run: Path) -> list[dict[str, float]]:
    """Without clocks, and without the bytes of a sync, which a sync that failed does not have."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith((*TIMES, "sync_bytes"))} for line in lines]


def adapter(run: Path, step: int = NUM_STEPS) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "adapter" / "adapter_model.safetensors")


def steps_saved(run: Path | str) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in Path(run).glob("checkpoints/step-*"))


def assert_equal(run: Path, whole: Path) -> None:
    assert metrics(run) == metrics(whole) and len(metrics(run)) == NUM_STEPS
    left, right = adapter(run), adapter(whole)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    left, right = (json.loads((each / "summary.json").read_text()) for each in (run, whole))
    assert left["reward"] == right["reward"]


def commit_fails(monkeypatch):
    def commit(self, digest):
        if self._update.manifest.version == FAILS_AT:
            raise TransportError("injected: the commit is refused")
        return real(self, digest)

    real = HFEngine.commit
    monkeypatch.setattr(HFEngine, "commit", commit)


def generate_dies(monkeypatch):
    def generate(self, prompts, sampling, *, num_samples, draw):
        if draw.step == FAILS_AT:  # the rollout after `FAILS_AT` steps
            raise EngineDied("injected: the engine is gone")
        return real(self, prompts, sampling, num_samples=num_samples, draw=draw)

    real = HFEngine.generate
    monkeypatch.setattr(HFEngine, "generate", generate)


def serves_the_base(monkeypatch):
    """From version `FAILS_AT` on the adapter that was committed does not act."""

    def commit(self, digest):
        real(self, digest)
        if self.policy_version >= FAILS_AT:
            for module in self._model.modules():
                if isinstance(getattr(module, "scaling", None), dict):
                    module.scaling["default"] = 0.0

    real = HFEngine.commit
    monkeypatch.setattr(HFEngine, "commit", commit)


def reward_fails(monkeypatch):
    def score(self, samples):
        if samples and samples[0].policy_version == FAILS_AT:
            raise RewardError("injected: the judge hangs")
        return real(self, samples)

    real = RewardSet.score
    monkeypatch.setattr(RewardSet, "score", score)


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (commit_fails, TransportError, "the commit is refused"),
        (generate_dies, EngineDied, "the engine is gone"),
        (serves_the_base, CanaryFailed, "Best explanation: adapter off"),
        (reward_fails, RewardError, "the judge hangs"),
    ],
)
def test_what_fails_beside_the_trainer_costs_no_step(model, whole, tmp_path, monkeypatch, fault, error, said):
    run = tmp_path / "run"
    with monkeypatch.context() as during:
        fault(during)
        with pytest.raises(error, match=said) as caught:
            run_training(config(model, run), resume=False)
    assert steps_saved(run) == [FAILS_AT]
    assert caught.value.__notes__ == [
        "the steps since the last checkpoint were saved before the run ended: go on with --resume"
    ]
    assert len(metrics(run)) == FAILS_AT, "the step of the failed sync is written down too"
    run_training(config(model, run), resume=True)
    assert_equal(run, whole)


def test_a_fault_that_is_there_from_the_first_sync_after_a_resume_is_named(model, whole, tmp_path, monkeypatch):
    """The canary does not calibrate itself anew on an engine that may be wrong already: it is judged by what version 0 was."""
    run = tmp_path / "run"
    with monkeypatch.context() as during:
        commit_fails(during)
        with pytest.raises(TransportError):
            run_training(config(model, run), resume=False)
    meta = json.loads((run / "checkpoints" / f"step-{FAILS_AT:06d}" / "files.json").read_text())
    assert 0 < meta["canary"]["noise"] < 1e-5 and meta["canary"]["last_checked"] == FAILS_AT - 1
    with monkeypatch.context() as during:
        serves_the_base(during)
        with pytest.raises(CanaryFailed, match=r"allowed 5e-05.*Best explanation: adapter off"):
            run_training(config(model, run), resume=True)
    assert steps_saved(run) == [FAILS_AT], "nothing was trained since"
    run_training(config(model, run), resume=True)
    assert_equal(run, whole)


def test_weights_that_are_not_finite_are_not_saved(model, tmp_path, monkeypatch):
    def update(self, items, *, step):
        result = real(self, items, step=step)
        if step == FAILS_AT - 1:
            name, _ = self.sharded.trainable()[0]
            self.sharded.write_local(name, torch.full_like(self.sharded.local_flat(name), torch.nan))
        return result

    real = Actor.update
    monkeypatch.setattr(Actor, "update", update)
    with pytest.raises(LockstepError) as caught:
        run_training(config(model, tmp_path / "run"), resume=False)
    assert "values that are not finite" in caught.value.__notes__[0] and not steps_saved(tmp_path / "run")


def test_an_update_that_fails_saves_nothing(model, tmp_path, monkeypatch):
    """The optimizer may have moved some of the weights: the state is of no step."""

    def update(self, items, *, step):
        if step == FAILS_AT:
            raise LockstepError("injected: the gradient is not finite")
        return real(self, items, step=step)

    real = Actor.update
    monkeypatch.setattr(Actor, "update", update)
    with pytest.raises(LockstepError, match="not finite"):
        run_training(config(model, tmp_path / "run"), resume=False)
    assert not steps_saved(tmp_path / "run")


def test_a_checkpoint_that_fails_too_does_not_hide_why_the_run_ends(model, tmp_path, monkeypatch):
    commit_fails(monkeypatch)

    def save(*args, **how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(TransportError, match="the commit is refused") as caught:
        run_training(config(model, tmp_path / "run"), resume=False)
    assert "not saved before the run ended: OSError: [Errno 28] No space left" in caught.value.__notes__[0]


def stand_in(world: World) -> SimpleNamespace:
    return SimpleNamespace(world=world, trainable=lambda: [("a", None)], local_flat=lambda name: torch.ones(2))


@pytest.mark.parametrize("error", [RankMissing("rank 1"), LockstepError("torn")])
def test_a_rank_that_is_out_of_step_saves_nothing(error):
    world = World(is_torn=not isinstance(error, RankMissing))
    saved = []
    with pytest.raises(type(error)), rescued(stand_in(world), [lambda: saved.append(1)]):
        raise error
    assert not saved and "out of step" in error.__notes__[0]


def test_a_critic_that_is_not_finite_is_not_saved_either():
    saved, critic = [], stand_in(World())
    with pytest.raises(LockstepError), rescued(stand_in(World()), [lambda: saved.append(1)], critic=critic):
        raise LockstepError("sound")
    critic.local_flat = lambda name: torch.tensor([torch.inf])
    with pytest.raises(LockstepError) as caught, rescued(stand_in(World()), [lambda: saved.append(2)], critic=critic):
        raise LockstepError("not sound")
    assert saved == [1] and "a has values that are not finite" in caught.value.__notes__[0]


def test_nothing_is_saved_where_nothing_is_due_or_somebody_interrupts():
    saved = []
    with pytest.raises(LockstepError), rescued(stand_in(World()), [lambda: saved.append(1)], is_due=False):
        raise LockstepError("the first sync fails")
    with pytest.raises(KeyboardInterrupt), rescued(stand_in(World()), [lambda: saved.append(1)]):
        raise KeyboardInterrupt
    assert not saved


def check_ranks(world: World, model: str, out: str) -> dict[str, list[int]]:
    """A failure of one rank that all are told of; one that the others do not hear of; one of a rank that holds other values."""
    found = {}
    train_in(world, config(model, f"{out}/two"), resume=False)
    real = HFEngine.commit

    def commit(self, digest):
        if world.rank == 1 and self._update.manifest.version == FAILS_AT:
            raise TransportError("injected: rank 1's commit is refused")
        return real(self, digest)

    HFEngine.commit = commit
    with pytest.raises(LockstepError, match="rank 1's commit"):
        train_in(world, config(model, f"{out}/all"), resume=False)
    HFEngine.commit = real
    train_in(world, config(model, f"{out}/all"), resume=True)
    found["all"] = steps_saved(f"{out}/all")
    sharded = stand_in(world)
    if world.is_main:
        sharded.local_flat = lambda name: torch.tensor([torch.nan])
    with pytest.raises(LockstepError) as caught, rescued(sharded, [lambda: found.setdefault("odd", [])]):
        raise LockstepError("every rank's")
    assert "a has values that are not finite" in caught.value.__notes__[0], caught.value.__notes__
    world.agree_timeout_s = 0.5
    if world.is_main:
        with pytest.raises(LockstepError) as caught, rescued(stand_in(world), [lambda: found.setdefault("alone", [])]):
            raise LockstepError("this rank's alone")
        assert "not saved before the run ended" in caught.value.__notes__[0]
    return found


def test_two_ranks_save_together_or_not_at_all(model, tmp_path):
    for found in run_ranks(2, check_ranks, model, str(tmp_path), timeout_s=150):
        assert found == {"all": [FAILS_AT, NUM_STEPS]}
    assert_equal(tmp_path / "all", tmp_path / "two")
