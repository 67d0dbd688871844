"""Every parameter belongs to exactly one unit, the nearest; policies find, warn or refuse; a plan compares by its lines."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from helpers_models import tiny_qwen2_vl, tiny_qwen3_moe
from lockstep.errors import ModelError
from lockstep.sharding.fsdp2 import row_ranges
from lockstep.sharding.plan import LayerClasses, MinParams, Modules, plan_sharding, split_units
from lockstep.testing import tiny_llama


def lora_model(**overrides):
    return get_peft_model(tiny_llama(**overrides), LoraConfig(target_modules="all-linear", r=2))


LLAMA_UNITS = ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head", ""]


def units(plan):
    return [unit.module for unit in plan.units]


def test_layers_are_units_and_the_root_has_the_rest():
    model = lora_model()
    plan = plan_sharding(model)
    assert units(plan) == [
        "base_model.model.model.embed_tokens",
        "base_model.model.model.layers.0",
        "base_model.model.model.layers.1",
        "base_model.model.lm_head",
        "",
    ]
    names = [tensor.name for tensor in plan.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert [tensor.name for tensor in plan.units[-1].parameters] == ["base_model.model.model.norm.weight"]
    assert {tensor.name for tensor in plan.buffers} == {name for name, _ in model.named_buffers()}
    assert sum(unit.nbytes for unit in plan.units) == sum(param.numel() * 4 for param in model.parameters())
    assert plan.largest_unit_bytes == max(unit.nbytes for unit in plan.units)
    assert "base_model.model.model.layers.0" in plan.table(2) and "on each of 2 ranks" in plan.table(2)


def test_tied_weights_stand_once_with_their_alias():
    plan = plan_sharding(lora_model(tie_word_embeddings=True))
    (embedding,) = [tensor for tensor in plan.parameters if "embed_tokens" in tensor.name]
    assert embedding.aliases == ("base_model.model.lm_head.weight",)
    assert "lm_head.weight" not in {tensor.name for tensor in plan.parameters}


def test_modules_that_share_a_parameter_stay_in_the_unit_around_both(caplog):
    """FSDP takes a tied parameter in one group only: B10."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    plan = plan_sharding(model, Modules(("0", "1", "2")))
    assert units(plan) == ["2", ""]
    assert [tensor.name for tensor in plan.units[-1].parameters] == ["0.weight", "0.bias", "1.bias"]
    assert plan.tied == (("0.weight", "1.weight"),)
    assert "2 modules, the first '0', share ['0.weight', '1.weight']" in caplog.text


def test_one_module_under_two_names_is_one_unit():
    block = nn.Linear(3, 3)
    plan = plan_sharding(nn.ModuleDict({"a": block, "b": block, "c": nn.Linear(2, 2)}), Modules(("a", "c")))
    assert units(plan) == ["a", "c", ""]
    assert plan.units[0].parameters[0].aliases == ("b.weight",)


def test_meta_costs_nothing_and_plans_the_same():
    with torch.device("meta"):
        on_meta = tiny_llama()
    assert plan_sharding(on_meta).fingerprint() == plan_sharding(tiny_llama()).fingerprint()


@pytest.mark.parametrize(
    "change",
    [dict(hidden_size=64), dict(tie_word_embeddings=True), dict(num_hidden_layers=3), dict(attention_bias=True)],
)
def test_another_model_has_another_fingerprint(change):
    assert plan_sharding(tiny_llama(**change)).fingerprint() != plan_sharding(tiny_llama()).fingerprint()


def test_class_names_partly_and_not_found(caplog):
    caplog.set_level(logging.WARNING)
    partly = plan_sharding(tiny_llama(), LayerClasses(("LlamaDecoderLayer", "VisionBlock")))
    assert units(partly) == LLAMA_UNITS and "['VisionBlock'] are not in the model" in caplog.text
    caplog.clear()
    plan_sharding(tiny_llama(), LayerClasses(("VisionBlock",)))
    assert "no module of class ['VisionBlock'] in the model; taking units of at least" in caplog.text


def test_size_policy_never_nests():
    model = lora_model()
    for size in (1, 300, 2000, 10**9):
        names = [unit.module for unit in plan_sharding(model, MinParams(size)).units if unit.module]
        assert not [name for name in names for other in names if name.startswith(other + ".")]
        assert all(sum(param.numel() for param in model.get_submodule(name).parameters()) >= size for name in names)
    assert len(plan_sharding(model, MinParams(10**9)).units) == 1


