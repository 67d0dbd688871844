"""A bf16 adapter's fp32 copies are in the checkpoint: what a resumed run steps is not the rounded weights."""

from __future__ import annotations

from pathlib import Path

import torch

from helpers_sharded import save_model
from lockstep import checkpoint
from lockstep.checkpoint import TrainState
from lockstep.config import LoraSection, TrainConfig
from lockstep.dist import World
from lockstep.model.load import build_empty, find_model
from lockstep.model.lora import inject_lora
from lockstep.sharding.fill import fill
from lockstep.sharding.shard import shard
from lockstep.testing import run_ranks, tiny_llama
from lockstep.train.optim import MasterAdamW, Optimizer


def make(folder: str, seed: int) -> tuple[TrainState, Optimizer]:
    files = find_model(folder)
    model = inject_lora(build_empty(files, dtype=torch.bfloat16, attention="sdpa"), LoraSection(rank=3), seed=seed)
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(torch.bfloat16)
    sharded = shard(model, backend="fsdp2")
    fill(sharded, files, attention="sdpa")
    optimizer = Optimizer(sharded.trainable(), train=TrainConfig(), num_steps=10)
    return TrainState(sharded, optimizer.torch), optimizer


def train(state: TrainState, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(step))
        state.sharded.module(input_ids=ids).logits.float().logsumexp(-1).mean().backward()
        optimizer.step(1e-5)
        optimizer.zero_grad()


def local(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: part.elements.clone() for name, part in checkpoint._parts(state).items()}


def check_resume(world: World, model: str, out: str) -> None:
    straight, optimizer = make(model, 0)
    assert isinstance(optimizer.torch, MasterAdamW)
    train(straight, optimizer, range(3))
    checkpoint.save(Path(out), straight, step=3, keep=1)
    train(straight, optimizer, range(3, 6))
    resumed, other = make(model, 5)
    found = checkpoint.newest(Path(out), world)
    assert found is not None
    checkpoint.load(found, resumed)
    train(resumed, other, range(3, 6))
    left, right = local(straight), local(resumed)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    masters = {name: value for name, value in left.items() if name.endswith(".master")}
    assert {value.dtype for value in masters.values()} == {torch.float32}
    rounded = {name: value.to(torch.bfloat16) for name, value in masters.items()}
    assert any(not torch.equal(rounded[name].float(), masters[name]) for name in masters)
    for name, value in rounded.items():
        assert torch.equal(value, left[f"adapter.{name.removeprefix('optimizer.').removesuffix('.master')}"])


def test_a_resumed_bf16_adapter_goes_on_from_its_fp32_copies(tmp_path):
    run_ranks(2, check_resume, save_model(tiny_llama(), tmp_path / "model"), str(tmp_path / "run"))
