"""One real vLLM server, started by lockstep: what it samples, and every kind of update, against transformers and PEFT."""

from __future__ import annotations

import threading
import time

import pytest

import helpers_vllm as h
from lockstep.errors import StaleWeights, TransportError
from lockstep.rollout.http import EngineRefused, HttpClient
from lockstep.rollout.vllm import VllmEngine
from lockstep.rollout.vllm_client import Ask
from lockstep.rollout.vllm_fleet import Fleet
from lockstep.rollout.vllm_sampling import vllm_params
from lockstep.transport.inproc import push
from lockstep.types import Draw, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.real_model, pytest.mark.timeout(900)]

PLAIN = Sampling(max_new_tokens=12)
LONG = 150
"""Tokens of a prompt that fills a block of vLLM's prefix cache, which has 128 on a CPU."""


@pytest.fixture(scope="module")
def base():
    return h.reference()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    server = h.a_server(tmp_path_factory.mktemp("vllm"), token="open sesame")
    engine = VllmEngine(Fleet.start(server, 1), tokenizer=h.tokenizer(), eos_ids=(), request_timeout_s=300.0)
    yield engine
    engine.close()


@pytest.fixture
def fresh(engine, base):
    """The engine with the checkpoint's own weights again, whatever a test before left."""
    served = engine.fleet.served[0]
    if served.stale or served.adapter or not served.label.startswith(("default", "lockstep:0:")):
        h.push_weights(engine, base, 0, "full")
    return engine


def generate(engine, prompts, sampling=PLAIN, *, num_samples=2, step=1, first_slot=0):
    return engine.generate(prompts, sampling, num_samples=num_samples, draw=Draw(7, step, first_slot))


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        Sampling(temperature=0.7, top_k=50, top_p=0.9, max_new_tokens=12),
        Sampling(temperature=1.3, top_k=20, max_new_tokens=12),
        Sampling(temperature=0.0, max_new_tokens=12),
    ],
    ids=["plain", "all", "top_k", "greedy"],
)
def test_logprobs_are_those_of_the_sampling_distribution(fresh, base, sampling):
    samples = generate(fresh, h.prompts(3, 20), sampling)
    assert [(sample.slot, sample.index) for sample in samples] == [(s, i) for s in range(3) for i in range(2)]
    assert h.worst(base, samples, sampling) <= h.TOLERANCE


def test_draws_are_named_by_slot_and_index(fresh):
    rows = h.prompts(4, 20)
    whole = generate(fresh, rows)
    halves = generate(fresh, rows[:2]) + generate(fresh, rows[2:], first_slot=2)
    assert [sample.ids for sample in halves] == [sample.ids for sample in whole]
    assert len({sample.ids for sample in whole[:2]}) == 2
    assert [sample.ids for sample in generate(fresh, rows, step=2)] != [sample.ids for sample in whole]


def test_completion_ends_with_its_first_eos(fresh):
    row = h.prompts(1, 20)
    free = generate(fresh, row, num_samples=1)[0]
    eos = free.ids[4]
    (cut,) = generate(fresh, row, Sampling(max_new_tokens=12, eos_ids=(eos,)), num_samples=1)
    first = free.ids.index(eos)
    assert cut.ids == free.ids[: first + 1] and cut.finish == "stop" and free.finish == "length"
    assert len(cut.logprobs) == len(cut.ids)


ADAPTERS = {
    "plain": {},
    "alpha": {"lora_alpha": 48},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 4, "down_proj": 12},
        "alpha_pattern": {"k_proj": 40, "layers.3.mlp.up_proj": 1},
    },
    "some": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 5, 29]},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_is_served_as_peft_computes_it(fresh, base, name):
    peft = h.with_adapter(base, seed=1, **ADAPTERS[name])
    before = generate(fresh, h.prompts(2, 20))
    h.push_adapter(fresh, peft, 3)
    samples = generate(fresh, h.prompts(2, 20))
    assert fresh.policy_version == 3 and {sample.policy_version for sample in samples} == {3}
    assert h.worst(peft, samples, PLAIN) <= h.TOLERANCE
    assert h.worst(base, samples, PLAIN) > 100 * h.TOLERANCE
    assert [sample.ids for sample in samples] != [sample.ids for sample in before]