def test_nested_classes_make_one_unit_and_globs_may_nest():
    model = tiny_llama()
    outer = plan_sharding(model, LayerClasses(("LlamaDecoderLayer", "LlamaMLP")))
    assert units(outer) == LLAMA_UNITS
    assert units(plan_sharding(model, Modules(("model.layers.*",)))) == ["model.layers.0", "model.layers.1", ""]
    everything = units(plan_sharding(model, Modules(("model.layers.*.**",))))
    # A layer whose parameters are all in units further down is none, nor is what has no parameters.
    assert len(everything) == 2 * 9 + 1 and "model.layers.0.mlp.up_proj" in everything
    layer = next(
        unit
        for unit in plan_sharding(model, Modules(("model.layers.0", "model.layers.0.mlp"))).units
        if unit.module == "model.layers.0"
    )
    assert not [tensor for tensor in layer.parameters if ".mlp." in tensor.name]
    with pytest.raises(ModelError, match=r"'model\.laers\.\*' matches no module.*model\.layers"):
        plan_sharding(model, Modules(("model.layers.0", "model.laers.*")))
    with pytest.raises(ModelError, match=r"matches only \['model\.layers'\].*no forward.*model\.layers\.\*"):
        plan_sharding(model, Modules(("model.layers",)))


@pytest.mark.parametrize("declared", [["LlamaDecoderLayer"], {"LlamaDecoderLayer"}, "LlamaDecoderLayer"])
def test_the_models_own_list_may_be_a_list_a_set_or_a_name(declared):
    model = tiny_llama()
    for module in model.modules():
        module._no_split_modules = declared
    assert units(plan_sharding(model)) == LLAMA_UNITS


@pytest.mark.parametrize("declared", [None, [], set(), ["Gone"]])
def test_a_model_without_usable_classes_falls_back_to_sizes(declared, caplog):
    """B99: None, nothing, or classes that a text-only model has not."""
    model = tiny_llama(hidden_size=1024, intermediate_size=2048, num_attention_heads=8)
    for module in model.modules():
        module._no_split_modules = declared
    plan = plan_sharding(model)
    assert {"model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"} < set(units(plan))
    assert "taking units of at least 1000000 parameters" in caplog.text
    chosen = [name for name in units(plan) if name]
    assert not [name for name in chosen for other in chosen if name.startswith(other + ".")]


def test_sub_models_bring_their_own_classes():
    """And a tower's embedding of patches is no unit, though it is what the tower calls its input embedding."""
    model = tiny_qwen2_vl()
    model.model.visual._input_embed_layer = "patch_embed"
    assert model.model.visual.get_input_embeddings() is model.model.visual.patch_embed
    assert units(plan_sharding(model)) == [
        "model.visual.blocks.0",
        "model.language_model.embed_tokens",
        "model.language_model.layers.0",
        "model.language_model.layers.1",
        "lm_head",
        "",
    ]


