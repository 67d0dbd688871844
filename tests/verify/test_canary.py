"""An engine with exactly one fault, and the canary must name exactly that one; a healthy engine never sets it off."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

from helpers_rollout import make_engine
from helpers_sharded import save_model
from helpers_verify import (
    SAMPLING,
    Altered,
    answer,
    behind,
    deliver,
    make_canary,
    make_trainer,
    probe_model,
    raw_of,
    scaled,
    start_over,
    update,
)
from lockstep.errors import CanaryFailed
from lockstep.export.what import MergedExport
from lockstep.testing import run_ranks
from lockstep.types import Prompt, Sampling
from lockstep.verify.canary import probe_prompts
from lockstep.verify.swaps import keep_adapter

TRUNCATED = Sampling(temperature=0.8, top_k=8, top_p=0.9, max_new_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Made here: with a process group, transformers saves on rank 0 only."""
    return save_model(probe_model(), tmp_path_factory.mktemp("model"))


class Bench:
    """A trainer two updates on, its engine, and what the canary says of other engines (which it must not remember)."""

    def __init__(self, world, folder, *, sampling=SAMPLING, **trainer):
        self.model = probe_model()
        self.sharded = make_trainer(world, folder, **trainer)
        self.engine = self.fresh()
        self.canary = make_canary(self.sharded, sampling=sampling)
        self.version = -1
        for _ in range(3):
            self.next()

    def fresh(self, model=None):
        return make_engine(self.model if model is None else model, eos_ids=())

    def next(self):
        """One healthy version more. Returns the engine's model as it was before."""
        self.version += 1
        if self.version:
            update(self.sharded, seed=self.version)
        before = copy.deepcopy(self.engine._model)
        deliver(self.sharded, self.engine, self.version)
        self.canary.check(answer(self.canary, self.engine), version=self.version)
        return before

    def said(self, engine) -> str:
        """The diagnosis of an engine that claims to have the present version."""
        samples = answer(self.canary, engine, version=self.version)
        with pytest.raises(CanaryFailed) as caught:
            self.canary.check(samples, version=self.version)
        return str(caught.value)


def check_diagnoses(world, folder, backend) -> dict[str, str]:
    """Fault -> what the canary says."""
    bench = Bench(world, folder, backend=backend)
    said = {"adapter off": bench.said(bench.fresh())}
    scales = {
        "alpha lost": lambda name, scale: 1.0,
        "scaling alpha/sqrt(r) against alpha/r": lambda name, scale: 12 / math.sqrt(4),
        "scaling applied twice": lambda name, scale: scale**2,
    }
    for kind in ("q_proj", "v_proj", "down_proj"):
        scales[f"not bound: {kind}"] = lambda name, scale, kind=kind: 0.0 if name.endswith(kind) else scale
    scales["not bound: mlp (down_proj, gate_proj, up_proj)"] = lambda name, scale: 0.0 if ".mlp." in name else scale
    for fault, scale in scales.items():
        with scaled(bench.engine, scale):
            said[fault] = bench.said(bench.engine)
    said["raw logprobs"] = bench.said(raw_of(bench.engine))
    for fault, temperature in {"temperature ignored": 1.0, "temperature applied twice": 0.49}.items():
        said[fault] = bench.said(Altered(bench.engine, ask=lambda _, t=temperature: Sampling(t, max_new_tokens=16)))
    for fault, rounded in {"base in bfloat16": torch.bfloat16, "base in float16": torch.float16}.items():
        other = bench.fresh(copy.deepcopy(bench.model).to(rounded).float())
        deliver(bench.sharded, other, bench.version)
        said[fault] = bench.said(other)
    said["unknown"] = bench.said(Altered(bench.engine, report=noisy))
    old = bench.engine._model
    last = bench.version
    stale = bench.fresh()
    deliver(bench.sharded, stale, last)
    before = bench.next()
    said[f"version {last}"] = bench.said(stale)
    new = bench.engine._model
    report = lambda sample, sampling: behind(before, new, sample, bench.canary.probe_request().sampling, prefix=256)  # noqa: E731
    said["stale KV cache"] = bench.said(Altered(bench.engine, report=report))
    assert old is new
    # Nothing of all that stays: the next healthy version passes.
    bench.next()
    return said


