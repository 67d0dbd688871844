"""One vLLM for several ranks: handles, restarts and the canary on four; on two a whole run whose engine is gone for good.

The server is a fake in rank 0's process, which the others reach over HTTP by its handle.
"""

import json
from pathlib import Path

import pytest
import torch
from fake_vllm import BASE, FakeVllm

from helpers_loop import TIMES, make_model_folder, recipe
from helpers_rollout import NumberTokenizer, make_prompts
from helpers_sharded import save_model
from helpers_verify import make_canary, make_trainer, probe_model, update
from lockstep import assemble, dist
from lockstep.config import build_config
from lockstep.dist import World
from lockstep.errors import CanaryFailed, EngineDied, LockstepError, StaleWeights
from lockstep.export.what import AdapterExport
from lockstep.loop import train_in
from lockstep.model.load import load_whole
from lockstep.rollout.vllm import VllmEngine
from lockstep.rollout.vllm_client import HttpReplica
from lockstep.rollout.vllm_fleet import Fleet
from lockstep.serving import Serving
from lockstep.testing import run_ranks
from lockstep.testing_engines.model import ServedModel
from lockstep.types import Draw, Sampling

SAMPLING = Sampling(temperature=0.7, max_new_tokens=5)


class Owned:
    """Stands in for `OwnedServer`: a fake server, and a new one with the checkpoint's weights after each of `limit` restarts."""

    def __init__(self, make_model, *, limit: int):
        self._make_model, self._limit = make_model, limit
        self.num_restarts = 0
        self._start()

    def replica(self) -> HttpReplica:
        return HttpReplica(self.fake.url, model=BASE, request_timeout_s=30.0)

    def die(self) -> None:
        """Connections that are open are cut, and nobody listens any more."""
        for _, path in self.fake.routes:
            self.fake.faults.waiting[path] = [lambda handler: handler.reply_nothing(act_first=False)] * 1000
        self.fake.close()

    def restart(self) -> HttpReplica:
        if self.num_restarts >= self._limit:
            raise EngineDied(f"the engine was started again {self.num_restarts} times, the limit (engine.max_restarts)")
        self.num_restarts += 1
        self._start()
        return self.replica()

    def close(self) -> None:
        self.fake.close()

    def _start(self) -> None:
        self.fake = FakeVllm(ServedModel(self._make_model(), eos_ids=()))
        self.fake.__enter__()


def start(world: World, owned: Owned | None, tokenizer, eos_ids=()):
    """Collective. Rank 0's engine, the others' views of it, and how they get new ones."""
    engine = None
    if owned is not None:
        engine = VllmEngine(Fleet([owned.replica()], [owned]), tokenizer=tokenizer, eos_ids=eos_ids)
    text = json.dumps(engine.handle()) if engine is not None else ""
    handle = json.loads(dist.gather_texts(world, text, phase="handle")[0])

    def connect(handle):
        return VllmEngine.attach(handle, tokenizer=tokenizer)

    return engine or connect(handle), connect


def together(world: World) -> None:
    dist.gather_texts(world, "", phase="together")


def check_four(world: World, folder: str) -> dict:
    owned = Owned(probe_model, limit=1) if world.is_main else None
    engine, connect = start(world, owned, NumberTokenizer())
    sharded = make_trainer(world, folder)
    canary = make_canary(sharded, num_samples=2)
    how = {"export": AdapterExport(), "world": world, "bucket_bytes": 1 << 16, "canary": canary, "connect": connect}
    serving = Serving(engine, sharded, **how)
    prompts = make_prompts([5, 6, 7 + world.rank])

    def sample(version: int):
        draw = Draw(seed=3, step=version, first_slot=world.rank)
        return serving.generate(prompts, SAMPLING, num_samples=2, draw=draw)

    found = {}
    for version in range(2):
        update(sharded, seed=version, size=0.01 if version else 0.0)
        serving.sync(version)
    before = sample(1)
    assert {each.policy_version for each in before} == {1} and {each.slot for each in before} == {world.rank}
    urls = [serving.engine.fleet.replicas[0].url]

    if owned is not None:
        owned.die()
    together(world)
    assert sample(1) == before, "the restarted engine has the present weights, and draws the same"
    urls.append(serving.engine.fleet.replicas[0].url)
    found["urls"] = urls

    update(sharded, seed=2)
    if owned is not None:
        owned.fake.flags.drops_last_adapter = True
    with pytest.raises(CanaryFailed) as caught:
        serving.sync(2)
    found["canary"] = str(caught.value)
    with pytest.raises(StaleWeights, match="last sync did not succeed"):
        sample(2)
    if owned is not None:
        owned.fake.flags.drops_last_adapter = False
    together(world)
    found["sync"] = sorted(serving.sync(2).metrics)
    assert {each.policy_version for each in sample(2)} == {2}

    update(sharded, seed=3)
    if owned is not None:
        owned.die()
    together(world)
    with pytest.raises(EngineDied if world.is_main else LockstepError, match="started again 1 times, the limit"):
        serving.sync(3)
    together(world)  # nobody is out of step
    if owned is not None:
        assert not owned.fake.violations
    serving.engine.fleet._servers.clear()
    serving.close()
    return found


