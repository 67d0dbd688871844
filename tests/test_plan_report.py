"""`lockstep plan`: the figures follow from the plan of the real model, the large configurations take seconds, errors are told."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from helpers_models import OMNI_TARGETS, tiny_gpt2, tiny_qwen3_moe, tiny_qwen3_omni
from lockstep.cli import run
from lockstep.config import LoraSection
from lockstep.errors import ConfigError, ModelError
from lockstep.export.cost import export_costs
from lockstep.model.lora import inject_lora
from lockstep.model.outline import build_outline, read_model_config
from lockstep.model.strip import strip
from lockstep.plan_report import PlanRequest, as_json, make_report
from lockstep.plan_text import as_text, size_text
from lockstep.sharding.plan import LayerClasses, MinParams, Modules, plan_sharding
from lockstep.sharding.sizes import shard_bytes
from lockstep.sharding.skeleton import skeleton
from lockstep.testing import tiny_llama

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
ODD = dict(hidden_size=20, intermediate_size=33, vocab_size=65, num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture
def save(tmp_path):
    def write(model):
        model.config.save_pretrained(tmp_path)
        return str(tmp_path)

    return write


def report_of(source, **fields):
    return make_report(PlanRequest(**{"source": str(source), "world_size": 2, **fields}))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("make", [lambda: tiny_llama(**ODD), tiny_gpt2, tiny_qwen3_moe], ids=["llama", "gpt2", "moe"])
def test_the_plan_is_the_real_models(make, save):
    source = save(make())
    plain = report_of(source).plan
    assert plain.lines() == plan_sharding(make()).lines()
    targets = ("c_attn",) if make is tiny_gpt2 else ("q_proj", "v_proj")
    adapted = report_of(source, lora={"rank": 3, "targets": targets}).plan
    assert adapted.lines() == plan_sharding(inject_lora(make(), LoraSection(rank=3, targets=targets), seed=0)).lines()


def test_ties_and_fused_experts_are_as_in_the_real_model(save):
    tied = report_of(save(tiny_llama(tie_word_embeddings=True)))
    assert as_json(tied)["tied"] == [["model.embed_tokens.weight", "lm_head.weight"]]
    parameters = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    planned = report_of(save(tiny_qwen3_moe()), lora={"rank": 2, "targets": ("q_proj",)}, target_parameters=parameters)
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=list(parameters))
    assert planned.plan.lines() == plan_sharding(get_peft_model(tiny_qwen3_moe(), config)).lines()


def test_omni_is_stripped_and_planned_as_in_the_real_model(save):
    model = tiny_qwen3_omni()
    source = save(model)
    freed = strip(model, ["talker", "code2wav"])
    report = report_of(source, strip=("talker", "code2wav"), lora={"rank": 2, "targets": OMNI_TARGETS})
    assert (
        report.plan.lines()
        == plan_sharding(inject_lora(model, LoraSection(rank=2, targets=OMNI_TARGETS), seed=0)).lines()
    )
    assert report.stripped == freed
    told = as_json(report)
    assert told["stripped"]["removed"] == ["talker", "code2wav"] and told["stripped"]["nbytes"] == freed.nbytes > 0
    assert "Qwen3OmniMoeTalkerDecoderLayer" in told["missing_classes"]


@pytest.mark.parametrize(
    ("name", "options", "num_params", "num_units"),
    [
        ("llama-3-70b", {}, 70_553_706_496, 83),
        ("qwen3-30b-a3b", {}, 30_532_122_624, 51),
        ("qwen3-omni-30b-a3b", {"strip": ("talker", "code2wav")}, 31_719_205_488, 53),
    ],
)
def test_large_configurations_are_planned_without_memory(name, options, num_params, num_units):
    """The published sizes: 70.6B, 30.5B, and of Omni's 35.3B the thinker."""
    told = as_json(report_of(CONFIGS / f"{name}.json", world_size=16, **options))
    assert told["num_params"] == num_params and len(told["units"]) == num_units
    assert told["nbytes"] == 2 * num_params == told["shard_bytes"]["total"]
    assert told["largest_unit"]["nbytes"] < 2 * 2**30
    outline = build_outline(read_model_config(CONFIGS / f"{name}.json"), dtype=torch.bfloat16)
    assert {tensor.device.type for tensor in [*outline.parameters(), *outline.buffers()]} == {"meta"}