def noisy(sample, sampling):
    draw = torch.Generator().manual_seed(len(sample.ids))
    return (torch.tensor(sample.logprobs) - torch.rand(len(sample.ids), generator=draw)).tolist()


def best(words: str) -> str:
    return words.partition("Best explanation: ")[2].partition(", which leaves")[0].partition(" (this probe")[0]


@pytest.mark.parametrize(("ranks", "backend"), [(1, "fsdp2"), (2, "fsdp2"), (2, "fsdp1")])
def test_each_fault_is_named(folder, ranks, backend):
    by_rank = run_ranks(ranks, check_diagnoses, folder, backend, timeout_s=180)
    for said in by_rank:
        assert said == by_rank[0]
        assert len(said) == 16
        for fault, words in said.items():
            expected = "" if fault == "unknown" else fault
            assert best(words) == expected, words
        assert "No known explanation fits" in said["unknown"]


def check_one_bad_engine(world, folder):
    """Every rank has an engine of its own; rank 1's gets no update."""
    bench = Bench(world, folder)
    update(bench.sharded, seed=9)
    stale = bench.fresh()
    if world.rank == 0:
        deliver(bench.sharded, bench.engine, 3)
        samples = answer(bench.canary, bench.engine)
    else:
        deliver(bench.sharded, stale, 3)
        samples = answer(bench.canary, bench.fresh(), version=3)
    with pytest.raises(CanaryFailed) as caught:
        bench.canary.check(samples, version=3)
    return str(caught.value)


def check_shared_engine(world, folder):
    """Rank 0 has the one engine; the others bring nothing."""
    sharded = make_trainer(world, folder)
    engine = make_engine(probe_model(), eos_ids=())
    canary = make_canary(sharded, num_samples=1)  # fewer samples than ranks times two: one of three ranks has none
    said = []
    for version in range(3):
        if version:
            update(sharded, seed=version)
        deliver(sharded, engine, version)
        result = canary.check(answer(canary, engine) if world.is_main else None, version=version)
        said.append({name: value for name, value in result.metrics.items() if name != "canary/seconds"})
    update(sharded, seed=3)
    with pytest.raises(CanaryFailed) as caught:
        canary.check(answer(canary, engine, version=3) if world.is_main else None, version=3)
    return json.dumps(said), str(caught.value)


def test_one_of_several_engines_is_named_and_every_rank_says_the_same(folder):
    words = run_ranks(2, check_one_bad_engine, folder)
    assert words[0] == words[1]
    assert "rank 1's engine does not serve" in words[0] and best(words[0]) == "adapter off"


def test_a_shared_engine_on_three_ranks_one_without_a_sample(folder):
    outcomes = run_ranks(3, check_shared_engine, folder)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    said, words = outcomes[0]
    assert best(words) == "version 2" and "the engine does not serve" in words
    assert [each["canary/tokens"] for each in json.loads(said)] == [16.0] * 3


def check_truncation(world, folder):
    """B75 and B76: top-k and top-p on one side only."""
    bench = Bench(world, folder, sampling=TRUNCATED)
    open_ended = Altered(bench.engine, ask=lambda _: Sampling(0.8, max_new_tokens=16))
    return {"raw logprobs": bench.said(raw_of(bench.engine)), "top-k and top-p ignored": bench.said(open_ended)}


def check_head(world, folder):
    """The head has an adapter of its own, which an engine with tied weights does not serve."""
    bench = Bench(world, folder, targets=["q_proj", "down_proj", "lm_head"])
    with scaled(bench.engine, lambda name, scale: 0.0 if name.endswith("lm_head") else scale):
        return {"head stale": bench.said(bench.engine)}


def check_small_faults(world, folder):
    """Far below the limit, and seen, since enough tokens carry it: a millionth of a usual update that did not arrive, and half of one."""
    sharded = make_trainer(world, folder)
    engine, canary = make_engine(probe_model(), eos_ids=()), make_canary(sharded, num_samples=24)
    deliver(sharded, engine, 0)
    canary.check(answer(canary, engine), version=0)
    update(sharded, seed=1, size=3e-6)
    samples = answer(canary, engine, version=1)
    with pytest.raises(CanaryFailed) as lost:
        canary.check(samples, version=1)
    deliver(sharded, engine, 1)
    fine = canary.check(answer(canary, engine), version=1)
    with scaled(engine, lambda name, scale: 2.0), pytest.raises(CanaryFailed) as partly:
        canary.check(answer(canary, engine), version=1)
    return str(lost.value), str(partly.value), fine.metrics


