"""Exported folders are loaded by plain transformers and PEFT, whatever is tied, replaced or left out of the wrapping: nothing is
missing, nothing is left over, and the logits are those of the trained model (CASES table j, B08, B10, B11, B33, B65, B66)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import lockstep
from helpers_foreign import by_fsdp1, by_fully_shard, known_warnings, layers, with_peft
from helpers_matrix import collect, difference
from lockstep.checkpoint import save_adapter_folder
from lockstep.dist import World
from lockstep.errors import IncompleteExport
from lockstep.export.stream import export_weights
from lockstep.model.lora import adapter_config_json
from lockstep.sharding.attach import attach
from lockstep.testing import run_ranks, tiny_llama

IDS = torch.tensor([[3, 5, 27, 17, 51, 25, 11, 33]])


def lora(*targets: str, **options: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, target_modules=list(targets), **options)


CASES: dict[str, tuple[bool, LoraConfig, str]] = {
    "plain, untied": (False, lora("q_proj", "down_proj"), ""),
    "plain, tied": (True, lora("q_proj", "down_proj"), ""),
    "head, untied": (False, lora("q_proj", "lm_head"), ""),
    "head, tied": (True, lora("q_proj", "lm_head"), "untie"),
    "embedding, tied": (True, lora("embed_tokens"), "untie"),
    "own head, untied": (False, lora("q_proj", modules_to_save=["lm_head"]), ""),
    "own head, tied": (True, lora("q_proj", modules_to_save=["lm_head"]), "untie"),
    "own embedding, tied": (True, lora("q_proj", modules_to_save=["embed_tokens"]), "untie"),
    "own embedding, untied": (False, lora("q_proj", modules_to_save=["embed_tokens"]), ""),
    "tokens, untied": (False, lora("q_proj", trainable_token_indices=[3, 5]), ""),
    "tokens, tied": (True, lora("q_proj", trainable_token_indices=[3, 5]), ""),
}
"""(is the model tied, adapter, what the merged export needs)"""


def make(name: str, adapter: str) -> Any:
    """Random values in everything that the adapter trains. Equal in every process."""
    is_tied, config, _ = CASES[name]
    model: Any = with_peft(tiny_llama(tie_word_embeddings=is_tied), config, adapter)
    generator = torch.Generator().manual_seed(2)
    for param in model.parameters():
        if param.requires_grad:
            param.data.add_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


def all_but_one_layer(model: nn.Module) -> nn.Module:
    """A layer that no wrapping found falls to the root."""
    for each in layers(model)[1:]:
        fully_shard(each)
    return fully_shard(model)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fully_shard": by_fully_shard,
    "all but one layer": all_but_one_layer,
    "FSDP1": by_fsdp1,
}


def check_case(name: str, wrap: str, folder: Path) -> None:
    is_tied, _, needs = CASES[name]
    plain = make(name, "policy").eval()
    sharded = attach(WRAPS[wrap](make(name, "policy")))
    adapter = collect(sharded, lockstep.AdapterExport())
    wanted = get_peft_model_state_dict(plain, adapter_name="policy", save_embedding_layers=False)
    assert not difference(adapter, {key: value.detach() for key, value in wanted.items()})
    if needs:
        with pytest.raises(IncompleteExport, match="are tied in the base model"):
            export_weights(sharded, lockstep.MergedExport())
    with export_weights(sharded, lockstep.MergedExport(untie=bool(needs))) as stream:
        merged = {key: value for bucket in stream for key, value in bucket.items()}
    assert len(stream.notes) == bool(needs) and all("tie_word_embeddings=False" in note for note in stream.notes)
    assert ("lm_head.weight" in merged) == (not is_tied or bool(needs))
    full = collect(sharded, lockstep.FullExport())
    assert not difference(full, {key: value.detach() for key, value in saved(tiny_llama(tie_word_embeddings=is_tied))})
    if sharded.world.is_main:
        with torch.no_grad():
            check_merged_loads(plain, merged, folder / "merged", is_tied=is_tied and not needs)
            check_adapter_loads(plain, adapter, folder / "adapter", is_tied=is_tied)


def saved(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(key, value) for key, value in model.state_dict().items() if key not in (model.all_tied_weights_keys or {})]


def check_merged_loads(plain: Any, merged: dict[str, torch.Tensor], folder: Path, *, is_tied: bool) -> None:
    """A file of the export beside the base's configuration is a checkpoint; what it computes is what was trained, not the base."""
    base = plain.get_base_model()
    base.config.save_pretrained(folder)
    save_file(
        {key: value.contiguous() for key, value in merged.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=is_tied, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == is_tied
    logits = plain(input_ids=IDS).logits
    # fp32: the adapter is added to the weight, and not to the output.
    torch.testing.assert_close(loaded(input_ids=IDS).logits, logits, rtol=1e-4, atol=1e-5)
    with plain.disable_adapter():
        assert (plain(input_ids=IDS).logits - logits).abs().max() > 1e-2


def check_adapter_loads(plain: Any, adapter: dict[str, torch.Tensor], folder: Path, *, is_tied: bool) -> None:
    save_adapter_folder(folder, adapter, adapter_config_json(plain, "policy"))
    loaded = PeftModel.from_pretrained(tiny_llama(tie_word_embeddings=is_tied), str(folder))
    assert torch.equal(loaded(input_ids=IDS).logits, plain(input_ids=IDS).logits)


def check_all(world: World, folder: str) -> None:
    with known_warnings():
        warnings.filterwarnings("ignore", message="(?s).*(tie_word_embeddings|tied)")  # PEFT's advice on ties
        for name in CASES:
            for wrap in WRAPS:
                try:
                    check_case(name, wrap, Path(folder) / f"{name} {wrap}")
                except Exception as error:
                    raise AssertionError(f"{name}, {wrap}: {type(error).__name__}: {error}") from error


def test_exports_load_again_and_compute_what_was_trained(tmp_path):
    run_ranks(2, check_all, str(tmp_path), timeout_s=200)
