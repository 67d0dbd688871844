"""SglangEngine against a fake server that generates for real and refuses every request that the API does not document."""

import json
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fake_sglang import FakeSglang

from helpers_engines import DRAW, LONG, SAMPLING, TOLERANCE, distance, lora, reference, run, send, sharp
from helpers_rollout import NumberTokenizer, digest_for, make_engine, make_prompts, manifest_of
from lockstep.errors import ConfigError, EngineDied, EngineMismatch, EngineUnhealthy, StaleWeights, TransportError
from lockstep.rollout.http import EngineRefused, HttpClient
from lockstep.rollout.sglang import SglangEngine
from lockstep.rollout.sglang_api import check_distribution, row_seed
from lockstep.rollout.sglang_server import SglangServer
from lockstep.testing_engines.model import ServedModel, TokenGate
from lockstep.types import Bucket, Draw, Sampling


@pytest.fixture
def server() -> Iterator[FakeSglang]:
    with FakeSglang(ServedModel(sharp())) as made:
        yield made
        assert made.violations == []


@pytest.fixture
def engine(server: FakeSglang, tmp_path: Path) -> SglangEngine:
    """Takes whole weights."""
    return connect(server, tmp_path)


@pytest.fixture
def adapters(server: FakeSglang, tmp_path: Path) -> SglangEngine:
    """Takes adapters."""
    server.server_info["enable_lora"] = True
    return connect(server, tmp_path)


def connect(server: FakeSglang, folder: Path | None, **more) -> SglangEngine:
    values = {"token": None, "dtype": "float32", "request_timeout_s": 20, **more}
    return SglangEngine.connect(server.url, tokenizer=NumberTokenizer(), eos_ids=(2,), folder=folder, **values)


def test_samples_are_those_of_the_distribution_in_the_promised_order(server, engine):
    samples = run(engine)
    assert [(sample.slot, sample.index) for sample in samples] == [(8, 0), (8, 1), (9, 0), (9, 1)]
    assert distance(samples, sharp()) < TOLERANCE
    assert {sample.policy_version for sample in samples} == {0}
    for sample in samples:
        assert sample.finish == ("stop" if sample.ids[-1] == 2 else "length") and 2 not in sample.ids[:-1]
        assert sample.text == NumberTokenizer().decode(sample.ids, skip_special_tokens=True)
    body = server.asked("/generate")[0]
    assert [params.stop_token_ids for params in body.sampling_params] == [[2]] * 4
    assert engine.eos_ids == (2,)


def test_eos_is_part_of_the_sample(engine):
    sampling = Sampling(temperature=1.0, max_new_tokens=40, eos_ids=tuple(range(10, 40)))
    samples = run(engine, sampling=sampling, num_samples=8)
    stopped = [sample for sample in samples if sample.finish == "stop"]
    assert stopped
    assert all(sample.ids[-1] in (2, *sampling.eos_ids) for sample in stopped)


def test_a_row_draws_the_same_in_any_batch(engine):
    prompts = make_prompts(LONG, [5, 6, 7], [9])
    together = run(engine, prompts)
    apart = [
        sample
        for place, prompt in enumerate(prompts)
        for sample in engine.generate([prompt], SAMPLING, num_samples=2, draw=Draw(5, 3, first_slot=8 + place))
    ]
    assert [sample.ids for sample in together] == [sample.ids for sample in apart]
    draw = replace(DRAW, rows=((10, 1), (8, 0)))
    some = engine.generate([prompts[2], prompts[0]], SAMPLING, num_samples=1, draw=draw)
    assert [(sample.slot, sample.index) for sample in some] == [(8, 0), (10, 1)]
    assert [sample.ids for sample in some] == [together[0].ids, together[5].ids]
    assert len({row_seed(DRAW, slot, index) for slot in range(50) for index in range(50)}) == 2500
    assert row_seed(DRAW, 8, 0) != row_seed(Draw(5, 4, 8), 8, 0) < 2**31
    assert row_seed(DRAW, 8, 0) != row_seed(replace(DRAW, turn=1), 8, 0)


