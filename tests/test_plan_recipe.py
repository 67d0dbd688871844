"""`lockstep plan RECIPE`: what is planned, what is only warned of, and what is refused with the run's own words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from helpers_data import tiny_tokenizer
from helpers_loop import make_model_folder, recipe
from lockstep.cli import run
from lockstep.config import LoraSection
from lockstep.errors import ConfigError, ModelError
from lockstep.model.lora import inject_lora
from lockstep.plan_report import PlanRequest, as_json, make_report
from lockstep.plan_text import as_text
from lockstep.testing import tiny_llama
from lockstep.yaml_text import write_yaml


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def save(tmp_path, folder):
    def write(**sections: Any) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(write_yaml(recipe(folder, tmp_path / "run", **sections)))
        return str(path)

    return write


def plan(source: str, *overrides: str, **fields: Any) -> dict[str, Any]:
    return as_json(make_report(PlanRequest(source, **fields, overrides=overrides)))


def test_without_a_number_of_ranks_one_is_planned_and_options_stand_on_top(save, capsys):
    source = save()
    assert run(["plan", source, "--json", "lora.rank=8", "train.micro_batch_tokens=64"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1 and told["world_size"] == 1 and told["backend"] == "fsdp2"
    assert told["num_trainable"] == 2 * plan(source)["num_trainable"]
    use = told["run"]
    assert [each["role"] for each in use["models"]] == ["policy", "engine"] and use["device"] == "cpu"
    assert set(use) == {
        "rank", "device", "models", "activations", "logits", "has_many_micro_batches", "phases", "resident", "largest_phase", "peak",
        "not_counted", "warnings",
    }  # fmt: skip
    assert set(use["models"][0]) == {
        "role", "path", "backend", "parameters", "buffers", "reference", "gradients", "optimizer", "gathered",
    }  # fmt: skip
    largest = max(use["phases"], key=lambda phase: phase["nbytes"])
    assert use["peak"] == use["resident"]["device"] + largest["nbytes"] and use["largest_phase"] == largest["name"]
    assert all(phase["nbytes"] == sum(phase["parts"].values()) for phase in use["phases"])
    assert use["warnings"] == [] and use["has_many_micro_batches"]


def test_the_backend_and_the_bucket_are_the_recipes_unless_given(save):
    source = save(sharding={"backend": "fsdp1"}, sync={"bucket_mb": 2})
    assert [plan(source, world_size=size)["backend"] for size in (1, 2)] == [
        "fsdp2",
        "fsdp1",
    ]  # one rank has nothing to shard
    assert plan(source, world_size=2, backend="fsdp2")["run"]["models"][0]["backend"] == "fsdp2"
    # Over bf16 a run keeps fp32 adapters on FSDP1 too, as units of their own.
    told = plan(source, "model.dtype=bfloat16", world_size=2)
    assert told["dtype_decisions"]["casts"] == [] and told["dtype_decisions"]["units"]


def test_offloading_moves_state_where_there_is_a_device(save):
    source = save()
    plain, moved, on_cpu = (
        plan(source, f"run.device={device}", f"train.offload_optimizer={on}", f"train.offload_activations={on}")["run"]
        for device, on in (("cuda", "false"), ("cuda", "true"), ("cpu", "true"))
    )
    kept, gone, same = (each["models"][0]["optimizer"] for each in (plain, moved, on_cpu))
    assert gone["device"] == 0 and gone["host"] == kept["device"] + kept["host"] and same == kept
    assert gone["step"] > kept["step"]  # a chunk of it comes over
    assert moved["phases"][0]["parts"]["activations"] == 0 < plain["phases"][0]["parts"]["activations"]
    assert (
        "train.offload_activations" in " ".join(moved["not_counted"])
        and moved["peak"] < plain["peak"] == on_cpu["peak"]
    )


def test_gradient_checkpointing_and_servers_take_less(save):
    plain = plan(save())["run"]
    assert plan(save(), "model.gradient_checkpointing=true")["run"]["activations"]["policy"]["saved"] < (
        plain["activations"]["policy"]["saved"] / 2
    )
    served = plan(save(), "rollout.engine=vllm")["run"]
    assert [each["role"] for each in served["models"]] == ["policy"]
    assert "the vllm servers' own memory" in served["not_counted"]
    assert "samples" not in [phase["name"] for phase in served["phases"]]
    flash = plan(save(), "model.attention=flash_attention_2")["run"]  # not installed here, and it need not be
    assert flash["models"][0] == plain["models"][0]


def test_weights_that_are_still_to_come_are_only_warned_of(save, folder, tmp_path):
    shutil.copy(Path(folder) / "config.json", tmp_path / "config.json")
    there, not_yet = plan(save()), plan(save(), f"model.path={tmp_path}")
    told = not_yet["run"]
    assert [each["parameters"] for each in told["models"]] == [each["parameters"] for each in there["run"]["models"]]
    assert len(told["warnings"]) == 2
    assert "a run would stop" in told["warnings"][0] and "holds no model.safetensors" in told["warnings"][0]
    assert "holds no tokenizer" in told["warnings"][1]
    assert "warning         a run would stop" in as_text(
        make_report(PlanRequest(save(), overrides=(f"model.path={tmp_path}",)))
    )


DISTILL = {"train": {"algorithm": "distill"}, "rollout": {"group_size": 1}}


def test_a_teachers_adapter_may_be_missing_its_tokenizer_may_not_differ(save, folder, tmp_path):
    told = plan(save(**DISTILL, teacher={"path": folder, "adapter": str(tmp_path / "gone")}))["run"]
    (warning,) = told["warnings"]
    assert (
        "teacher.adapter" in warning and "is not a PEFT folder" in warning and "planned without its adapter" in warning
    )
    plain = plan(save(**DISTILL, teacher={"path": folder}))["run"]
    assert told["models"] == plain["models"] and plain["warnings"] == []
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    file = other / "tokenizer.json"
    first = tiny_tokenizer().convert_ids_to_tokens(5)
    file.write_text(file.read_text().replace(f'"{first}"', '"elsewhere"'))
    assert Tokenizer.from_file(str(file)).id_to_token(5) == "elsewhere"
    with pytest.raises(ModelError, match=r"has another tokenizer than the policy.*token 5 is 'elsewhere' there"):
        plan(save(**DISTILL, teacher={"path": str(other)}))


def test_the_reference_is_told_apart(save, folder, tmp_path):
    model = inject_lora(
        tiny_llama(vocab_size=len(tiny_tokenizer()), tie_word_embeddings=True), LoraSection(rank=4), seed=1
    )
    model.save_pretrained(tmp_path / "adapter")
    source = save(lora={"init_from": str(tmp_path / "adapter")})
    kept, base = (plan(source, f"train.reference={word}")["run"]["models"][0] for word in ("start", "base"))
    assert base["reference"] == 0 < kept["reference"] == kept["parameters"] - base["parameters"]
    assert kept["optimizer"] == base["optimizer"]
    assert "the reference's adapter" in as_text(make_report(PlanRequest(source)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.path=/nowhere"], "model.path '/nowhere' is not a folder"),
        (["train.algorithm=gae", "critic.path=/nowhere"], "critic.path '/nowhere' is not a folder"),
        (["train.algorithm=distill", "teacher.path=/nowhere"], "teacher.path '/nowhere' is not a folder"),
        (["--world-size", "5"], "5 ranks share rollout.prompts_per_step=4 prompts"),
        (["lora.targets=[q_prj]"], "'q_prj' matches no module"),
        (["lora.init_from=/nowhere"], "lora.init_from '/nowhere' is not a PEFT folder"),
        (["train.lrr=1"], "did you mean 'train.lr'"),
        (["--strip", "model.norm"], "--strip goes with a model's configuration"),
        (["--adapter-dtype", "bfloat16"], "--adapter-dtype goes with a model's configuration"),
        (["sharding.layer_classes=[LlamaMLPP]"], "layer class 'LlamaMLPP' is not in the model"),
    ],
)
def test_what_a_run_refuses_is_refused_in_its_words(save, words, message, capsys):
    assert run(["plan", save(), *words]) == 2
    assert message in capsys.readouterr().err


def test_options_of_a_recipe_need_one(folder, capsys):
    assert run(["plan", folder, "train.lr=1"]) == 2
    assert "'train.lr=1' is an option of a recipe" in capsys.readouterr().err


def test_a_critic_must_know_the_policys_tokens(save, tmp_path):
    tiny_llama(vocab_size=20).save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match="has a vocabulary of 20 tokens and the policy one of"):
        plan(save(train={"algorithm": "gae"}, critic={"path": str(tmp_path / "small")}))


@pytest.mark.parametrize("name", ["smollm2-sums", "smollm2-sums-ppo", "smollm2-sums-distill", "smollm2-calculator"])
def test_the_recipes_can_be_planned(name, folder):
    source = Path(__file__).parent.parent / "recipes" / f"{name}.yaml"
    paths = [f"model.path={folder}", *([f"teacher.path={folder}"] if "distill" in name else [])]
    report = make_report(PlanRequest(str(source), 2, overrides=tuple(paths)))
    roles = {
        "smollm2-sums-ppo": ["policy", "critic", "engine"],
        "smollm2-sums-distill": ["policy", "teacher", "engine"],
    }
    assert report.run is not None
    assert [each.role for each in report.run.models] == roles.get(name, ["policy", "engine"])
    assert max(map(len, as_text(report).splitlines())) <= 100