ADAPTERS = {
    "plain": dict(target_modules=["q_proj"]),
    "lora": dict(target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "saved": dict(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
    "tokens": dict(target_modules=["q_proj"], trainable_token_indices=[1, 2]),
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_embedding_and_head_are_told_by_role_whatever_peft_made_of_them(kind, is_tied, caplog):
    """B09: untied, one unit each, never the inner module and its wrapper; tied, both stay in the root."""
    model = get_peft_model(tiny_llama(tie_word_embeddings=is_tied), LoraConfig(r=2, **ADAPTERS[kind]))
    plan = plan_sharding(model)
    layers = [f"base_model.model.model.layers.{i}" for i in range(2)]
    ends = ["base_model.model.model.embed_tokens"], ["base_model.model.lm_head"]
    assert units(plan) == ([*layers, ""] if is_tied else [*ends[0], *layers, *ends[1], ""])
    assert bool(plan.tied) == is_tied and not caplog.records
    assert sorted(tensor.name for tensor in plan.parameters) == sorted(name for name, _ in model.named_parameters())
    assert {"mlp.up_proj.weight" in tensor.name for tensor in plan.units[-1].parameters} == {False}


@pytest.mark.parametrize("size", [1, 40, 200, 3000])
def test_size_units_hold_peft_layers_whole(size):
    """A size policy beside per-leaf LoRA units nests them: B38."""
    for config in (*ADAPTERS.values(), dict(target_modules="all-linear", use_dora=True)):
        model = get_peft_model(tiny_llama(), LoraConfig(r=2, **config))
        for unit in plan_sharding(model, MinParams(size)).units[:-1]:
            inner = set(unit.module.split(".")) & {"base_layer", "original_module", "modules_to_save", "token_adapter"}
            assert not inner and "lora" not in unit.module


def test_experts_with_lora_are_planned_once_each():
    config = LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    model = get_peft_model(tiny_qwen3_moe(), config)
    plan = plan_sharding(model)
    assert units(plan)[1:3] == ["base_model.model.model.layers.0", "base_model.model.model.layers.1"]
    assert len(list(plan.parameters)) == len(list(model.parameters()))
    assert not [name for name in units(plan_sharding(model, MinParams(1))) if "base_layer" in name]


def test_a_model_that_peft_calls_past_its_hooks_is_no_unit():
    """PEFT calls `base_model.model.forward` itself, so a hook of that module would never gather anything."""
    model = lora_model()
    total = sum(param.numel() for param in model.parameters())
    assert units(plan_sharding(model, MinParams(total - 10))) == [""]
    assert units(plan_sharding(model, LayerClasses(("LlamaForCausalLM", "LlamaDecoderLayer"))))[1].endswith("layers.0")


def test_wrappers_do_not_show_in_a_plan():
    plain = plan_sharding(lora_model())
    model = lora_model()
    layers = model.base_model.model.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    layers[1] = torch.compile(layers[1], backend="eager")
    assert plan_sharding(model).lines() == plain.lines()
    assert plan_sharding(torch.compile(lora_model(), backend="eager")).lines() == plain.lines()
    by_glob = plan_sharding(model, Modules(("**.layers.0", "**.layers.1.mlp")))
    assert units(by_glob) == ["base_model.model.model.layers.0", "base_model.model.model.layers.1.mlp", ""]


def test_a_plan_tells_what_it_saw_of_each_tensor():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model[0].weight = nn.Parameter(torch.zeros(4, 3).t())
    model[1].register_buffer("table", torch.zeros(2), persistent=False)
    plan = plan_sharding(model, Modules(("0",)))
    assert [tensor.is_contiguous for tensor in plan.units[0].parameters] == [False, True]
    assert {tensor.name: tensor.is_persistent for tensor in plan.buffers} == {
        "1.running_mean": True,
        "1.running_var": True,
        "1.num_batches_tracked": True,
        "1.table": False,
    }
    assert "parameter 0.weight torch.float32 [3, 4] trainable not contiguous" in plan.lines()
    assert "buffer 1.table torch.float32 [2] not persistent" in plan.lines()


def test_units_can_be_split_off_a_plan():
    plan = plan_sharding(tiny_llama())
    split = split_units(plan, ["model.layers.0.input_layernorm", "model.norm"])
    assert units(split) == [*LLAMA_UNITS[:2], "model.layers.0.input_layernorm", *LLAMA_UNITS[2:4], "model.norm", ""]
    assert sorted(tensor.line() for tensor in split.parameters) == sorted(tensor.line() for tensor in plan.parameters)
    assert [tensor.name for tensor in split.units[2].parameters] == ["model.layers.0.input_layernorm.weight"]
    named = Modules(("**.embed_tokens", "**.layers.?", "**.0.input_layernorm", "lm_head", "model.norm"))
    asked = {unit.module: unit for unit in plan_sharding(tiny_llama(), named).units}
    assert {unit.module: unit for unit in split.units} == asked
    for wrong in ("model.layers.0", "model.layers", "gone"):
        with pytest.raises(ModelError, match=f"cannot make '{wrong}' a unit"):
            split_units(plan, [wrong])


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 8, 65])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_rows_are_dealt_as_torch_chunk_deals_them(rows, size):
    dealt = [stop - start for start, stop in row_ranges(rows, 1, size)]
    wanted = [len(part) for part in torch.arange(rows).chunk(size)] if rows else []
    assert dealt == wanted + [0] * (size - len(wanted))


def test_the_order_in_which_a_module_registered_its_buffers_does_not_count():
    """Gemma-3 of transformers 5.1 registers its rotary tables in the order of a set, another one in each process."""

    def model(*order):
        module = nn.Linear(2, 2)
        for name in order:
            module.register_buffer(name, torch.zeros(2))
        return module

    plans = [plan_sharding(model(*order), MinParams(1)) for order in (("full", "sliding"), ("sliding", "full"))]
    assert plans[0].lines() == plans[1].lines()
    assert [tensor.name for tensor in plans[0].buffers] == ["full", "sliding"]


def test_one_name_may_stand_for_a_list_and_nonsense_is_refused():
    assert Modules("model.layers.*") == Modules(["model.layers.*"]) == Modules(("model.layers.*",))
    assert LayerClasses("LlamaDecoderLayer") == LayerClasses(("LlamaDecoderLayer",))
    for make in (lambda: Modules(()), lambda: MinParams(0)):
        with pytest.raises(ValueError, match="at least"):
            make()
