"""What kind of adapter it is, and what stands around the export: values are PEFT's own, or the refusal names what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import lockstep
from helpers_matrix import collect, difference
from helpers_models import tiny_mixtral
from lockstep.dist import World
from lockstep.errors import IncompleteExport
from lockstep.testing import run_ranks, tiny_llama

ADAPTER, MERGED, FULL = lockstep.AdapterExport(), lockstep.MergedExport(), lockstep.FullExport()
Q = "base_model.model.model.layers.0.self_attn.q_proj"
PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}


def randomised(model: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(2)
    for param in model.parameters():
        if param.requires_grad:
            param.data += 0.1 * torch.randn(param.shape, generator=generator)
    return model


def lora(**options: Any) -> Any:
    torch.manual_seed(7)
    return randomised(get_peft_model(tiny_llama(), LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **options})))


def merged_by_peft(model: Any) -> dict[str, torch.Tensor]:
    return dict(copy.deepcopy(model).merge_and_unload().state_dict())


def in_fsdp2(model: Any) -> Any:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def check_autocast(world: World) -> None:
    """On one rank only: what the ranks merge must fit together all the same."""
    for options in ({}, {"use_dora": True}):
        wanted = merged_by_peft(lora(**options))
        sharded = lockstep.attach(in_fsdp2(lora(**options)))
        with torch.autocast("cpu", torch.bfloat16) if world.is_main else nullcontext():
            assert difference(collect(sharded, MERGED), wanted) == "", options


def on_llama(config: peft.PeftConfig) -> Callable[[], Any]:
    return lambda: randomised(get_peft_model(tiny_llama(), config))


REFUSED: tuple[tuple[Callable[[], Any], Any, str], ...] = (
    (on_llama(peft.PromptTuningConfig(**PROMPT)), MERGED, "PROMPT_TUNING, which PEFT cannot merge"),
    (on_llama(peft.PromptTuningConfig(**PROMPT)), ADAPTER, "PROMPT_TUNING: PEFT computes its file"),
    (on_llama(peft.PrefixTuningConfig(**PROMPT)), MERGED, "PREFIX_TUNING, which PEFT cannot merge"),
    (on_llama(peft.PrefixTuningConfig(**PROMPT)), ADAPTER, "PREFIX_TUNING: PEFT computes its file"),
    (
        on_llama(peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM")),
        MERGED,
        "ADAPTION_PROMPT, which PEFT cannot merge",
    ),
    (
        on_llama(peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM")),
        FULL,
        "ADAPTION_PROMPT.*names cannot be followed",
    ),
    (
        on_llama(peft.FourierFTConfig(n_frequency=8, target_modules=["q_proj"])),
        MERGED,
        rf"{Q}: PEFT cannot merge this \(FourierFTLinear",
    ),
)


def check_refusals() -> None:
    for build, what, said in REFUSED:
        sharded = lockstep.attach(build())
        with pytest.raises(IncompleteExport, match=said):
            lockstep.export_weights(sharded, what)


def check_a_base_that_peft_swaps() -> None:
    build = on_llama(peft.LNTuningConfig(target_modules=["norm"]))
    wanted = merged_by_peft(build())
    assert not torch.equal(wanted["model.norm.weight"], tiny_llama().state_dict()["model.norm.weight"])
    assert difference(collect(lockstep.attach(build()), MERGED), wanted) == ""


def check_one_expert(world: World, folder: str) -> None:
    """Of two wrappers around one module each merges its own parameter."""
    for targets in (["down_proj"], ["gate_up_proj", "down_proj"]):
        model = tiny_mixtral(num_local_experts=1, num_experts_per_tok=1)
        parameters = [f"mlp.experts.{name}" for name in targets]
        model = randomised(get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=parameters)))
        came = collect(lockstep.attach(model), MERGED)
        copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
        if world.is_main:  # transformers writes there only
            assert difference(came, load_file(Path(folder) / "model.safetensors")) == "", targets


def check_scales() -> None:
    model = lora()
    sharded = lockstep.attach(model)
    layer = model.get_submodule(Q)
    layer.set_scale("default", 2.5)
    with pytest.raises(IncompleteExport, match=rf"{Q}.*scaled by 5\.0 in the model and by 2\.0 as configured"):
        lockstep.export_weights(sharded, ADAPTER)
    assert difference(collect(sharded, MERGED), merged_by_peft(model)) == ""
    layer.set_scale("default", 1)
    assert len(collect(sharded, ADAPTER)) == 4
    drifted = lora()
    drifted.peft_config["default"].lora_alpha = 99
    with pytest.raises(IncompleteExport, match=r"scaled by 2\.0 in the model and by 24\.75 as configured"):
        lockstep.export_weights(lockstep.attach(drifted), ADAPTER)
    assert len(collect(lockstep.attach(lora(use_rslora=True, alpha_pattern={"q_proj": 3})), ADAPTER)) == 4


def check_inits() -> None:
    sharded = lockstep.attach(lora(init_lora_weights="pissa"))
    assert "init_lora_weights pissa" in lockstep.export_weights(sharded, ADAPTER).notes[0]
    assert "not those of the original checkpoint" in lockstep.export_weights(sharded, FULL).notes[1]
    plain = lockstep.attach(lora())
    assert not lockstep.export_weights(plain, ADAPTER).notes
    assert len(lockstep.export_weights(plain, FULL).notes) == 1


def check_all(world: World, folder: str) -> None:
    check_autocast(world)
    check_refusals()
    check_a_base_that_peft_swaps()
    check_one_expert(world, folder)
    check_scales()
    check_inits()


def test_values_are_pefts_own_or_the_refusal_says_why(tmp_path):
    run_ranks(2, check_all, str(tmp_path), timeout_s=200)
