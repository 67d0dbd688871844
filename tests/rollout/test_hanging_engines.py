"""A server that answers no more in the middle of an update: what it costs is one limit of time, and nothing is served that is not known."""

import time

import pytest
from fake_sglang import FakeSglang
from fake_vllm import FakeVllm

from helpers_engines import changed, lora, run, send, sharp
from helpers_rollout import NumberTokenizer, digest_for, manifest_of
from lockstep.errors import EngineUnhealthy, StaleWeights
from lockstep.rollout.sglang import SglangEngine
from lockstep.rollout.vllm import VllmEngine
from lockstep.rollout.vllm_fleet import Fleet
from lockstep.testing_engines.model import ServedModel
from lockstep.transport import ends
from lockstep.types import Bucket


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_vllm_costs_one_limit_and_that_of_the_abort(monkeypatch, kind):
    """The abort, and asking what it serves now, cost whole limits too, once: three in all."""
    monkeypatch.setattr(ends, "ABORT_S", 0.1)
    with FakeVllm(ServedModel(sharp())) as server:
        fleet = Fleet.connect([server.url], model=None, token=None, request_timeout_s=3.0)
        engine = VllmEngine(fleet, tokenizer=NumberTokenizer(), eos_ids=(2,), request_timeout_s=3.0)
        hangs(server, engine, kind)
        assert not server.violations


def hangs(server, engine, kind):
    tensors, config = lora() if kind == "adapter" else (changed(), None)
    engine.begin(manifest_of(tensors, kind, version=1, config=config))
    for path in ("/collective_rpc", "/resume", "/v1/models"):
        for _ in range(9):
            server.faults.late(path)
    began = time.monotonic()
    with pytest.raises(EngineUnhealthy, match=r"the limit is 3 s") as caught:
        try:
            for item in tensors.items():
                engine.receive(Bucket((item,)))
            engine.commit(digest_for(tensors))
        finally:
            engine.abort("it does not answer")
    assert time.monotonic() - began < 5.5, caught.value
    with pytest.raises(StaleWeights, match="may serve anything: it left a call unanswered"):
        run(engine)
    server.faults.waiting.clear()
    send(engine, kind, 2)
    assert engine.policy_version == 2
    engine.close()


@pytest.mark.parametrize(("kind", "path"), [("adapter", "/load_lora_adapter"), ("merged", "/flush_cache")])
def test_sglang_costs_one_limit(tmp_path, kind, path):
    with FakeSglang(ServedModel(sharp())) as server:
        server.server_info["enable_lora"] = kind == "adapter"
        engine = SglangEngine.connect(
            server.url,
            token=None,
            tokenizer=NumberTokenizer(),
            eos_ids=(2,),
            dtype="float32",
            folder=tmp_path,
            request_timeout_s=2.0,
        )
        for _ in range(9):
            server.faults.late(path)
        began = time.monotonic()
        with pytest.raises(EngineUnhealthy, match=r"the limit is 2 s"):
            send(engine, kind)
        assert time.monotonic() - began < 3.8
