"""Real vLLM servers that die, that pack their weights, that report raw log-probabilities; and vLLM in process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import save_file

import helpers_vllm as h
from lockstep.errors import EngineDied, EngineMismatch, EngineUnhealthy, StaleWeights, TransportError
from lockstep.rollout.vllm import VllmEngine
from lockstep.rollout.vllm_client import RpcControl
from lockstep.rollout.vllm_fleet import Fleet, check_replica, describe
from lockstep.rollout.vllm_server import OwnedServer
from lockstep.transport.shm import ShmOutlet
from lockstep.types import Draw, Sample, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.real_model, pytest.mark.timeout(1200)]

SAMPLING = Sampling(max_new_tokens=8)


@pytest.fixture(scope="module")
def base():
    return h.reference()


def generate(engine):
    return engine.generate(h.prompts(2, 20), SAMPLING, num_samples=1, draw=Draw(1, 1))


def test_server_killed_in_the_middle_of_an_update_and_started_again(tmp_path, base):
    """Its engine process first, as the kernel does when memory is short; then all of it."""
    fleet = Fleet.start(h.a_server(tmp_path, max_restarts=2), 1)
    engine = VllmEngine(fleet, tokenizer=h.tokenizer(), eos_ids=(), request_timeout_s=60.0)
    new = h.changed(base, seed=1)
    tensors = h.weights_of(new)
    h.push_adapter(engine, h.with_adapter(base, seed=1), 1)
    for version, whole in ((2, False), (3, True)):
        engine.begin(h.manifest_of(version, "merged", tensors))
        engine.receive(h.buckets_of(tensors)[0])
        worker = fleet.replicas[0].call("describe", {})["pid"]
        group = fleet._servers[0].process.pid
        os.killpg(group, signal.SIGKILL) if whole else os.kill(worker, signal.SIGKILL)
        with pytest.raises((EngineDied, EngineUnhealthy)):
            for bucket in h.buckets_of(tensors)[1:]:
                engine.receive(bucket)
            engine.commit("0" * 64)
        engine.abort("the engine died")
        with pytest.raises((EngineDied, EngineUnhealthy, TransportError, RuntimeError)):
            generate(engine)
        assert not engine.is_alive()
        engine.restart()
        assert engine.policy_version == 0 and engine.is_alive()
        assert h.worst(base, generate(engine), SAMPLING) <= h.TOLERANCE
        h.push_weights(engine, new, version)
        samples = generate(engine)
        assert {sample.policy_version for sample in samples} == {version}
        assert h.worst(new, samples, SAMPLING) <= h.TOLERANCE
    engine.close()
    engine.close()


def test_two_replicas_one_of_which_is_killed_in_an_update(tmp_path, base):
    """Both serve version 1, then nothing is sampled until both serve version 2. Needs about 10 GB."""
    fleet = Fleet.start(h.a_server(tmp_path, max_restarts=1), 2)
    engine = VllmEngine(fleet, tokenizer=h.tokenizer(), eos_ids=(), request_timeout_s=60.0)
    old, new = (h.with_adapter(base, seed=seed) for seed in (1, 2))
    h.push_adapter(engine, old, 1)
    samples = generate(engine)
    assert {sample.slot for sample in samples} == {0, 1}, "each replica has drawn one"
    assert h.worst(old, samples, SAMPLING) <= h.TOLERANCE
    tensors = h.adapter_of(new)
    engine.begin(h.manifest_of(2, "adapter", tensors, h.config_of(new)))
    engine.receive(h.buckets_of(tensors)[0])
    os.killpg(fleet._servers[1].process.pid, signal.SIGKILL)
    with pytest.raises((EngineDied, EngineUnhealthy), match="on 1 of 2 replicas: replica 1: "):
        for bucket in h.buckets_of(tensors)[1:]:
            engine.receive(bucket)
        engine.commit("0" * 64)
    engine.abort("the replica died")
    with pytest.raises(StaleWeights, match="replica 1"):
        generate(engine)
    engine.restart()
    assert [server.process.num_restarts for server in fleet._servers] == [0, 1]
    h.push_adapter(engine, new, 2)
    samples = generate(engine)
    assert {sample.policy_version for sample in samples} == {2}
    assert h.worst(new, samples, SAMPLING) <= h.TOLERANCE
    engine.close()


def test_packed_weights_and_raw_logprobs_are_found_out(tmp_path, base):
    """A server as it would be without lockstep's switch: its weights cannot be written, and that is said before they are."""
    extension = ("--worker-extension-cls", "packing_worker.LockstepWorker", "--logprobs-mode", "raw_logprobs")
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    server = OwnedServer(h.a_server(tmp_path, args=extension, env=env))
    try:
        replica = server.start()
        with pytest.raises(EngineMismatch, match="processed_logprobs"):
            check_replica(replica)
        outlet = ShmOutlet(RpcControl(replica, "shm"))
        with pytest.raises(TransportError, match="packed"):
            h.push_weights(outlet, base, 1)
        assert describe(replica).stale is None
        outlet.close()
        replica.close()
    finally:
        server.close()


def test_server_that_does_not_start_is_quoted(tmp_path):
    with pytest.raises(EngineDied, match="--no-such-argument"):
        Fleet.start(h.a_server(tmp_path, args=("--no-such-argument",)), 1)


def test_vllm_in_this_process(tmp_path, base):
    peft, new = h.with_adapter(base, seed=2), h.changed(base, seed=3)
    save_file(h.adapter_of(peft), tmp_path / "adapter.safetensors")
    save_file(
        {name: tensor.contiguous() for name, tensor in h.weights_of(new).items()}, tmp_path / "merged.safetensors"
    )
    rows = h.prompts(2, 150)
    order = {"prompts": [row.ids for row in rows], "config": h.config_of(peft)}
    (tmp_path / "order.json").write_text(json.dumps(order))
    server = OwnedServer(h.a_server(tmp_path))
    env = server.server.environment(Path(server._package.name)) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [h.vllm_python(), Path(__file__).with_name("in_process.py"), h.smollm2(), tmp_path]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    server.close()
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    for model, version, rounds in zip((peft, new), (1, 2), results, strict=True):
        samples = [
            Sample(rows[slot], slot, 0, tuple(ids), tuple(logprobs), "", "length", seen)
            for slot, ids, logprobs, seen in rounds
        ]
        assert {sample.policy_version for sample in samples} == {version} and len(samples) == 4
        assert h.worst(model, samples, SAMPLING) <= h.TOLERANCE
