"""Exports of models that other people's trainers wrapped equal PEFT's and transformers' own files of the same model on one
process; what was exported loads again with plain PEFT and transformers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import lockstep
from helpers_foreign import (
    BETWEEN,
    PEFT,
    WRAPS,
    Wrap,
    by_fsdp1,
    by_fully_shard,
    injected,
    known_warnings,
    nested_fsdp1,
    nested_fsdp2,
    with_peft,
    wrap_as,
)
from helpers_matrix import collect, difference
from lockstep.checkpoint import save_adapter_folder
from lockstep.dist import World
from lockstep.model.lora import adapter_config_json
from lockstep.sharding.attach import attach
from lockstep.sharding.base import ShardedModel
from lockstep.testing import run_ranks, tiny_llama

IDS = torch.tensor([[3, 9, 27, 17, 51, 25, 11, 33]])
CONFIG: dict[str, Any] = dict(r=4, lora_alpha=6, init_lora_weights=False)
LORA = LoraConfig(target_modules=["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"], **CONFIG)
"""The head's adapter belongs to the root (CASES B02)."""


def ids_of(rank: int) -> torch.Tensor:
    """Another length on every rank (CASES B38)."""
    return IDS[:, : 4 + 2 * rank]


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits.float().square().mean()


def step(model: nn.Module, loss: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    loss.backward()
    optimizer.step()


def save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path)


def write_reference(base: Callable[[], Any], config: LoraConfig, folder: Path) -> None:
    """What a single process writes: adapters as `get_peft_model` and as `inject_adapter_in_model` name them, merged and full."""
    folder.mkdir()
    model: Any = with_peft(base(), config)
    save(get_peft_model_state_dict(model, save_embedding_layers=False), folder / "adapter.safetensors")
    bare = injected(base(), config)
    save(get_peft_model_state_dict(bare, save_embedding_layers=False), folder / "injected.safetensors")  # type: ignore[arg-type]
    save(
        saved_by_transformers(copy.deepcopy(model).merge_and_unload(), folder / "merged"), folder / "merged.safetensors"
    )
    save(saved_by_transformers(base(), folder / "full"), folder / "full.safetensors")
    loss = (loss_of(model, ids_of(0)) + loss_of(model, ids_of(1))) / 2
    step(model, loss, [param for param in model.parameters() if param.requires_grad])
    save(get_peft_model_state_dict(model, save_embedding_layers=False), folder / "stepped.safetensors")


