"""Merged values, by element ranges and on scratch copies, equal PEFT's own merge in one process to the bit."""

import copy
import itertools
import random
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lockstep.export.merge import RowsMerge, merge_elements, merge_scratch, merge_window
from lockstep.export.merge_plan import plan_merges
from lockstep.sharding.skeleton import skeleton

SIZES = {
    "vocab_size": 67, "hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
MOE = {**SIZES, "hidden_size": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LINEAR = ["q_proj", "k_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "ragged": lambda: LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "hidden_size": 12, "intermediate_size": 7, "vocab_size": 33}, head_dim=3)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=67, n_embd=24, n_layer=2, n_head=4, n_positions=32)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**MOE, num_local_experts=3)),
    "qwen3moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE, num_experts=5, head_dim=8)),
}
CASES = {
    "lora": ("llama", {"target_modules": LINEAR}),
    "ragged": ("ragged", {"target_modules": LINEAR}),
    "rank 1": ("llama", {"target_modules": LINEAR, "r": 1}),
    "rslora": ("llama", {"target_modules": LINEAR, "use_rslora": True}),
    "patterns": ("llama", {"target_modules": LINEAR, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 64}}),
    "dora": ("llama", {"target_modules": LINEAR, "use_dora": True}),
    "lora_bias": ("qwen2", {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "dora embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}),
    "modules_to_save": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 1, 60]}}),
    "tied tokens": ("tied", {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 1, 60]}}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "gpt2 dora": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}),
    "mixtral experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "qwen3moe experts": ("qwen3moe", {"target_modules": [], "target_parameters": EXPERTS}),
}
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16+fp32": (torch.bfloat16, torch.float32),
    "fp32+bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
}


def peft_model(case: str, *, base=torch.float32, lora=torch.float32, adapter="default", more=()) -> PeftModel:
    """Every tensor that an adapter adds is random, so that whatever is left out shows."""
    name, options = CASES[case]
    torch.manual_seed(0)
    plain = MODELS[name]().to(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(**{"r": 4, "lora_alpha": 6, **options})
        model = get_peft_model(plain, config, adapter_name=adapter, autocast_adapter_dtype=False)
        for other in more:
            model.add_adapter(other, LoraConfig(**{"r": 3, "lora_alpha": 5, **options}))
    for name, param in model.named_parameters():
        if name.removeprefix("base_model.model.") not in dict(plain.named_parameters()) or param.requires_grad:
            randomise(name, param, base=base, lora=lora)
    return model


def randomise(name: str, param: nn.Parameter, *, base: torch.dtype, lora: torch.dtype) -> None:
    if (".base_layer." in name and "lora_" not in name) or "original_module" in name:
        return
    own = base if "modules_to_save" in name or "token_adapter" in name else lora
    param.data = (torch.randn(param.shape) * 0.1 + ("magnitude" in name)).to(own)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in found.items()}


def merged_by_peft(model: PeftModel, adapter: str) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    model.set_adapter(adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(model.merge_and_unload(adapter_names=[adapter]).state_dict())


def plain_name(live: str) -> str:
    parts = [part for part in live.split(".") if part not in ("base_layer", "token_adapter")]
    return ".".join(parts[2:])


def cuts(numel: int, ranks: int, rng: random.Random) -> list[int]:
    """Shard borders as FSDP2 makes them (rows) or FSDP1 does (anywhere)."""
    inner = sorted(rng.randrange(numel + 1) for _ in range(ranks - 1))
    return [0, *inner, numel]


def by_ranges(merge: RowsMerge, live: dict[str, torch.Tensor], borders: list[int]) -> torch.Tensor:
    whole, pieces = live[merge.base].reshape(-1), []
    for start, stop in itertools.pairwise(borders):
        first, last = merge_window(merge, start=start, stop=stop)
        b = live[merge.b][first:last] if merge.kind == "linear" else live[merge.b]
        first = first if merge.kind == "linear" else 0
        pieces.append(merge_elements(merge, whole[start:stop], start=start, a=live[merge.a], b=b, first_row=first))
    return torch.cat(pieces).reshape(merge.shape)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_merged_values_are_pefts_own(case, dtypes):
    base, lora = DTYPES[dtypes]
    model = peft_model(case, base=base, lora=lora)
    wanted, live = merged_by_peft(model, "default"), tensors(model)
    before = {name: tensor.clone() for name, tensor in live.items()}
    shape = skeleton(model, {})
    merges = plan_merges(shape, "default")
    assert merges.rows or merges.scratch
    rng = random.Random(case)
    for merge in merges.rows.values():
        assert (merge.base_dtype, merge.lora_dtype) == (base, lora)
        numel = live[merge.base].numel()
        for ranks in (1, 2, 3, 4, 5):
            got = by_ranges(merge, live, cuts(numel, ranks, rng))
            assert got.dtype == base
            assert torch.equal(got, wanted[plain_name(merge.base)]), (merge, ranks)
    for merge in merges.scratch:
        got = merge_scratch(shape, merge, {name: live[name].clone() for name in merge.inputs})
        assert list(got) == list(merge.outputs)
        for name, value in got.items():
            assert torch.equal(value, wanted[plain_name(name)]), (merge.module, name)
    changed = {plain_name(name) for name in merges.rows} | {
        plain_name(name) for merge in merges.scratch for name in merge.outputs
    }
    plain = {plain_name(name): tensor for name, tensor in live.items()}
    differs = {name for name, value in wanted.items() if name in plain and not torch.equal(value, plain[name])}
    assert differs <= changed
    assert all(torch.equal(before[name], tensor) for name, tensor in live.items())
