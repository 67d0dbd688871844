"""Every parameter belongs to exactly one unit, the nearest; policies find, warn or refuse; a plan compares by its lines."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lockstep.errors import ModelError
from lockstep.sharding.fsdp2 import row_ranges
from lockstep.sharding.plan import LayerClasses, MinParams, Modules, plan_sharding
from lockstep.testing import tiny_llama


def lora_model(**overrides):
    return get_peft_model(tiny_llama(**overrides), LoraConfig(target_modules="all-linear", r=2))


def test_layers_are_units_and_the_root_has_the_rest():
    model = lora_model()
    plan = plan_sharding(model)
    assert [unit.module for unit in plan.units] == [
        "base_model.model.model.layers.0",
        "base_model.model.model.layers.1",
        "",
    ]
    names = [tensor.name for tensor in plan.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert {tensor.name for tensor in plan.units[-1].parameters} == {
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.model.norm.weight",
        "base_model.model.lm_head.weight",
    }
    assert {tensor.name for tensor in plan.buffers} == {name for name, _ in model.named_buffers()}
    assert sum(unit.nbytes for unit in plan.units) == sum(param.numel() * 4 for param in model.parameters())
    assert plan.largest_unit_bytes == max(unit.nbytes for unit in plan.units)
    assert "base_model.model.model.layers.0" in plan.table(2) and "on each of 2 ranks" in plan.table(2)


def test_tied_weights_stand_once_with_their_alias():
    plan = plan_sharding(lora_model(tie_word_embeddings=True))
    (embedding,) = [tensor for tensor in plan.parameters if "embed_tokens" in tensor.name]
    assert embedding.aliases == ("base_model.model.lm_head.weight",)
    assert "lm_head.weight" not in {tensor.name for tensor in plan.parameters}


def test_a_parameter_of_two_units_goes_to_the_root():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    plan = plan_sharding(model, Modules(("0", "1")))
    assert [tensor.name for tensor in plan.units[-1].parameters] == ["0.weight"]


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
    assert len(partly.units) == 3 and "['VisionBlock'] are not in the model" in caplog.text
    caplog.clear()
    plan_sharding(tiny_llama(), LayerClasses(("VisionBlock",)))
    assert "taking units of at least" in caplog.text


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
    assert [unit.module for unit in outer.units] == ["model.layers.0", "model.layers.1", ""]
    nested = plan_sharding(model, Modules(("model.layers.*",)))
    assert "model.layers.0.mlp" in [unit.module for unit in nested.units]
    layer = next(
        unit
        for unit in plan_sharding(model, Modules(("model.layers.0", "model.layers.0.mlp"))).units
        if unit.module == "model.layers.0"
    )
    assert not [tensor for tensor in layer.parameters if ".mlp." in tensor.name]
    with pytest.raises(ModelError, match=r"'model\.laers\.\*' matches no module"):
        plan_sharding(model, Modules(("model.laers.*",)))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 8, 65])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_rows_are_dealt_as_torch_chunk_deals_them(rows, size):
    dealt = [stop - start for start, stop in row_ranges(rows, 1, size)]
    wanted = [len(part) for part in torch.arange(rows).chunk(size)] if rows else []
    assert dealt == wanted + [0] * (size - len(wanted))
