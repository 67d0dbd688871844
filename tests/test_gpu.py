"""On one CUDA device: whole runs, both kinds of sync, resume, merged values and the engine's ids and log-probabilities.

`python -m pytest -m gpu`. Where a bound is looser than on the CPU, the reason stands beside it.
"""

import json
from pathlib import Path

import pytest
import torch

import lockstep
from helpers_loop import make_model_folder, recipe
from helpers_matrix import Cell, build, collect, difference, read_reference, write_reference
from helpers_sharded import randomise_b, save_model, shard_folder
from lockstep import dist
from lockstep.config import DistConfig, LoraSection, build_config
from lockstep.export.stream import export_weights
from lockstep.export.what import AdapterExport, MergedExport
from lockstep.loop import run_training
from lockstep.model.load import find_model, load_tokenizer, load_whole
from lockstep.rollout.hf import HFEngine
from lockstep.testing import tiny_llama
from lockstep.types import Draw, Prompt, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def train(model: str, run: Path, *, steps: int, resume: bool = False, **sections) -> list[dict[str, float]]:
    tree = recipe(model, run, lora={"rank": 4, "alpha": 8, "dropout": 0.0}, **sections)
    config = build_config({**tree, "run": {**tree["run"], "device": "cuda", "num_steps": steps}})
    run_training(config, resume=resume)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", ["adapter", "merged"])
def test_a_run_trains_and_its_engine_follows(model, tmp_path, mode):
    lines = train(model, tmp_path / "run", steps=4, sync={"mode": mode, "bucket_mb": 0.01})
    assert len(lines) == 4
    # fp32 products on CUDA take other kernels for other shapes (packed trainer, batched engine): 1e-4 in probability.
    assert all(line["rollout_probs_diff_max"] < 1e-4 and line["grad_norm"] > 0 for line in lines)


def test_bf16_base_with_fp32_adapter(model, tmp_path):
    lines = train(model, tmp_path / "run", steps=2, model={"dtype": "bfloat16"})
    assert all(line["grad_norm"] > 0 and line["rollout_probs_diff_max"] < 0.05 for line in lines)


def test_resume_goes_on_where_it_was(model, tmp_path):
    whole = train(model, tmp_path / "whole", steps=6)
    train(model, tmp_path / "run", steps=4)
    resumed = train(model, tmp_path / "run", steps=6, resume=True)
    # Backward of the embedding and of sdpa sum with atomics on CUDA: equal up to fp32 rounding, not bit for bit.
    for left, right in zip(whole, resumed, strict=True):
        assert left["reward"] == pytest.approx(right["reward"], abs=0.05)
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_export_rounds_once(tmp_path, dtype):
    world = dist.start("cuda", DistConfig())
    try:
        folder = save_model(
            tiny_llama(hidden_size=256, intermediate_size=384, tie_word_embeddings=True), tmp_path / "model"
        )
        sharded = shard_folder(world, folder, LoraSection(rank=8, alpha=6.0), dtype=dtype)
        randomise_b(sharded)
        with export_weights(sharded, AdapterExport()) as stream:
            adapter = dict(item for bucket in stream for item in bucket.items())
        with export_weights(sharded, MergedExport(), bucket_bytes=50_000) as stream:
            merged = dict(item for bucket in stream for item in bucket.items())
    finally:
        dist.stop(world)
    base = load_whole(find_model(folder), dtype=dtype, attention="sdpa", device=CUDA).state_dict()
    assert all(value.device.type == "cuda" for value in merged.values())
    for name, value in merged.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in adapter:
            assert torch.equal(value, base[name])
            continue
        delta = adapter[f"{stem}.lora_B.weight"].double() @ adapter[f"{stem}.lora_A.weight"].double() * (6.0 / 8)
        exact = base[name].double() + delta
        # One rounding: within half a unit in the last place of the exact sum, plus fp32's own rounding of the delta.
        unit = torch.finfo(dtype).eps * exact.abs().clamp(min=1e-6)
        assert ((value.double() - exact).abs() <= 0.5 * unit + 1e-6).all(), name


def test_engine_equals_generate_and_a_plain_forward(model):
    files = find_model(model)
    tokenizer = load_tokenizer(files)
    engine = HFEngine.load(
        str(files.path), dtype=torch.float32, attention="sdpa", device=CUDA, tokenizer=tokenizer, cache_tokens=4096
    )
    prompts = [Prompt(str(n), tuple(range(10, 12 + 3 * n)), "", "") for n in range(5)]
    plain = load_whole(files, dtype=torch.float32, attention="sdpa", device=CUDA)
    greedy = engine.generate(
        prompts, Sampling(temperature=0.0, max_new_tokens=8, eos_ids=engine.eos_ids), num_samples=1, draw=Draw(0, 0)
    )
    for prompt, sample in zip(prompts, greedy, strict=True):
        ids = torch.tensor([prompt.ids], device=CUDA)
        told = plain.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))[
            0, ids.shape[1] :
        ].tolist()
        assert told[: len(sample.ids)] == list(sample.ids)
    sampling = Sampling(temperature=0.7, top_k=20, max_new_tokens=8, eos_ids=engine.eos_ids)
    samples = engine.generate(prompts, sampling, num_samples=4, draw=Draw(1, 2))
    again = engine.generate(prompts, sampling, num_samples=4, draw=Draw(1, 2))
    assert [sample.ids for sample in samples] == [sample.ids for sample in again]


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("adapter", ["lora", "dora", "embed-and-head"])
@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
def test_exports_equal_the_cpu_references(tmp_path, backend, adapter, dtypes):
    """Adapter and full exports to the bit. Merged by PEFT itself on the CPU: to the bit as well; by rows on the device: cuBLAS
    sums B @ A in another order than MKL, so an element may round to the neighbouring value."""
    cell = Cell("llama", adapter, dtypes, backend)
    folder = write_reference(cell, tmp_path)
    sharded = lockstep.shard(build(cell).cuda(), backend=backend)
    try:
        for kind, what in {"adapter": lockstep.AdapterExport(), "full": lockstep.FullExport()}.items():
            came = {name: tensor.cpu() for name, tensor in collect(sharded, what).items()}
            assert not difference(came, read_reference(folder, kind, "default"))
        merged = {name: tensor.cpu() for name, tensor in collect(sharded, lockstep.MergedExport()).items()}
        wanted = read_reference(folder, "merged", "default")
        if adapter == "dora":
            assert not difference(merged, wanted)
        step = 2**-22 if dtypes == "fp32" else 2**-7
        for name, tensor in merged.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=step, atol=1e-6)
    finally:
        dist.stop(sharded.world)


def test_collectives_move_windows_on_nccl(tmp_path):
    """One rank cannot show much of NCCL; that its collectives take the windows as they are cut, it can."""
    cell = Cell("llama", "lora", "fp32", "fsdp2")
    folder = write_reference(cell, tmp_path)
    sharded = lockstep.shard(build(cell).cuda())
    try:
        for to in ("all", 0):
            came = collect(sharded, lockstep.FullExport(), bucket_bytes=4096, to=to)
            assert all(tensor.is_cuda for tensor in came.values())
            assert not difference(
                {name: tensor.cpu() for name, tensor in came.items()}, read_reference(folder, "full", "")
            )
    finally:
        dist.stop(sharded.world)