def test_greedy(engine):
    sampling = Sampling(temperature=0, max_new_tokens=5)
    ours = [sample.ids for sample in run(engine, sampling=sampling, num_samples=1)]
    theirs = make_engine(sharp()).generate(make_prompts(LONG, [5, 6, 7]), sampling, num_samples=1, draw=DRAW)
    assert ours == [sample.ids for sample in theirs]


@pytest.mark.parametrize("kind", ["adapter", "merged", "full"])
def test_an_update_is_served_and_stamped(server, kind, tmp_path):
    """B28, B30: what is served changes with every update, cached prompts included, and so does the version."""
    server.server_info["enable_lora"] = kind == "adapter"
    engine = connect(server, tmp_path)
    before = run(engine)
    assert server.model.num_cached > 0
    for version in (1, 2):
        send(engine, kind, version, seed=version)
        samples = run(engine)
        assert engine.policy_version == version and {sample.policy_version for sample in samples} == {version}
        assert distance(samples, reference(kind, version)) < TOLERANCE, "old keys and values were used again"
        assert distance(before, reference(kind, version)) > 0.1, "the update is too small to tell"
    assert len(server.model.adapters) == (1 if kind == "adapter" else 0), "old adapters must go"
    assert list(tmp_path.iterdir()) == [], "staged files must go"


def test_the_way_of_whole_weights(server, engine):
    send(engine, "merged")
    paths = [request.path for request in server.requests if request.method == "POST"]
    assert paths == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/flush_cache",
        "/continue_generation",
        "/generate",
    ]


def test_names_of_adapters_are_never_used_twice(server, adapters):
    send(adapters, "adapter", version=1, seed=1)
    send(adapters, "adapter", version=1, seed=2)
    names = [body.lora_name for body in server.asked("/load_lora_adapter")]
    assert len(set(names)) == 2 and all(name.startswith("lockstep-adapter-1-") for name in names)
    assert distance(run(adapters), reference("adapter", 2)) < TOLERANCE


def test_a_server_with_lora_takes_adapters_only_and_one_without_whole_weights_only(server, tmp_path):
    for is_lora, kinds in ((True, {"adapter"}), (False, {"merged", "full"})):
        server.server_info["enable_lora"] = is_lora
        engine = connect(server, tmp_path)
        assert engine.abilities.kinds == kinds and engine.abilities.dtype == "float32" and engine.is_shared
        for kind in {"adapter", "merged", "full"} - kinds:
            with pytest.raises(TransportError, match=rf"updates, '{kind}' came; start it with"):
                send(engine, kind)
    assert engine.policy_version == 0 and len(run(engine)) == 4


def test_damaged_or_missing_tensors_leave_the_old_version(server, adapters):
    tensors, config = lora()
    manifest = manifest_of(tensors, "adapter", version=1, config=config)
    first, *others = tensors.items()
    adapters.begin(manifest)
    adapters.receive(Bucket((first,)))
    with pytest.raises(TransportError, match="never came"):
        adapters.commit(digest_for(dict([first])))
    adapters.begin(manifest)
    for item in [(first[0], first[1] + 1e-6), *others]:
        adapters.receive(Bucket((item,)))
    with pytest.raises(TransportError, match="holds other bytes"):
        adapters.commit(digest_for(tensors))
    with pytest.raises(TransportError, match="without a begin"):
        adapters.commit("")
    adapters.begin(manifest)
    with pytest.raises(TransportError, match="is open"):
        adapters.begin(manifest)
    adapters.abort("test")
    adapters.abort("again")
    assert server.asked("/load_lora_adapter") == []
    assert adapters.policy_version == 0 and distance(run(adapters), sharp()) < TOLERANCE


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("path", ["/load_lora_adapter", "/update_weight_version", "/generate"])
def test_an_adapter_that_fails_to_load_leaves_the_old_one(server, adapters, path, after):
    send(adapters, "adapter", 1, seed=1)
    server.faults.error(path, after=after)
    with pytest.raises(EngineUnhealthy, match="answered 500"):
        send(adapters, "adapter", 2, seed=2)
    samples = run(adapters)
    assert {sample.policy_version for sample in samples} == {1}
    assert distance(samples, reference("adapter", 1)) < TOLERANCE
    send(adapters, "adapter", 2, seed=2)
    assert distance(run(adapters), reference("adapter", 2)) < TOLERANCE
    assert len(server.model.adapters) == 1, "what a failed update loaded must go"


