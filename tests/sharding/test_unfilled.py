"""Tensors on meta when a model is sharded: they are known as empty until they have values, on both backends; nothing empty is exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from helpers_sharded import check_holds, save_model, whole_of
from lockstep import AdapterExport, FullExport, MergedExport, export_weights
from lockstep.dist import World
from lockstep.errors import IncompleteExport, ModelError
from lockstep.known_warnings import while_injecting
from lockstep.model.load import build_empty, find_model
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.fill import fill
from lockstep.sharding.shard import shard
from lockstep.testing import run_ranks, tiny_llama

IDS = torch.arange(1, 9)[None]
BACKENDS: list[dict[str, Any]] = [
    {"backend": "fsdp2"},
    {"backend": "fsdp1"},
    {"backend": "fsdp1", "use_orig_params": False},
]


def on_meta(folder: str, **lora: Any) -> nn.Module:
    """Everything on meta but the buffers; with `lora`, adapters too."""
    model = build_empty(find_model(folder), dtype=torch.float32, attention="sdpa")
    if not lora:
        return model
    with while_injecting(), torch.device("meta"):
        return get_peft_model(model, LoraConfig(r=2, **lora))


def make_adapter_real(model: nn.Module) -> nn.Module:
    for name, param in list(model.named_parameters()):
        if "lora_" in name:
            path, _, leaf = name.rpartition(".")
            made = nn.Parameter(torch.full(param.shape, 0.25), requires_grad=param.requires_grad)
            model.get_submodule(path)._parameters[leaf] = made
    return model


def check_export_is_refused(sharded: ShardedModel, first: str) -> None:
    exports = [FullExport()] if not hasattr(sharded.skeleton, "peft_config") else [AdapterExport(), MergedExport()]
    for what in exports:
        with pytest.raises(
            IncompleteExport, match=rf"tensors have no values yet, first '{first}': call lockstep\.fill"
        ):
            export_weights(sharded, what)


def check_exports(sharded: ShardedModel) -> None:
    what = AdapterExport() if hasattr(sharded.skeleton, "peft_config") else FullExport()
    with export_weights(sharded, what) as stream:
        for bucket in stream:
            assert all(bool(tensor.isfinite().all()) for _, tensor in bucket.tensors)


def check_buffers(world: World, folders: dict[str, str]) -> None:
    """Buffers that rank 0 alone has arrive; those that nobody has are in the plan, and `fill` gives them."""
    plain = tiny_llama()
    whole, buffers = whole_of(plain), dict(plain.named_buffers())
    with torch.no_grad():
        logits = plain(input_ids=IDS).logits
    for options in BACKENDS:
        model = tiny_llama()
        if world.rank == 1:
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = buffer.to("meta") if buffer is not None else None
        sharded = shard(model, **options)
        assert sharded.unfilled() == []
        check_holds(sharded, whole, buffers)
        empty = on_meta(folders["untied"]).to("meta")
        sharded = shard(empty, **options)
        planned = [tensor.name for tensor in (*sharded.plan.parameters, *sharded.plan.buffers)]
        assert sharded.unfilled() == planned and buffers.keys() < set(planned)
        check_export_is_refused(sharded, planned[0])
        fill(sharded, folders["untied"])
        check_holds(sharded, whole, buffers)
        with torch.no_grad():
            assert torch.equal(sharded.module(input_ids=IDS).logits, logits)
        check_exports(sharded)


def check_adapters(world: World, folders: dict[str, str]) -> None:
    """What no checkpoint has: refused by `fill` and by exports, by name, on FSDP1 too, where it has memory."""
    lora, tokens = r"base_model.*lora_A\.default\.weight", r"base_model.*trainable_tokens_delta\.default"
    for options in BACKENDS:
        sharded = shard(on_meta(folders["untied"], target_modules=["q_proj"]), **options)
        with pytest.raises(ModelError, match=rf"4 adapter tensors have no values.*first '{lora}'"):
            fill(sharded, folders["untied"])
        check_export_is_refused(sharded, "base_model.*")
        if options.get("use_orig_params", True):  # a flat parameter of both kinds is refused there
            model = on_meta(folders["untied"], target_modules=["q_proj"], trainable_token_indices=[1, 3])
            with pytest.raises(ModelError, match=rf"1 adapter tensors have no values.*first '{tokens}'"):
                fill(shard(make_adapter_real(model), **options), folders["untied"])


def check_saved_modules(world: World, folders: dict[str, str]) -> None:
    """A trained copy starts from the checkpoint's values, beside the original; tied or not, as PEFT has it (CASES B08)."""
    for name, ties in (("untied", False), ("tied", False), ("tied", True)):
        stored = load_file(f"{folders[name]}/model.safetensors")["model.embed_tokens.weight"]
        for options in BACKENDS:
            model = on_meta(
                folders[name], target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=ties
            )
            if ties and not options.get("use_orig_params", True):
                with pytest.raises(
                    ModelError, match=r"modules_to_save\.default\.weight of unit .* is tied to .*use_orig_params=True"
                ):
                    shard(make_adapter_real(model), **options)
                continue
            sharded = shard(make_adapter_real(model), **options)
            copies = [each for each in sharded.unfilled() if ".modules_to_save." in each]
            assert copies
            check_export_is_refused(sharded, "base_model.*")
            fill(sharded, folders[name])
            for tensor in sharded.plan.parameters:
                if "embed_tokens" in tensor.name or (name == "tied" and "lm_head" in tensor.name):
                    start, stop = sharded.ranges(tensor.name)[world.rank]
                    assert torch.equal(sharded.local_flat(tensor.name), stored.reshape(-1)[start:stop]), tensor.name
            check_exports(sharded)
            heads = [t for t in sharded.plan.parameters if any("lm_head" in each for each in (t.name, *t.aliases))]
            is_trained = any(t.is_trainable for t in heads)
            assert is_trained == ties, (name, options, heads)


def check_everything(world: World, folders: dict[str, str]) -> None:
    for check in (check_buffers, check_adapters, check_saved_modules):
        check(world, folders)


def test_what_has_no_values_is_known_until_it_has(tmp_path):
    models = {"untied": tiny_llama(), "tied": tiny_llama(tie_word_embeddings=True)}
    folders = {name: save_model(model, tmp_path / name) for name, model in models.items()}
    run_ranks(2, check_everything, folders, timeout_s=120)