def test_shards_of_the_report_are_the_plans(save):
    report = report_of(save(tiny_llama(**ODD)), world_size=4, dtype="float32")
    told = as_json(report)
    held = [shard_bytes(report.plan, rank, 4, "fsdp2") for rank in range(4)]
    assert told["shard_bytes"] == {"max": held[0], "min": held[3], "total": sum(held)} and held[3] < held[0]
    # 65 rows on 4 ranks: 17, 17, 17, 14.
    head = next(unit for unit in told["units"] if unit["name"] == "lm_head")
    assert head["shard_bytes"] == 17 * 20 * 4 and head["nbytes"] == 65 * 20 * 4


def costs_of(model, **fields):
    values = {"world_size": 2, "backend": "fsdp2", "bucket_bytes": 1000, "wire_dtype": None, **fields}
    outline = skeleton(model, {})
    costs = export_costs(outline, plan_sharding(outline), **values)
    return {(cost.kind, cost.to): cost for cost in costs}


def lora_llama(**config):
    return get_peft_model(tiny_llama(**ODD), LoraConfig(**{"r": 3, "target_modules": ["q_proj"], **config}))


def halves(model, which):
    """Bytes of the first of two ranks' rows, and of the second's."""
    first = second = 0
    for name, param in model.named_parameters():
        if which(name):
            rows = param.shape[0]
            size = param.nbytes // rows
            first, second = first + (rows + 1) // 2 * size, second + rows // 2 * size
    return first, second