@pytest.mark.parametrize(
    "path",
    [
        "/pause_generation",
        "/update_weights_from_disk",
        "/flush_cache",
        "/continue_generation",
        "/model_info",
        "/generate",
    ],
)
def test_whole_weights_that_fail_half_way_are_not_served(server, engine, path):
    server.faults.error(path, after=True)
    with pytest.raises(EngineUnhealthy, match="answered 500"):
        send(engine, "merged", 1)
    with pytest.raises(StaleWeights, match="version 1 into the server failed half-way"):
        run(engine)
    send(engine, "merged", 2)
    assert distance(run(engine), reference("merged")) < TOLERANCE


def test_a_refused_load_is_told_in_the_servers_words(server, engine):
    server.faults.error("/update_weights_from_disk", 400, "shape mismatch in q_proj")
    with pytest.raises(TransportError, match=r"did not load the weights.*shape mismatch in q_proj"):
        send(engine, "merged")
    server.faults.error("/flush_cache", 400, "requests are running")
    with pytest.raises(TransportError, match="flush its cache"):
        send(engine, "merged")


def test_a_server_that_only_says_it_loaded(server, engine):
    server.ignores_load = True
    with pytest.raises(EngineMismatch, match="reports weights 'default' after it loaded"):
        send(engine, "merged")
    with pytest.raises(StaleWeights):
        run(engine)


def test_an_adapter_update_does_not_touch_requests_in_flight(server, adapters):
    send(adapters, "adapter", 1, seed=1)
    gate = server.model.gate = TokenGate(after=3)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, adapters, make_prompts([5, 6, 7]), SAMPLING, 1)
        assert gate.reached.wait(20)
        server.model.gate = None
        send(adapters, "adapter", 2, seed=2)
        assert adapters.policy_version == 2
        gate.release.set()
        (old,) = running.result(30)
    assert old.policy_version == 1 and distance([old], reference("adapter", 1)) < TOLERANCE
    send(adapters, "adapter", 3, seed=3)
    assert len(server.model.adapters) == 1, "the old adapter must go once its request has ended"


def test_whole_weights_wait_for_requests_in_flight(server, engine):
    gate = server.model.gate = TokenGate(after=3)
    paused = threading.Event()
    server.faults.call("/pause_generation", paused.set)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(run, engine, make_prompts([5, 6, 7]), SAMPLING, 1)
        assert gate.reached.wait(20)
        server.model.gate = None
        update = pool.submit(send, engine, "merged", 1)
        assert not paused.wait(1), "the server must not be paused before the request has ended"
        assert not update.done()
        gate.release.set()
        (old,) = running.result(30)
        update.result(30)
    assert old.policy_version == 0 and distance([old], sharp()) < TOLERANCE
    assert distance(run(engine), reference("merged")) < TOLERANCE


def test_a_drain_that_takes_too_long_leaves_the_old_weights(server, tmp_path):
    client = HttpClient(server.url, timeout_s=20)
    engine = SglangEngine(
        client, tokenizer=NumberTokenizer(), eos_ids=(2,), dtype="float32", folder=tmp_path, timeout_s=0.5
    )
    gate = server.model.gate = TokenGate(after=3)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, engine, make_prompts([5, 6, 7]), SAMPLING, 1)
        assert gate.reached.wait(20)
        with pytest.raises(EngineUnhealthy, match=r"1 requests did not end within 0\.5 s"):
            send(engine, "merged")
        gate.release.set()
        running.result(30)
    server.model.gate = None
    assert {sample.policy_version for sample in run(engine)} == {0}