def check_all(world, folder):
    return check_truncation(world, folder) | check_head(world, folder), check_small_faults(world, folder)


def test_truncation_the_head_and_updates_far_below_the_limit(folder):
    (found,) = run_ranks(1, check_all, folder)
    for fault, words in found[0].items():
        assert best(words) == fault, words
    lost, partly, metrics = found[1]
    assert best(lost) == "adapter off" and "nearer to" in lost
    assert "part of the update is not what it serves (0.3" in partly and "No known explanation" in partly
    assert metrics["canary/logprob_rms"] < 1e-5 < metrics["canary/limit"] == 5e-5
    assert metrics["canary/lead/adapter off"] < -3


def check_healthy(world, folder, base, served, merged):
    """Many probes and updates of all sizes; the trainer's base in one dtype, the engine in another."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    model = probe_model()
    sharded = make_trainer(world, folder, dtype=dtypes[base])
    worst = 0.0
    for seed in range(6):
        start_over(sharded)
        engine = make_engine(copy.deepcopy(model).to(dtypes[served]), eos_ids=())
        canary = make_canary(sharded, sampling=Sampling((0.7, 1.0)[seed % 2]), dtypes=(base, served))
        for version in range(4):
            if version:
                update(sharded, seed=100 * seed + version, size=10.0 ** -(seed % 5 + 1))
            how = {"what": MergedExport(), "dtype": dtypes[served]} if merged else {}
            deliver(sharded, engine, version, **how)
            worst = max(worst, canary.check(answer(canary, engine), version=version).metrics["canary/logprob_rms"])
    return worst


def check_all_healthy(world, folder):
    pairs = [("float32", "float32", False), ("bfloat16", "bfloat16", False), ("bfloat16", "bfloat16", True)]
    pairs.append(("float32", "bfloat16", True))
    return {pair: check_healthy(world, folder, *pair) for pair in pairs}


def test_healthy_engines_never_set_it_off(folder):
    (found,) = run_ranks(1, check_all_healthy, folder)
    for (_, served, _), worst in found.items():
        assert 0 < worst < (5e-5 if served == "float32" else 0.15)


def check_lies(world, folder):
    bench = Bench(world, folder)
    samples = answer(bench.canary, bench.engine)
    words = []
    for lie in (
        answer(bench.canary, bench.engine, version=7),
        samples[:0],
        _with_other_prompt(samples),
        _with_nan(samples),
    ):
        with pytest.raises(CanaryFailed) as caught:
            bench.canary.check(lie, version=bench.version)
        words.append(str(caught.value))
    return words


def _with_other_prompt(samples):
    return [replace(samples[0], prompt=Prompt("x", (3, 4), "", "")), *samples[1:]]


def _with_nan(samples):
    return [replace(samples[0], logprobs=(math.nan,) * len(samples[0].ids)), *samples[1:]]


def test_what_is_no_answer_to_the_probe_is_refused(folder):
    (words,) = run_ranks(1, check_lies, folder)
    assert "sampled with version 7; the commit did not take effect" in words[0]
    assert "nothing came" in words[1] and "other tokens in slot 0 came" in words[2] and "not finite" in words[3]


def test_probe_prompts_fill_two_blocks_or_what_the_model_has():
    prompts = [Prompt(str(i), tuple(range(i, i + 30)), "", "") for i in range(3)]
    long = probe_prompts(prompts, num_prompts=2, max_len=2048, num_tokens=16)
    assert [len(each.ids) for each in long] == [272, 272] and long[0].ids != long[1].ids
    assert [len(each.ids) for each in probe_prompts(prompts, num_prompts=1, max_len=64, num_tokens=16)] == [48]
    with pytest.raises(ValueError, match="16 positions for 16 new tokens"):
        probe_prompts(prompts, num_prompts=1, max_len=16, num_tokens=16)


def check_never_written(world, folder, backend):
    bench = Bench(world, folder, backend=backend)
    names = [tensor.name for tensor in bench.sharded.plan.parameters]
    before = {name: bench.sharded.local_flat(name).clone() for name in names}
    scales = [
        layer.scaling["default"]
        for layer in bench.sharded.module.modules()
        if isinstance(getattr(layer, "scaling", None), dict)
    ]
    bench.said(bench.fresh())
    assert all(torch.equal(before[name], bench.sharded.local_flat(name)) for name in names)
    after = [
        layer.scaling["default"]
        for layer in bench.sharded.module.modules()
        if isinstance(getattr(layer, "scaling", None), dict)
    ]
    assert scales == after and set(scales) == {3.0}
    assert bench.sharded.is_current()
    assert not any("forward" in module.__dict__ for module in bench.sharded.module.modules())
    kept = keep_adapter(bench.sharded, 0)
    assert (
        sum(each.numel() for each in kept.shards.values())
        == sum(bench.sharded.local_flat(name).numel() for name, _ in bench.sharded.trainable())
        or backend == "fsdp1"
    )
    return bench.sharded.module.training


def test_a_failed_check_leaves_the_trainer_as_it_was(folder):
    for backend in ("fsdp2", "fsdp1"):
        run_ranks(2, check_never_written, folder, backend)


def check_tied(world, tied_folder):
    """Embedding and head share a weight; PEFT's forward has the adapter on one side, an engine with one weight on both."""
    said = {}
    for side, other in (("embed_tokens", "lm_head"), ("lm_head", "embed_tokens")):
        sharded = make_trainer(world, tied_folder, targets=["q_proj", side])
        engine = make_engine(probe_model(tie_word_embeddings=True), eos_ids=())
        canary = make_canary(sharded)
        deliver(sharded, engine, 0)
        canary.check(answer(canary, engine), version=0)
        update(sharded, seed=1)
        deliver(sharded, engine, 1)
        canary.check(answer(canary, engine), version=1)
        modules = dict(engine._model.named_modules())
        adapted = next(each for name, each in modules.items() if name.endswith(side))
        plain = next(each for name, each in modules.items() if name.endswith(other))
        with torch.no_grad():
            plain.weight = torch.nn.Parameter(plain.weight + adapted.get_delta_weight("default"), requires_grad=False)
        with pytest.raises(CanaryFailed) as caught:
            canary.check(answer(canary, engine), version=1)
        said[side] = str(caught.value)
    return said