def test_adapter_and_full_exports_move_what_the_others_hold():
    model = lora_llama()
    costs = costs_of(model)
    for kind, which in (("adapter", lambda name: "lora_" in name), ("full", lambda name: "lora_" not in name)):
        first, second = halves(model, which)
        to_all, to_first = costs[kind, "all"], costs[kind, "rank 0"]
        assert to_all.nbytes == to_first.nbytes == first + second
        assert (to_all.received_max, to_all.received_total) == (first, first + second)
        assert (to_first.received_max, to_first.received_total) == (second, second)
        assert to_all.num_exchanges >= -(-(first + second) // 1000)
    assert costs["adapter", "all"].num_tensors == 4
    assert costs["full", "all"].extra_bytes == 1000 + 65 * 20 * 4
    assert not any(cost.refused for cost in costs.values())


def test_an_export_that_cannot_be_says_why():
    config = LoraConfig(r=3, target_modules=["q_proj", "lm_head"])
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        tied = get_peft_model(tiny_llama(tie_word_embeddings=True), config)
    costs = costs_of(tied)
    assert "tied" in costs["merged", "all"].refused and costs["merged", "rank 0"].nbytes == 0
    assert costs["adapter", "all"].num_tensors == 6


def test_a_merged_export_moves_a_to_every_rank_and_b_only_where_rows_differ():
    model = lora_llama(target_modules=["lm_head"])
    base = halves(model, lambda name: "lora_" not in name)
    a = halves(model, lambda name: "lora_A" in name)
    merged = costs_of(model)
    assert merged["merged", "all"].received_max == base[0] + a[0]
    assert merged["merged", "rank 0"].received_total == base[1] + a[0] + a[1]
    # 10 rows on a rank are too few to be merged as the whole is rounded: B goes along.
    few = halves(lora_llama(), lambda name: True)
    assert costs_of(lora_llama())["merged", "all"].received_max == few[0]
    conv = get_peft_model(tiny_gpt2(), LoraConfig(r=3, target_modules=["c_attn"], fan_in_fan_out=True))
    factors = halves(conv, lambda name: "lora_" in name)
    assert costs_of(conv)["merged", "rank 0"].received_total == (
        halves(conv, lambda name: "lora_" not in name)[1] + sum(factors)
    )
    # PEFT merges DoRA itself, on the receiver: everything travels there, and to nobody else.
    dora = halves(lora_llama(use_dora=True), lambda name: True)
    assert costs_of(lora_llama(use_dora=True))["merged", "rank 0"].received_total == dora[1]


def test_wire_dtype_halves_floats_and_bucket_sizes_set_collectives():
    whole, half = costs_of(lora_llama()), costs_of(lora_llama(), wire_dtype=torch.bfloat16)
    assert half["full", "all"].received_total * 2 == whole["full", "all"].received_total
    # Factors are read in their own dtype, whatever the result travels in.
    difference = half["merged", "rank 0"].received_total - half["full", "rank 0"].received_total
    assert difference == whole["merged", "rank 0"].received_total - whole["full", "rank 0"].received_total > 0
    assert costs_of(lora_llama(), bucket_bytes=1 << 30)["full", "all"].num_exchanges == 1
    assert costs_of(lora_llama(), bucket_bytes=1 << 30)["merged", "all"].num_exchanges == 2


def test_one_rank_receives_nothing_and_fsdp1_holds_a_unit():
    assert {cost.received_total for cost in costs_of(lora_llama(), world_size=1).values()} == {0}
    units = plan_sharding(lora_llama()).units
    largest = max(sum(each.nbytes for each in unit.parameters if "lora_" not in each.name) for unit in units)
    assert costs_of(lora_llama(), backend="fsdp1")["full", "all"].extra_bytes == 1000 + largest
    assert ("adapter", "all") not in costs_of(tiny_llama())


def test_fsdp1_casts_adapters_and_says_so(save, caplog):
    report = report_of(save(tiny_llama(dtype="bfloat16")), backend="fsdp1", dtype="bfloat16", lora={"rank": 2})
    told = as_json(report)
    assert {unit["name"] for unit in told["units"]} >= {finding["unit"] for finding in told["mixed_dtypes"]}
    assert len(told["dtype_decisions"]["casts"]) == 2 * 7 * 2 and "are lost" in caplog.text
    assert {dtype for unit in told["units"] for dtype in unit["dtypes"]} == {"bfloat16"}
    with pytest.raises(ModelError, match=r"fsdp1 takes parameters of one dtype"):
        report_of(save(tiny_llama()), backend="fsdp1", dtype="bfloat16", lora={"rank": 2}, dtype_rule="refuse")
    split = report_of(save(tiny_llama()), backend="fsdp1", dtype="bfloat16", lora={"rank": 2}, dtype_rule="split")
    assert len(split.plan.units) == 5 + 2 * 7 * 2


def test_the_text_fits_and_counts_numbered_units(save):
    report = report_of(
        CONFIGS / "qwen3-omni-30b-a3b.json",
        world_size=64,
        strip=("talker", "code2wav"),
        lora={"targets": OMNI_TARGETS},
    )
    text = as_text(report)
    assert max(map(len, text.splitlines())) <= 100
    assert "language_model.layers.0-47 (each of 48)" in text and "audio_tower" in text
    assert "stripped talker, code2wav: 3,540,613,057 parameters" in text
    assert "Qwen3OmniMoeTalkerDecoderLayer" in text and "fsdp2 takes them as they are" in text
    assert "tied            model.embed_tokens.weight = lm_head.weight" in as_text(
        report_of(save(tiny_llama(tie_word_embeddings=True)))
    )


def test_sizes_are_read_easily():
    assert [size_text(n) for n in (0, 1023, 1536, 2**30, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "1.00 GiB",
        "3,072.00 GiB",
    ]


RECIPE = """
model: {{path: {path}, dtype: bfloat16}}
lora: {{rank: 4, targets: [q_proj, v_proj]}}
data: {{train: {{task: sums}}}}
reward: [{{name: exact_match}}]
"""


def test_a_recipe_brings_its_model_dtype_and_adapter(save, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(path=save(tiny_llama())))
    told = as_json(report_of(recipe))
    assert told["num_trainable"] == 2 * 4 * (32 + 32 + 32 + 16)
    assert {"bfloat16", "float32"} == {dtype for unit in told["units"] for dtype in unit["dtypes"]}
    assert as_json(report_of(recipe, lora={"rank": 8}))["num_trainable"] == 2 * told["num_trainable"]


def test_policies_reach_the_plan(save):
    source = save(tiny_llama())
    by_class = report_of(source, policy=LayerClasses(("LlamaMLP",))).plan
    assert "model.layers.1.mlp" in [unit.module for unit in by_class.units]
    assert len(report_of(source, policy=MinParams(4000)).plan.units) == 3
    assert len(report_of(source, policy=Modules(("model.layers.0",))).plan.units) == 2


def test_the_command_prints_json_and_text(save, capsys):
    words = ["plan", save(tiny_llama()), "--world-size", "2", "--lora-rank", "2", "--targets", "q_proj,v_proj"]
    assert run([*words, "--policy", "modules:model.layers.*,**.layers.*", "--layer-classes", ""]) == 2
    capsys.readouterr()
    assert run([*words, "--json", "--bucket-mib", "1", "--wire-dtype", "bfloat16"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1 and told["num_trainable"] == 2 * 2 * (32 + 32 + 32 + 16)
    assert set(told["exports"][0]) == {
        "kind", "to", "num_tensors", "nbytes", "received_max", "received_total", "num_exchanges", "extra_bytes",
        "refused",
    }  # fmt: skip
    assert run([*words, "--policy", "min-params:4000", "--backend", "fsdp1"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "layer"], "--policy: expected layers, min-params:NUMBER or modules:GLOB"),
        (["--policy", "min-params:0"], "--policy: expected"),
        (["--policy", "modules:**.mlpp"], "glob '**.mlpp' matches no module"),
        (["--policy", "min-params:5", "--layer-classes", "A"], "--layer-classes goes with --policy layers"),
        (["--layer-classes", "LlamaDecoderLayer,LlamaMLPP"], "layer class 'LlamaMLPP' is not in the model; near it there are ['LlamaMLP'"),
        (["--strip", "model.layrs"], "no module 'model.layrs'; near it there are"),
        (["--targets", "q_prj,v_proj"], "'q_prj' matches no module of the model"),
        (["--targets", "q_proj,v_proj", "--target-parameters", "mlp.expert"], "target parameter 'mlp.expert' matches no parameter"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_exit_code_2(words, message, save, capsys):
    assert run(["plan", save(tiny_llama()), "--world-size", "2", *words]) == 2
    assert message in capsys.readouterr().err


def test_sources_that_are_none_are_told(tmp_path, capsys):
    assert run(["plan", str(tmp_path / "gone"), "--world-size", "2"]) == 2
    assert "does not exist; expected a folder with config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    assert run(["plan", str(tmp_path), "--world-size", "2"]) == 2
    assert "is not a configuration that transformers knows" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="does not exist"):
        report_of(tmp_path / "gone.yaml")
    with pytest.raises(SystemExit) as end:
        run(["plan", str(tmp_path), "--world-size", "0"])
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"num_attention_heads": 5}, "hidden size (32) is not a multiple of the number of attention heads (5)"),
        ({"num_attention_heads": 0}, "zero"),
        ({"num_key_value_heads": 0}, "cannot build the model: ZeroDivisionError"),
        ({"hidden_size": "32"}, "'hidden_size' expected int, got str"),
        ({"vocab_size": None}, "'vocab_size' expected int, got NoneType"),
        ({"hidden_act": "nope"}, "cannot build the model: KeyError: 'nope'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; expected a number that is not negative"),
    ],
)
def test_a_configuration_that_makes_no_model_is_told_with_its_file(field, message, save, capsys):
    file = Path(save(tiny_llama())) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **field}))
    assert run(["plan", str(file), "--world-size", "2"]) == 2
    said = capsys.readouterr().err
    assert message in said and str(file) in said
