"""Small sharded models for tests of export, checkpoint and training: built as the loop builds them, from a folder."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from lockstep.config import LoraSection
from lockstep.dist import World
from lockstep.model.load import build_empty, find_model
from lockstep.model.lora import inject_lora
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.fill import fill
from lockstep.sharding.shard import Backend, shard


def shard_folder(
    world: World,
    folder: str,
    lora: LoraSection,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    backend: Backend = "fsdp2",
) -> ShardedModel:
    """Collective. The whole path: empty model, LoRA, plan, shard, fill."""
    files = find_model(folder)
    model = inject_lora(build_empty(files, dtype=dtype, attention="sdpa"), lora, seed=seed)
    sharded = shard(model, backend=backend)
    assert sharded.world is world
    fill(sharded, files, attention="sdpa")
    return sharded


def randomise_b(sharded: ShardedModel, seed: int = 1) -> None:
    """Give every B values that do not depend on the number of ranks, so that the adapter does something."""
    for index, (name, _) in enumerate(sharded.trainable()):
        if "lora_B" in name:
            shape = next(tensor.shape for tensor in sharded.plan.parameters if tensor.name == name)
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed * 1000 + index)) * 0.1
            start, stop = sharded.ranges(name)[sharded.world.rank]
            sharded.write_local(name, whole.reshape(-1)[start:stop])


def save_model(model, folder: Path | None = None) -> str:
    target = folder or Path(tempfile.mkdtemp())
    model.save_pretrained(target)
    return str(target)


def whole_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of an unsharded model's parameters, under all their names."""
    return {name: param.detach().clone() for name, param in model.named_parameters(remove_duplicate=False)}


def check_holds(sharded: ShardedModel, whole: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
    """Every rank's elements are the slice of the whole tensor that its range says, and all ranges together are all of it."""
    planned = [name for tensor in sharded.plan.parameters for name in (tensor.name, *tensor.aliases)]
    assert sorted(planned) == sorted(whole), set(planned) ^ set(whole)
    for tensor in sharded.plan.parameters:
        expected = whole[tensor.name]
        assert (tensor.shape, tensor.dtype) == (tuple(expected.shape), expected.dtype), tensor.name
        ranges = sharded.ranges(tensor.name)
        assert len(ranges) == sharded.world.size
        ends = [0, *(stop for _, stop in ranges)]
        assert [start for start, _ in ranges] == ends[:-1], (tensor.name, ranges)
        assert ends[-1] == expected.numel(), (tensor.name, ranges)
        start, stop = ranges[sharded.world.rank]
        mine = sharded.local_flat(tensor.name)
        assert mine.shape == (stop - start,), (tensor.name, mine.shape, ranges)
        assert not mine.requires_grad
        assert mine.dtype == expected.dtype, tensor.name
        assert torch.equal(mine.cpu(), expected.movedim(sharded.shard_dim(tensor.name), 0).reshape(-1)[start:stop]), (
            tensor.name
        )
    planned = [name for tensor in sharded.plan.buffers for name in (tensor.name, *tensor.aliases)]
    assert sorted(planned) == sorted(buffers), set(planned) ^ set(buffers)
    for name, value in buffers.items():
        assert torch.equal(sharded.buffer(name), value), name
