"""Names, shapes, dtypes and values of full and merged exports are those of the file that transformers itself saves."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lockstep.export.hub import hub_tensors, to_hub
from lockstep.export.merge import merge_elements, merge_scratch
from lockstep.export.merge_plan import plan_merges
from lockstep.sharding.skeleton import skeleton

SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
MOE = {**SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=32)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**MOE, num_local_experts=3)),
    "qwen3moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE, num_experts=5, head_dim=8)),
}
LORA = {
    **{key: {"target_modules": ["q_proj", "down_proj"]} for key in MODELS},
    "gpt2": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    "mixtral": {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    "qwen3moe": {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
}


def make(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype)


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