def check_adapter_rounded(world, folder):
    """B49: the engine casts the adapter. Trained long, so that this shows at all."""
    bench = Bench(world, folder)
    update(bench.sharded, seed=8, size=0.1)
    bench.version += 1
    deliver(bench.sharded, bench.engine, bench.version)
    bench.canary.check(answer(bench.canary, bench.engine), version=bench.version)
    for name, parameter in bench.engine._model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16().float()
    return bench.said(bench.engine)


def check_lost_base(world, folder):
    """B29: a sleeping engine forgot its base; adapters alone came since. And B77: options filled in from a generation_config."""
    bench = Bench(world, folder)
    filled_in = Altered(bench.engine, ask=lambda sampling: replace(sampling, top_k=5))
    words = [bench.said(filled_in)]
    for name, parameter in bench.engine._model.named_parameters():
        if "lora_" not in name and "layers" in name:
            parameter.data.zero_()
    return [*words, bench.said(bench.engine)]


def check_rest(world, tied_folder, folder):
    return check_tied(world, tied_folder), check_adapter_rounded(world, folder), check_lost_base(world, folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tied_weights_a_cast_adapter_and_a_lost_base(folder, tmp_path, ranks):
    tied = save_model(probe_model(tie_word_embeddings=True), tmp_path)
    for said, cast, others in run_ranks(ranks, check_rest, tied, folder):
        assert best(said["embed_tokens"]) == "head tied to the adapted embedding", said
        assert best(said["lm_head"]) == "embedding tied to the adapted head", said
        assert best(cast) == "adapter in bfloat16", cast
        assert all("No known explanation fits" in words for words in others), others