def test_wrong_scaling_would_be_seen(fresh, base):
    peft = h.with_adapter(base, seed=1)
    h.push_adapter(fresh, peft, 4, lora_alpha=32)
    assert h.worst(peft, generate(fresh, h.prompts(2, 20)), PLAIN) > 100 * h.TOLERANCE


def test_new_version_never_meets_the_old_ones_cache(fresh, base):
    rows = h.prompts(2, LONG)
    for version in (5, 6):
        peft = h.with_adapter(base, seed=version)
        h.push_adapter(fresh, peft, version)
        for _ in range(2):  # the second time from the cache
            samples = generate(fresh, rows, num_samples=1)
            assert {sample.policy_version for sample in samples} == {version}
            assert h.worst(peft, samples, PLAIN) <= h.TOLERANCE
    assert len(fresh.fleet.replicas[0].adapters()) == 1


REFUSED = {
    "dora": ({"use_dora": True}, "DoRA|use_dora"),
    "bias": ({"lora_bias": True}, "lora_bias"),
    "base bias": ({"bias": "all"}, "base weights"),
    "pissa": ({"init_lora_weights": "pissa"}, "base weights"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "tokens": ({"trainable_token_indices": [3, 4]}, "trainable_token_indices"),
    "rank said": ({"r": 4}, "rank 4"),
    "no lora": ({"peft_type": "IA3"}, "LORA"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapter_that_vllm_would_serve_otherwise_is_refused(fresh, base, name):
    changes, words = REFUSED[name]
    h.push_adapter(fresh, good := h.with_adapter(base, seed=2), 8)
    with pytest.raises(TransportError, match=words):
        h.push_adapter(fresh, good, 9, **changes)
    samples = generate(fresh, h.prompts(1, 20))
    assert {sample.policy_version for sample in samples} == {8}
    assert h.worst(good, samples, PLAIN) <= h.TOLERANCE


def test_adapter_of_too_high_a_rank_is_refused(fresh, base):
    with pytest.raises(TransportError, match="max_lora_rank"):
        h.push_adapter(fresh, h.with_adapter(base, seed=2, r=64), 9)


def test_adapter_of_another_dtype_is_refused(fresh, base):
    with pytest.raises(TransportError, match="nothing is cast"):
        h.push_adapter(fresh, h.with_adapter(base, seed=2).bfloat16(), 9)


def test_damaged_adapter_leaves_the_old_one(fresh, base):
    h.push_adapter(fresh, old := h.with_adapter(base, seed=3), 10)
    tensors = h.adapter_of(new := h.with_adapter(base, seed=4))
    manifest = h.manifest_of(11, "adapter", tensors, h.config_of(new))
    fresh.begin(manifest)
    for bucket in h.buckets_of(tensors):
        fresh.receive(bucket)
    with pytest.raises(TransportError, match="digest"):
        fresh.commit("0" * 64)
    samples = generate(fresh, h.prompts(1, 20))
    assert fresh.policy_version == 10 and h.worst(old, samples, PLAIN) <= h.TOLERANCE


def test_adapter_outlives_a_reload(fresh, base):
    """vLLM's reload_weights drops every adapter: the served one is loaded again, from the same bytes."""
    peft = h.with_adapter(base, seed=5)
    h.push_adapter(fresh, peft, 12)
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(h.smollm2())}}
    fresh.fleet.replicas[0].client.post("/collective_rpc", reload)
    assert h.worst(peft, generate(fresh, h.prompts(1, 20), step=3), PLAIN) <= h.TOLERANCE


@pytest.mark.parametrize("kind", ["merged", "full"])
def test_weights_are_replaced_whole(fresh, base, kind):
    """Every tensor moves: fused ones, norms, and the embedding, which is the head too."""
    rows = h.prompts(2, LONG)
    generate(fresh, rows)
    new = h.changed(base, seed=6)
    h.push_weights(fresh, new, 13, kind)
    samples = generate(fresh, rows)
    assert {sample.policy_version for sample in samples} == {13}
    assert h.worst(new, samples, PLAIN) <= h.TOLERANCE
    assert h.worst(base, samples, PLAIN) > 100 * h.TOLERANCE


def test_prefix_cache_would_be_stale(fresh, base):
    """The trap that the salt and the reset are for: new weights, the old salt, no reset."""
    replica, served = fresh.fleet.replicas[0], fresh.fleet.served[0]
    (row,) = h.prompts(1, LONG)
    ask = Ask(row.ids, vllm_params(Sampling(temperature=0.0, max_new_tokens=4), 0, ()), None, "one salt for all")
    replica.ask([ask])
    new = h.changed(base, seed=7)
    tensors = h.weights_of(new)
    push(h.buckets_of(tensors), fresh._outlets["replica 0"], h.manifest_of(14, "merged", tensors))
    fresh.fleet.refresh()
    (stale,) = replica.ask([ask])
    replica.reset_cache()
    (clean,) = replica.ask([ask])
    assert max(abs(a - b) for a, b in zip(stale.logprobs, clean.logprobs, strict=True)) > 100 * h.TOLERANCE
    assert fresh.fleet.served[0].salt != served.salt


def test_torn_weights_are_never_served(fresh, base):
    new = h.changed(base, seed=8)
    tensors = h.weights_of(new)
    fresh.begin(h.manifest_of(15, "merged", tensors))
    fresh.receive(h.buckets_of(tensors)[0])
    with pytest.raises(StaleWeights, match="version 15"):
        generate(fresh, h.prompts(1, 20))
    fresh.abort("the test says so")
    with pytest.raises(StaleWeights, match="the test says so"):
        generate(fresh, h.prompts(1, 20))
    with pytest.raises(TransportError, match="needs whole base weights"):
        h.push_adapter(fresh, h.with_adapter(base, seed=1), 16)
    h.push_weights(fresh, new, 17)
    assert h.worst(new, generate(fresh, h.prompts(1, 20)), PLAIN) <= h.TOLERANCE


def test_wrong_digest_of_weights_is_seen_in_vllms_own_parameters(fresh, base):
    tensors = h.weights_of(base)
    fresh.begin(h.manifest_of(18, "merged", tensors))
    for bucket in h.buckets_of(tensors):
        fresh.receive(bucket)
    with pytest.raises(TransportError, match="vLLM's parameters hold other bytes"):
        fresh.commit("0" * 64)
    with pytest.raises(StaleWeights):
        generate(fresh, h.prompts(1, 20))


def test_incomplete_or_foreign_weights_are_refused_before_anything_is_overwritten(fresh, base):
    tensors = h.weights_of(base)
    left_out = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    with pytest.raises(TransportError, match=r"leaves out 1 .*model\.norm\.weight"):
        fresh.begin(h.manifest_of(19, "merged", left_out))
    with pytest.raises(TransportError, match="nothing is cast"):
        fresh.begin(h.manifest_of(19, "merged", {name: tensor.bfloat16() for name, tensor in tensors.items()}))
    half = {name: tensor for name, tensor in tensors.items() if not name.endswith("5.self_attn.k_proj.weight")}
    with pytest.raises(TransportError, match=r"leaves out|nowhere"):
        push(h.buckets_of(half), fresh, h.manifest_of(19, "merged", half))


def test_adapter_onto_a_merged_base_is_refused(fresh, base):
    peft = h.with_adapter(base, seed=9)
    h.push_weights(fresh, base, 20)
    with pytest.raises(TransportError, match="applied twice"):
        h.push_adapter(fresh, peft, 21)
    h.push_weights(fresh, base, 22, "full")
    h.push_adapter(fresh, peft, 23)
    assert h.worst(peft, generate(fresh, h.prompts(1, 20)), PLAIN) <= h.TOLERANCE


@pytest.mark.parametrize("on_update", ["drain", "pause"])
def test_update_in_the_middle_of_generation(fresh, base, on_update):
    """Each sample is of one set of weights and says of which."""
    new = h.changed(base, seed=10)
    engine, sampling = fresh, Sampling(max_new_tokens=32)
    engine._on_update = on_update
    before = engine.policy_version
    samples, started = [], threading.Event()

    def run() -> None:
        started.set()
        samples.extend(engine.generate(h.prompts(4, 20), sampling, num_samples=2, draw=Draw(7, 1)))

    thread = threading.Thread(target=run)
    thread.start()
    started.wait(10)
    while not engine._gate._num_inside:
        assert thread.is_alive()
    h.push_weights(engine, new, 24)
    thread.join(600)
    engine._on_update = "drain"
    versions = {sample.policy_version for sample in samples}
    assert versions == ({before} if on_update == "drain" else {24}) and len(samples) == 8
    assert h.worst(base if on_update == "drain" else new, samples, sampling) <= h.TOLERANCE


def test_adapters_are_replaced_while_their_requests_run(fresh, base):
    """Two commits during one call: every sample is of the adapter whose version it carries."""
    policies = {version: h.with_adapter(base, seed=version) for version in (40, 41, 42)}
    h.push_adapter(fresh, policies[40], 40)
    samples, sampling = [], Sampling(max_new_tokens=24)

    def run() -> None:
        samples.extend(fresh.generate(h.prompts(4, 20), sampling, num_samples=2, draw=Draw(7, 1)))

    thread = threading.Thread(target=run)
    thread.start()
    while not fresh._gate._num_inside:
        assert thread.is_alive()
    for version in (41, 42):
        h.push_adapter(fresh, policies[version], version)
    thread.join(600)
    assert len(samples) == 8 and {sample.policy_version for sample in samples} <= policies.keys()
    for version, policy in policies.items():
        of_it = [sample for sample in samples if sample.policy_version == version]
        assert not of_it or h.worst(policy, of_it, sampling) <= h.TOLERANCE
    after = generate(fresh, h.prompts(1, 20))
    assert fresh.policy_version == 42 and h.worst(policies[42], after, PLAIN) <= h.TOLERANCE


def test_other_ranks_generate_by_the_handle(fresh, base):
    other = VllmEngine.attach(fresh.handle(), tokenizer=h.tokenizer())
    peft = h.with_adapter(base, seed=11)
    h.push_adapter(fresh, peft, 25)
    other.saw(25)
    samples = generate(other, h.prompts(2, 20))
    assert [sample.ids for sample in samples] == [sample.ids for sample in generate(fresh, h.prompts(2, 20))]
    with pytest.raises(StaleWeights, match="26"):
        other.saw(26)
    with pytest.raises(TransportError, match="only generates"):
        h.push_adapter(other, peft, 26)
    other.close()


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_other_transports_carry_updates_too(fresh, base, tmp_path, transport):
    engine = VllmEngine(
        fresh.fleet, tokenizer=h.tokenizer(), eos_ids=(), transport=transport, folder=tmp_path, request_timeout_s=300.0
    )
    h.push_adapter(engine, peft := h.with_adapter(base, seed=12), 27)
    assert h.worst(peft, generate(engine, h.prompts(1, 20)), PLAIN) <= h.TOLERANCE
    started = time.perf_counter()
    h.push_weights(engine, new := h.changed(base, seed=13), 28)
    print(f"merged by {transport}: {time.perf_counter() - started:.2f} s")
    assert h.worst(new, generate(engine, h.prompts(1, 20)), PLAIN) <= h.TOLERANCE
    for outlet in engine._outlets.values():
        outlet.close()


def test_every_route_needs_the_token(fresh):
    url = fresh.fleet.replicas[0].url
    stranger, wrong = HttpClient(url), HttpClient(url, token="open pepper")
    for client in (stranger, wrong):
        for path in (
            "/collective_rpc",
            "/pause",
            "/v1/load_lora_adapter",
            "/inference/v1/generate",
            "/update_weight_version",
        ):
            with pytest.raises(EngineRefused, match="401"):
                client.post(path, {})
    stranger.get("/health")


def test_how_long_updates_take(fresh, base, capsys):
    """Limits of the engine's own targets, for 135M parameters on a CPU; the best of three, since the host is shared."""
    peft = h.with_adapter(base, seed=14)
    times = {"adapter": [], "merged": []}
    for version in range(30, 33):
        started = time.perf_counter()
        h.push_adapter(fresh, peft, version)
        times["adapter"].append(time.perf_counter() - started)
    for version in range(33, 36):
        started = time.perf_counter()
        h.push_weights(fresh, base, version)
        times["merged"].append(time.perf_counter() - started)
    with capsys.disabled():
        print(f"\nseconds per update: {times}")
    assert min(times["adapter"]) < 0.25 and min(times["merged"]) < 3