def test_generation_that_fails(server, tmp_path):
    engine = connect(server, tmp_path, request_timeout_s=1)
    server.faults.error("/generate", 500, "scheduler hit an exception")
    with pytest.raises(EngineUnhealthy, match=r"/generate answered 500 .*scheduler hit an exception"):
        run(engine)
    server.faults.late("/generate")
    with pytest.raises(EngineUnhealthy, match=r"/generate: no complete answer after 1\.\d s, the limit is 1 s"):
        run(engine)
    server.faults.hang_up("/generate")
    assert len(run(engine)) == 4, "the draw is named by its seed: asking again is the same"


def test_requests_that_somebody_else_aborts_are_no_samples(server, engine):
    gate = server.model.gate = TokenGate(after=3)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(run, engine, make_prompts([5, 6, 7]), SAMPLING, 1)
        assert gate.reached.wait(20)
        pausing = pool.submit(HttpClient(server.url).post, "/pause_generation", {"mode": "abort"})
        server.model.wait_aborted(1)
        gate.release.set()
        with pytest.raises(EngineUnhealthy, match=r"ended a completion after 3 tokens with 'abort'"):
            running.result(30)
        pausing.result(30)
    server.model.resume()


def test_weights_that_somebody_else_replaced_are_noticed(server, engine):
    server.weight_version = "someone-elses"
    with pytest.raises(StaleWeights, match="answered with weights 'someone-elses', not 'default'"):
        run(engine)


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_other_ranks_see_what_was_committed(server, tmp_path, kind):
    server.server_info["enable_lora"] = kind == "adapter"
    engine = connect(server, tmp_path)
    handle = json.loads(json.dumps(engine.handle()))
    other = SglangEngine.attach(handle, tokenizer=NumberTokenizer(), eos_ids=(2,))
    for version in (1, 2):
        send(engine, kind, version, seed=version)
        other.saw(version)
        samples = run(other)
        assert {sample.policy_version for sample in samples} == {version}
        assert [s.ids for s in samples] == [s.ids for s in run(engine)]
    with pytest.raises(StaleWeights, match="version 3 was committed, but the server reports 'lockstep-"):
        other.saw(3)
    with pytest.raises(TransportError, match="only generates"):
        send(other, kind, 3)


def test_a_server_that_an_earlier_run_has_updated_needs_an_update_first(server, engine, tmp_path):
    send(engine, "merged", 7)
    later = connect(server, tmp_path)
    with pytest.raises(StaleWeights, match="weights of an earlier update"):
        run(later)
    send(later, "merged", 1, seed=2)
    assert distance(run(later), reference("merged", 2)) < TOLERANCE


@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, 0), (1.0, 20)])
def test_samplings_whose_logprobs_sglang_does_not_give_are_refused(server, engine, top_p, top_k):
    """B76: SGLang's log-probabilities are of the whole vocabulary."""
    with pytest.raises(EngineMismatch, match=r"leave top-p and top-k out.*rollout\.top_p: 1"):
        run(engine, sampling=Sampling(temperature=0.7, top_p=top_p, top_k=top_k))
    check_distribution(Sampling(temperature=0, top_p=top_p, top_k=top_k))  # greedy does not draw
    assert server.asked("/generate") == []


