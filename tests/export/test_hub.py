"""Names, shapes, dtypes and values of full and merged exports are those of the file that transformers itself saves."""

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.core_model_loading import Chunk, Concatenate, WeightConverter, WeightRenaming

import helpers_models
from lockstep.errors import IncompleteExport
from lockstep.export.hub import hub_plan, hub_tensors, plain_names, to_hub
from lockstep.export.merge import merge_elements, merge_scratch
from lockstep.export.merge_plan import plan_merges
from lockstep.model.peft_tree import adapter_names
from lockstep.sharding.skeleton import skeleton

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def tiny_llama(*, seed: int = 0, is_tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(**helpers_models.WORDS, **helpers_models.DECODER, tie_word_embeddings=is_tied)
    return LlamaForCausalLM(config).eval()


MODELS = {
    "llama": tiny_llama,
    "llama tied": lambda: tiny_llama(is_tied=True),
    "qwen2": helpers_models.tiny_qwen2,
    "gpt2": helpers_models.tiny_gpt2,
    "gemma3": helpers_models.tiny_gemma3,
    **({"gemma4": helpers_models.tiny_gemma4} if helpers_models.HAS_GEMMA4 else {}),
    "mixtral": helpers_models.tiny_mixtral,
    "qwen3moe": helpers_models.tiny_qwen3_moe,
    "qwen2vl": helpers_models.tiny_qwen2_vl,
    **({"qwen3omni": helpers_models.tiny_qwen3_omni} if helpers_models.PEFT_TAKES_PATTERNS else {}),
}
LORA = {
    **{key: {"target_modules": ["q_proj", "down_proj"]} for key in MODELS},
    "gpt2": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    "mixtral": {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    "qwen3moe": {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    "qwen3omni": {"target_modules": helpers_models.OMNI_TARGETS},
}
LOADABLE = [name for name in MODELS if name not in ("qwen2vl", "qwen3omni")]


def make(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():  # some constructors leave memory as it was, or all zero
        param.data = torch.randn(param.shape, generator=generator) * 0.2
    return model.to(dtype)


def with_lora(model: PreTrainedModel, adapter: str = "default", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(model, LoraConfig(**{"r": 2, "lora_alpha": 6, **options}), adapter_name=adapter)
    fill_adapters(peft)
    return peft


def fill_adapters(model: nn.Module) -> None:
    """Random values in everything that trains: an adapter that does nothing would hide what is lost."""
    torch.manual_seed(1)
    for param in model.parameters():
        if param.requires_grad:
            param.data = torch.randn_like(param) * 0.1 + param.data * 0.5


def saved(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in found.items()}


def export(model: nn.Module, adapter: str | None = None, *, untie: bool = False) -> dict[str, torch.Tensor]:
    """What an export would send, from whole tensors in one process. Every output must be as planned."""
    shape, live = skeleton(model, {}), tensors(model)
    values = dict(live)
    if adapter is not None:
        merges = plan_merges(shape, adapter)
        for merge in merges.rows.values():
            base = live[merge.base]
            merged = merge_elements(merge, base.reshape(-1), start=0, a=live[merge.a], b=live[merge.b])
            values[merge.base] = merged.reshape(base.shape)
        for merge in merges.scratch:
            values |= merge_scratch(shape, merge, {name: live[name].clone() for name in merge.inputs})
    out = {}
    for tensor in hub_tensors(shape, adapter=adapter, untie=untie):
        made = to_hub(shape, tensor, [values[name] for name in tensor.sources])
        assert [(name, tuple(value.shape), value.dtype) for name, value in made] == [
            (spec.name, spec.shape, spec.dtype) for spec in tensor.outputs
        ]
        assert not tensor.is_plain or made[0][1].data_ptr() == values[tensor.sources[0]].data_ptr()
        assert not set(out) & {name for name, _ in made}
        out |= dict(made)
    return out


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert sorted(left) == sorted(right)
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_full_export_equals_the_saved_file(name, dtype, tmp_path):
    wanted = saved(make(name, dtype), tmp_path)
    same(export(make(name, dtype)), wanted)
    same(export(with_lora(make(name, dtype), **LORA[name])), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_merged_export_equals_the_saved_file_of_pefts_merge(name, tmp_path):
    model = with_lora(make(name), **LORA[name])
    wanted = saved(copy.deepcopy(model).merge_and_unload(), tmp_path / "merged")
    before = saved(make(name), tmp_path / "base")
    assert any(not torch.equal(value, before[key]) for key, value in wanted.items())
    same(export(model, "default"), wanted)


@pytest.mark.parametrize("name", LOADABLE)
def test_an_exported_folder_loads_as_a_plain_model(name, tmp_path):
    model = with_lora(make(name), **LORA[name])
    make(name).save_pretrained(tmp_path)
    save_file(export(model, "default"), tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.tensor([[3, 9, 27, 5]])
    with torch.no_grad():
        wanted, plain = model(ids).logits, make(name)(ids).logits
        got = loaded(ids).logits
    assert (wanted - plain).abs().max() > 1e-3
    torch.testing.assert_close(
        got, wanted, rtol=1e-3, atol=2e-4
    )  # the adapter is applied apart in one, merged in the other


@pytest.mark.parametrize("adapter", ["default", "night-owl_2"])
def test_modules_to_save_are_exported_under_the_plain_name(adapter, tmp_path):
    model = with_lora(make("llama"), adapter, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"])
    merged = export(model, adapter)
    same(merged, saved(copy.deepcopy(model).merge_and_unload(), tmp_path / "merged"))
    assert torch.equal(merged["lm_head.weight"], model.base_model.model.lm_head.modules_to_save[adapter].weight)
    same(export(model), saved(make("llama"), tmp_path / "base"))


@pytest.mark.skipif(
    not helpers_models.PEFT_UNLOADS_THE_EMPTY, reason="PEFT before 0.21 cannot make what is compared with"
)
def test_two_adapters_are_merged_each_for_itself(tmp_path):
    model = with_lora(make("llama"), target_modules=["q_proj"], modules_to_save=["lm_head"])
    model.add_adapter("other", LoraConfig(r=3, target_modules=["q_proj", "k_proj"], modules_to_save=["norm"]))
    model.set_adapter("other")
    fill_adapters(model)
    model.set_adapter("default")
    for adapter, other in (("default", "other"), ("other", "default")):
        alone = copy.deepcopy(model)
        alone.set_adapter(adapter)
        alone.delete_adapter(other)
        wanted = saved(alone.merge_and_unload(), tmp_path / adapter)
        same(export(model, adapter), wanted)


class Odd(nn.Module):
    """A model whose own modules are called as PEFT's and FSDP's are."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.ModuleDict({"module": nn.Linear(8, 8), "modules_to_save": nn.Linear(8, 8)})
        self.base_model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("cache", torch.arange(3), persistent=False)

    def forward(self, x):
        return self.base_model(self.base_layer["modules_to_save"](self.base_layer["module"](x)))


def test_a_users_own_names_survive():
    torch.manual_seed(0)
    model = with_lora(Odd(), target_modules=["module", "base_model.0"], modules_to_save=["modules_to_save"])
    wanted = Odd().state_dict()
    assert sorted(export(model)) == sorted(wanted) == sorted(export(Odd()))
    merged = export(model, "default")
    alone = copy.deepcopy(model).base_model.model  # PEFT takes Odd for one of its layers, and cannot merge the whole
    first, second = alone.base_layer["module"], alone.base_model[0]
    first.merge()
    second.merge()
    changed = {"base_layer.module": first.base_layer, "base_model.0": second.base_layer}
    changed["base_layer.modules_to_save"] = alone.base_layer["modules_to_save"].modules_to_save["default"]
    for path, layer in changed.items():
        assert torch.equal(merged[f"{path}.weight"], layer.weight)
        assert not torch.equal(merged[f"{path}.weight"], export(model)[f"{path}.weight"])
    assert sorted(merged) == sorted(wanted)
    assert sorted(plain_names(skeleton(model, {})).values()) == sorted(wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ],
)
def test_weights_that_would_come_apart_are_refused_or_exported_apart(options):
    model = with_lora(make("llama tied"), **options)
    shape = skeleton(model, {})
    with pytest.raises(IncompleteExport, match=r"model.embed_tokens.weight.*lm_head.weight.*tied.*untie=True"):
        hub_plan(shape, adapter="default")
    assert hub_plan(shape, adapter=None).notes == ()
    plan = hub_plan(shape, adapter="default", untie=True)
    assert len(plan.notes) == 1
    assert "lm_head.weight" in plan.notes[0]
    assert "tie_word_embeddings=False" in plan.notes[0]
    check_untied(model, export(model, "default", untie=True))


def check_untied(model, merged: dict[str, torch.Tensor]) -> None:
    """Loaded untied, the export computes what PEFT's own forward does."""
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    plain = LlamaForCausalLM(config).eval()
    plain.load_state_dict(merged, strict=True)
    ids = torch.tensor([[3, 9, 27, 5]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model.eval()(ids).logits, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 9]}},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ],
)
def test_weights_that_stay_equal_are_exported_once(options):
    model = with_lora(make("llama tied"), **options)
    assert hub_plan(skeleton(model, {}), adapter="default").notes == ()
    merged = export(model, "default")
    assert "lm_head.weight" not in merged
    check_untied(model, {**merged, "lm_head.weight": merged["model.embed_tokens.weight"]})


def test_what_a_model_does_not_save_is_left_out(tmp_path):
    class Forgetful(LlamaForCausalLM):
        _keys_to_ignore_on_save = ["model.norm.weight"]  # noqa: RUF012

    model = Forgetful(make("llama").config)
    model.register_buffer("kept", torch.ones(2))
    model.register_buffer("lost", torch.ones(2), persistent=False)
    wanted = saved(model, tmp_path)
    assert "kept" in wanted
    same(export(model), wanted)


class Thirds(Chunk):
    """Chunks of unequal sizes (q has twice as many rows as k and v), put together again when saved."""

    @property
    def reverse_op(self):
        return Concatenate(0)


def test_tensors_that_are_saved_together_are_one_group(tmp_path):
    """A checkpoint with fused q, k and v, and a renamed norm."""
    model = make("llama")
    model._weight_conversions = [
        WeightConverter("qkv_proj.weight", ["q_proj.weight", "k_proj.weight", "v_proj.weight"], operations=[Thirds()]),
        WeightRenaming("model.final_norm", "model.norm"),
    ]
    wanted = saved(model, tmp_path)
    assert "model.layers.1.self_attn.qkv_proj.weight" in wanted
    groups = [tensor for tensor in hub_tensors(skeleton(model, {}), adapter=None) if not tensor.is_plain]
    assert [len(group.sources) for group in groups] == [3, 3]
    same(export(model), wanted)
    adapted = with_lora(model, target_modules=["q_proj", "v_proj"])
    same(export(adapted, "default"), saved(copy.deepcopy(adapted).merge_and_unload(), tmp_path / "merged"))


class Moody(Concatenate):
    """Works once, on everything, and never again."""

    calls = 0

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        Moody.calls += 1
        if Moody.calls > 2:
            raise ValueError("not today")
        return super().convert(input_dict, source_patterns, target_patterns, **kwargs)


class Halves(Chunk):
    @property
    def reverse_op(self):
        return Moody(0)


def test_a_conversion_that_cannot_be_followed_is_refused():
    model = make("llama")
    model._weight_conversions = [
        WeightConverter("qk.weight", ["q_proj.weight", "k_proj.weight"], operations=[Halves()])
    ]
    with pytest.raises(IncompleteExport, match=r"LlamaForCausalLM cannot be followed.*k_proj.*qk"):
        hub_plan(skeleton(model, {}), adapter=None)


def test_a_model_with_a_merged_adapter_is_refused():
    model = with_lora(make("llama"), target_modules=["q_proj"])
    model.merge_adapter()
    shape = skeleton(model, {})
    for adapter in (None, "default"):
        with pytest.raises(IncompleteExport, match=r"q_proj.*\['default'\] are merged"):
            hub_plan(shape, adapter=adapter)
    model.unmerge_adapter()
    hub_plan(skeleton(model, {}), adapter="default")


ADAPTERS = {
    "lora": ("llama", {"target_modules": ["q_proj"]}),
    "dora": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "bias all": ("qwen2", {"target_modules": ["q_proj"], "bias": "all"}),
    "bias lora_only": ("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "lora_bias": ("qwen2", {"target_modules": ["q_proj"], "lora_bias": True}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "modules_to_save": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": ("llama tied", {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 9]}}),
    "experts": ("qwen3moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "conv1d": ("gpt2", LORA["gpt2"]),
}


@pytest.mark.parametrize("adapter", ["default", "night-owl_2"])
@pytest.mark.parametrize("case", ADAPTERS)
def test_adapter_names_and_values_are_pefts_own(case, adapter):
    name, options = ADAPTERS[case]
    model = with_lora(make(name), adapter, **options)
    if not {"trainable_token_indices", "target_parameters"} & set(options):  # there, PEFT allows one adapter (0.19)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.add_adapter(f"{adapter}2", LoraConfig(r=3, **{**options, "bias": "none"}))
    live = tensors(model)
    named = adapter_names(skeleton(model, {}), adapter)
    # Given a state dict, PEFT does not look at the shapes: its check takes a LoRA bias for a shard and warns.
    wanted = get_peft_model_state_dict(
        model, state_dict=model.state_dict(), adapter_name=adapter, save_embedding_layers=False
    )
    wanted = {file: value for file, value in wanted.items() if f"{adapter}2" not in file}  # peft 0.19 takes both
    same({file: live[source] for source, file in named.items()}, wanted)


def test_base_embeddings_are_named_only_when_asked_for():
    shape = skeleton(with_lora(make("llama"), target_modules=["embed_tokens", "lm_head"]), {})
    plain, more = adapter_names(shape, "default"), adapter_names(shape, "default", with_base_embeddings=True)
    prefix = "base_model.model."
    assert sorted(name.removeprefix(prefix) for name in plain.values()) == [
        "lm_head.lora_A.weight",
        "lm_head.lora_B.weight",
        "model.embed_tokens.lora_embedding_A",
        "model.embed_tokens.lora_embedding_B",
    ]
    base = [f"{prefix}model.embed_tokens.base_layer.weight", f"{prefix}lm_head.base_layer.weight"]
    assert {name: file for name, file in more.items() if name not in plain} == {name: name for name in base}
    with pytest.raises(IncompleteExport, match="which its embeddings are"):
        adapter_names(skeleton(with_lora(Odd(), target_modules=["module"]), {}), "default", with_base_embeddings=True)


@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")  # PEFT 0.19, of a model without a folder
def test_an_adapter_that_transformers_put_on_is_named_as_it_saves_it(tmp_path, monkeypatch):
    # transformers 5.24 asks for a newer PEFT than there is; what is under test does not depend on it.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda min_version: None)
    model = make("llama")
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="mine")
    fill_adapters(model)
    model.save_pretrained(tmp_path)
    live, wanted = tensors(model), load_file(tmp_path / "adapter_model.safetensors")
    same({file: live[name] for name, file in adapter_names(skeleton(model, {}), "mine").items()}, wanted)
    same(export(model), saved(make("llama"), tmp_path / "base"))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2


def test_an_injected_adapter_is_named_as_peft_names_it(tmp_path):
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"])
    model = inject_adapter_in_model(config, make("llama"), adapter_name="mine")
    fill_adapters(model)
    live, wanted = tensors(model), get_peft_model_state_dict(model, adapter_name="mine")
    same({file: live[name] for name, file in adapter_names(skeleton(model, {}), "mine").items()}, wanted)
    same(export(model), saved(make("llama"), tmp_path))
    where = "model.layers.0.self_attn.q_proj"
    delta = live[f"{where}.lora_B.mine.weight"] @ live[f"{where}.lora_A.mine.weight"]
    wanted_weight = live[f"{where}.base_layer.weight"] + 4 * delta
    assert torch.equal(export(model, "mine")[f"{where}.weight"], wanted_weight)


def test_an_unknown_adapter_is_refused():
    shape = skeleton(with_lora(make("llama"), target_modules=["q_proj"]), {})
    for ask in (lambda: adapter_names(shape, "nobody"), lambda: hub_plan(shape, adapter="nobody")):
        with pytest.raises(IncompleteExport, match=r"'nobody' does not exist; the model has \['default'\]"):
            ask()


def test_values_of_another_shape_are_refused():
    shape = skeleton(make("qwen3moe"), {})
    fused = next(tensor for tensor in hub_tensors(shape, adapter=None) if not tensor.is_plain)
    with pytest.raises(IncompleteExport, match="planned"):
        to_hub(shape, fused, [torch.zeros(2, *fused.outputs[0].shape)])


def test_a_model_loaded_from_a_folder_keeps_that_folders_names(tmp_path):
    """transformers remembers how it read a checkpoint; the names that it read are the names that it writes."""
    for name in ("qwen3moe", "qwen2vl", "gpt2"):
        make(name).save_pretrained(tmp_path / name)
        loaded = type(make(name)).from_pretrained(tmp_path / name)
        wanted = load_file(tmp_path / name / "model.safetensors")
        same(export(loaded), wanted)
        same(export(with_lora(loaded, **LORA[name])), wanted)