def test_four_ranks_share_an_engine_that_dies_and_one_that_lies(tmp_path):
    outcomes = run_ranks(4, check_four, save_model(probe_model(), tmp_path), timeout_s=150)
    first = outcomes[0]
    assert len(set(first["urls"])) == 2 and all(found["urls"] == first["urls"] for found in outcomes)
    assert "Best explanation: adapter off" in first["canary"] and "the engine does not serve" in first["canary"]
    assert all(found["canary"] == first["canary"] for found in outcomes)
    assert "canary/logprob_rms" in first["sync"]


NUM_STEPS, DIES_AT = 4, 3


def config(model: str, run: Path | str):
    tree = recipe(model, run, eval={"before": False, "after": False}, lora={"rank": 4, "alpha": 8, "dropout": 0.0})
    tree["run"]["num_steps"], tree["checkpoint"] = NUM_STEPS, {"every_steps": 10, "keep": 2}
    return build_config(tree)


def train_on_a_server(world: World, model: str, run: str, *, dies: bool, resume: bool) -> int:
    """Collective. A run over a server that may be started again once; it is gone from the rollout after `DIES_AT` steps on."""
    made: list[Owned] = []
    real = VllmEngine.generate

    def start_engine(config, files, tokenizer, world):
        if world.is_main:
            how = {"dtype": torch.float32, "attention": "sdpa", "device": world.device}
            made.append(Owned(lambda: load_whole(files, **how), limit=1))
        return start(world, made[0] if made else None, tokenizer, eos_ids=(tokenizer.eos_token_id,))

    def generate(self, prompts, sampling, *, num_samples, draw):
        if dies and made and draw.step == DIES_AT:
            made[0].die()
        return real(self, prompts, sampling, num_samples=num_samples, draw=draw)

    assemble.start_engine, VllmEngine.generate = start_engine, generate
    try:
        if dies:
            with pytest.raises(LockstepError, match="started again 1 times, the limit") as caught:
                train_in(world, config(model, run), resume=resume)
            assert "saved before the run ended" in caught.value.__notes__[0]
        else:
            train_in(world, config(model, run), resume=resume)
    finally:
        VllmEngine.generate = real
    return made[0].num_restarts if made else 0


def check_run(world: World, model: str, out: str) -> list[int]:
    whole = train_on_a_server(world, model, f"{out}/whole", dies=False, resume=False)
    broken = train_on_a_server(world, model, f"{out}/broken", dies=True, resume=False)
    saved = sorted(path.name for path in Path(out).glob("broken/checkpoints/step-*"))
    together(world)
    train_on_a_server(world, model, f"{out}/broken", dies=False, resume=True)
    return [whole, broken, saved]


def metrics(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


def test_a_run_whose_engine_is_gone_for_good_is_resumed_and_equals_one_that_never_was(tmp_path):
    """B72 too: the first rollout after the resume is of the checkpoint's weights, of an engine that had the base's."""
    model = make_model_folder(tmp_path / "model")
    outcomes = run_ranks(2, check_run, model, str(tmp_path), timeout_s=200)
    assert outcomes[0] == [0, 1, [f"step-{DIES_AT:06d}"]] and outcomes[1][2] == outcomes[0][2]
    steps = metrics(tmp_path / "whole")
    assert metrics(tmp_path / "broken") == steps and len(steps) == NUM_STEPS
    assert all(step["rollout_probs_diff_max"] < 1e-5 for step in steps)