@pytest.mark.parametrize(
    ("info", "preferred", "words"),
    [
        ({"enable_deterministic_inference": False}, None, "--enable-deterministic-inference"),
        ({"speculative_algorithm": "EAGLE"}, None, "speculatively"),
        ({}, {"temperature": 0.3, "json_schema": "{}"}, r"preferred-sampling-params sets \['json_schema'\]"),
    ],
)
def test_servers_whose_samples_would_be_others_are_refused(server, tmp_path, info, preferred, words):
    server.server_info |= info
    server.preferred = preferred
    with pytest.raises(EngineMismatch, match=words):
        connect(server, tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"alpha_pattern": {"q_proj": 4}},
        {"bias": "lora_only"},
        {"peft_type": "IA3"},
    ],
)
def test_adapters_that_sglang_would_misread_are_refused(adapters, config):
    tensors, good = lora()
    with pytest.raises(TransportError, match=r"SGLang"):
        adapters.begin(manifest_of(tensors, "adapter", config={**good, **config}))
    adapters.begin(manifest_of(tensors, "adapter", config=good))
    adapters.abort("only to see that it begins")


def test_prompts_that_do_not_fit(server, tmp_path):
    engine = connect(server, tmp_path, model_max_len=44)
    with pytest.raises(ValueError, match="44 positions"):
        run(engine)
    with pytest.raises(ValueError, match="no tokens"):
        run(engine, make_prompts([]))
    with pytest.raises(ValueError, match="num_samples"):
        run(engine, num_samples=0)
    assert run(engine, []) == []


def test_the_token(tmp_path):
    with FakeSglang(ServedModel(sharp()), token="right") as server:
        assert len(run(connect(server, tmp_path, token="right"))) == 4
        for token in ("wrong", None):
            with pytest.raises(EngineRefused, match="answered 401"):
                connect(server, tmp_path, token=token)


def test_one_that_we_did_not_start_is_not_ours_to_restart(server, engine):
    with pytest.raises(EngineDied, match="lockstep did not start it"):
        engine.restart()
    engine.close()
    engine.close()
    assert HttpClient(server.url).get("/health_generate") == ""


def start(tmp_path: Path, script: str, **more) -> SglangEngine:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {script}\n")
    python.chmod(0o700)
    values = {"dtype": "float32", "start_timeout_s": 100, "request_timeout_s": 20, **more}
    server = SglangServer(python, tmp_path, tmp_path / "run", **values)
    return SglangEngine.start(server, tokenizer=NumberTokenizer(), eos_ids=(2,))


def test_a_server_that_dies_while_it_starts(tmp_path):
    with pytest.raises(EngineDied, match=r"(?s)exit status 3.*No module named sglang"):
        start(tmp_path, "sh -c 'echo No module named sglang >&2; exit 3'")


def test_a_server_for_others_to_reach_needs_a_token(tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.token_env"):
        start(tmp_path, "false", host="0.0.0.0")


def test_its_own_server_from_start_over_crash_to_end(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    (tmp_path / "config.json").write_text("{}")
    script = f'{sys.executable} {Path(__file__).parent / "fake_sglang_main.py"} "$@"'
    engine = start(tmp_path, script, token="secret", max_lora_rank=4, max_restarts=1)
    _, process = engine._owned
    try:
        config = tmp_path / "run" / "sglang.yaml"
        assert stat.S_IMODE(config.stat().st_mode) == 0o600 and "secret" in config.read_text()
        assert "secret" not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert "ORIGINAL_LOGPROB" not in Path(f"/proc/{process.pid}/environ").read_text()
        send(engine, "adapter", 1)
        before = run(engine)
        os.killpg(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"(?s)killed by SIGKILL.*ready to serve"):
            run(engine)
        engine.restart()
        assert engine.policy_version == 0
        with pytest.raises(StaleWeights, match="restarted and lost version 1"):
            run(engine)
        send(engine, "adapter", 2)
        after = run(engine)
        assert [sample.ids for sample in after] == [sample.ids for sample in before]
        assert {sample.policy_version for sample in after} == {2}
        process.stop()
        with pytest.raises(EngineDied, match="limit"):
            engine.restart()
    finally:
        engine.close()
    assert not process.is_alive()