def saved_by_transformers(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def check_cell(folder: Path, wrap: str, between: str, peft: str) -> None:
    make, around = PEFT[peft]
    sharded = attach(around(make(tiny_llama(), LORA), wrap_as(WRAPS[wrap], between)))
    name = "injected" if peft == "inject_adapter_in_model" else "adapter"
    came = collect(sharded, lockstep.AdapterExport())
    assert not difference(came, load_file(folder / f"{name}.safetensors"))
    assert not difference(collect(sharded, lockstep.MergedExport()), load_file(folder / "merged.safetensors"))
    assert not difference(collect(sharded, lockstep.FullExport()), load_file(folder / "full.safetensors"))
    if name == "adapter" and sharded.world.is_main and between in ("nothing", "compiled layers"):
        check_loads(sharded, came, folder / f"out-{wrap}-{between}-{peft}".replace(" ", "-"))


def check_loads(sharded: ShardedModel, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """CASES B60 and B61: by plain PEFT, without a missing key (a warning there is an error here), and every B does something."""
    save_adapter_folder(folder, tensors, adapter_config_json(sharded.skeleton))
    loaded = PeftModel.from_pretrained(tiny_llama(), str(folder))
    assert not difference(get_peft_model_state_dict(loaded, save_embedding_layers=False), tensors)
    assert min(float(param.abs().max()) for name, param in loaded.named_parameters() if "lora_B" in name) > 0


def check_step(folder: Path, wrap: Wrap, between: str) -> None:
    """CASES B36: an export before the first forward, then a step; and another after it. CASES B38: unequal lengths per rank."""
    live = wrap_as(wrap, between)(with_peft(tiny_llama(), LORA))
    sharded = attach(live)
    assert not difference(collect(sharded, lockstep.AdapterExport()), load_file(folder / "adapter.safetensors"))
    collect(sharded, lockstep.MergedExport(), to=0)
    step(live, loss_of(live, ids_of(sharded.world.rank)), [param for _, param in sharded.trainable()])
    wanted, before = (load_file(folder / f"{name}.safetensors") for name in ("stepped", "adapter"))
    for again in (sharded, attach(live)):
        came = collect(again, lockstep.AdapterExport())
        assert came.keys() == wanted.keys()
        for name, value in came.items():
            # The same fp32 sums in another order.
            torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)
            assert not torch.equal(value, before[name]), name


class Encoder(nn.Linear):
    """A class that can be named in a policy."""


class Nested(nn.Module):
    """The language model is deep inside; a module is called `module`, another is never run (CASES B05, B37); buffers change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.module = nn.Linear(64, 64)
        self.enc = Encoder(6, 5).requires_grad_(False)
        self.model = nn.Module()
        self.model.language_model = tiny_llama()
        self.register_buffer("routing_bias", torch.linspace(0, 1, 7))
        self.register_buffer("num_steps", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, input_ids: torch.Tensor) -> Any:
        out = self.model.language_model(input_ids=input_ids)
        out.logits = self.module(out.logits)
        return out


def change_buffers(model: Any) -> None:
    model.get_buffer("routing_bias").mul_(-2)
    model.get_buffer("num_steps").add_(70_000)


def wrap_nested(model: nn.Module, kind: str) -> nn.Module:
    if kind != "FSDP2":
        return by_fsdp1(model, leaves=kind == "FSDP1, leaves", also=(Encoder,))
    fully_shard(model.get_submodule("base_model.model.enc"))
    return by_fully_shard(model)


def check_nested(kind: str) -> None:
    plain: Any = with_peft(Nested(), LORA)
    sharded = attach(wrap_nested(with_peft(Nested(), LORA), kind))
    for _ in range(2):  # a buffer that changes between two exports is exported as it is now (CASES B55)
        merged = copy.deepcopy(plain).merge_and_unload().state_dict()
        assert not difference(collect(sharded, lockstep.MergedExport()), merged)
        # CASES B71: floats are cast, whole numbers are not.
        cast = {name: value.bfloat16() if value.is_floating_point() else value for name, value in merged.items()}
        assert not difference(collect(sharded, lockstep.MergedExport(), dtype=torch.bfloat16), cast)
        assert not difference(
            collect(sharded, lockstep.AdapterExport()), get_peft_model_state_dict(plain, save_embedding_layers=False)
        )
        full = collect(sharded, lockstep.FullExport())
        assert full.keys() == merged.keys() == Nested().state_dict().keys()
        assert torch.equal(full["num_steps"], plain.get_buffer("base_model.model.num_steps"))
        inner = next(each for each in sharded.module.modules() if isinstance(each, Nested))
        change_buffers(inner)
        change_buffers(plain.base_model.model)
    step(sharded.module, loss_of(sharded.module, IDS), [param for _, param in sharded.trainable()])
    assert any(
        not torch.equal(value, merged[name]) for name, value in collect(sharded, lockstep.MergedExport()).items()
    )


def check_many(world: World, folder: str) -> None:
    path = Path(folder)
    with known_warnings():
        for wrap, between, peft in itertools.product(WRAPS, BETWEEN, PEFT):
            if peft == "get_peft_model" or between in ("nothing", "checkpointing inside", "compiled layers"):
                explain(check_cell, path / "untied", wrap, between, peft)
        for wrap in WRAPS.values():
            for between in ("nothing", "checkpointing inside"):
                explain(check_step, path / "untied", wrap, between)
        for wrap in (nested_fsdp1, nested_fsdp2):
            explain(check_step, path / "untied", wrap, "nothing")
        for kind in ("FSDP2", "FSDP1", "FSDP1, leaves"):
            explain(check_nested, kind)


def explain(check: Callable[..., None], *args: Any, **options: Any) -> None:
    try:
        check(*args, **options)
    except Exception as error:
        raise AssertionError(f"{check.__name__} {args} {options}: {type(error).__name__}: {error}") from error


def test_other_peoples_models_export_what_one_process_writes(tmp_path):
    write_reference(tiny_llama, LORA, tmp_path / "untied")
    run_ranks(2, check_many, str(tmp_path), timeout_s=300)
