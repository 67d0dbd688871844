"""An engine in another dtype than the trainer's: updates are rounded to it once, where the recipe says so, and not otherwise."""

from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from helpers_fake_vllm import FakeReplica, adapter
from helpers_loop import make_model_folder, recipe
from helpers_sharded import save_model, shard_folder
from helpers_verify import probe_model, update
from lockstep import assemble
from lockstep.config import LoraSection, build_config
from lockstep.dist import World
from lockstep.errors import ConfigError, TransportError
from lockstep.export.stream import export_weights
from lockstep.export.what import AdapterExport, MergedExport
from lockstep.loop import run_training
from lockstep.rollout.base import Abilities
from lockstep.rollout.vllm import VllmEngine
from lockstep.rollout.vllm_fleet import Fleet
from lockstep.testing import run_ranks
from lockstep.transport.inproc import push
from lockstep.types import Bucket, Manifest, TensorSpec


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def config(model, run, **sections):
    sections = {"engine": {"dtype": "bfloat16"}, "sync": {"mode": "merged", "bucket_mb": 0.01}, **sections}
    tree = recipe(model, run, eval={"before": False, "after": False}, lora={"rank": 4, "dropout": 0.0}, **sections)
    tree["run"]["num_steps"] = 2
    return build_config(tree)


def test_a_merged_update_is_rounded_once_to_the_engines_dtype(model, tmp_path, monkeypatch):
    """B32: round(W + s * B A), with W, B and A in fp32, is what the engine holds, to the bit. The canary and the mismatch are green."""
    engines, told = [], []

    def start(*args):
        engines.append(real(*args))
        return engines[-1]

    real = assemble.start_engine
    monkeypatch.setattr(assemble, "start_engine", start)
    monkeypatch.setattr(assemble.log, "warning", lambda text, *values, **_: told.append(text % values))
    run_training(config(model, tmp_path / "run"), resume=False)
    folder = tmp_path / "run" / "checkpoints" / "step-000002" / "adapter"
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder).merge_and_unload()
    served = engines[0][0]._model.state_dict()
    assert {value.dtype for value in served.values()} == {torch.bfloat16}
    assert all(torch.equal(served[name], value.bfloat16()) for name, value in merged.state_dict().items())
    assert any("from float32 to the engine's dtype: merging into bfloat16 loses" in text for text in told), told


def test_nothing_is_cast_that_is_not_asked_for(model, tmp_path, monkeypatch):
    monkeypatch.setattr(assemble, "wire_dtype", lambda *args: None)
    with pytest.raises(TransportError, match=r"comes as torch\.float32, the engine's parameter is torch\.bfloat16"):
        run_training(config(model, tmp_path / "run"), resume=False)


def engine_of(dtype: str, adapter_dtype: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(abilities=Abilities(frozenset(), dtype, keeps_prefixes=False, adapter_dtype=adapter_dtype))


def test_an_engine_in_another_dtype_than_the_recipes_is_refused(model, tmp_path):
    asked = config(model, tmp_path, engine={})
    with pytest.raises(
        ConfigError, match=r"weights are bfloat16, and by the recipe they are float32: set engine\.dtype"
    ):
        assemble.wire_dtype(asked, engine_of("bfloat16"), MergedExport())
    assert assemble.wire_dtype(asked, engine_of("float32"), MergedExport()) is None
    assert assemble.wire_dtype(asked, engine_of("float32"), AdapterExport()) is None
    low = config(model, tmp_path)
    assert assemble.wire_dtype(low, engine_of("bfloat16"), MergedExport()) is torch.bfloat16
    assert assemble.wire_dtype(low, engine_of("bfloat16"), AdapterExport()) is None, "it takes adapters as they are"
    assert assemble.wire_dtype(low, engine_of("bfloat16", "bfloat16"), AdapterExport()) is torch.bfloat16


def test_vllm_gets_adapters_in_what_it_keeps_them_in():
    """B49: rounded by the sender, since vLLM would do it without a word."""
    replica = FakeReplica()
    replica.worker.model_runner.lora_manager.lora_config.lora_dtype = torch.bfloat16
    engine = VllmEngine(Fleet([replica]), tokenizer=SimpleNamespace(decode=lambda ids, **how: ""), eos_ids=())
    assert engine.abilities.adapter_dtype == "bfloat16" and engine.abilities.dtype == "float32"
    tensors, settings = adapter()
    with pytest.raises(TransportError, match=r"comes as torch\.float32, vLLM keeps LoRA in torch\.bfloat16"):
        send(engine, tensors, settings)
    send(engine, {name: tensor.bfloat16() for name, tensor in tensors.items()}, settings)
    assert engine.policy_version == 1
    engine.close()


def send(engine, tensors, settings) -> None:
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    push([Bucket(tuple(tensors.items()))], engine, Manifest(1, "adapter", specs, settings))


def check_rounding(world: World, folder: str) -> None:
    """What arrives is the fp32 export, rounded once."""
    for backend in ("fsdp2", "fsdp1") if world.size > 1 else ("fsdp2",):
        sharded = shard_folder(world, folder, LoraSection(rank=3, alpha=6), backend=backend)
        update(sharded, seed=1)
        for what in (AdapterExport(), MergedExport()):
            exact, rounded = (exported(sharded, what, dtype) for dtype in (None, torch.bfloat16))
            assert {tensor.dtype for tensor in rounded.values()} == {torch.bfloat16}
            assert exact.keys() == rounded.keys()
            assert all(torch.equal(tensor.bfloat16(), rounded[name]) for name, tensor in exact.items())
            assert any(not torch.equal(tensor.bfloat16().float(), tensor) for tensor in exact.values())


def exported(sharded, what, dtype) -> dict[str, torch.Tensor]:
    with export_weights(sharded, what, bucket_bytes=4096, dtype=dtype) as stream:
        return {name: tensor.clone() for bucket in stream for name, tensor in bucket.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_rounding_is_the_same_on_any_number_of_ranks_and_either_fsdp(tmp_path, ranks):
    """B32 and B49."""
    run_ranks(ranks, check_rounding, save_model(probe_model(), tmp_path))
