"""A small trainer, an engine that it pushes to, and engines with one fault each, for the canary's tests."""

from __future__ import annotations

from typing import Any

import torch

from helpers_sharded import shard_folder
from lockstep.config import LoraSection
from lockstep.dist import World
from lockstep.export.stream import export_weights
from lockstep.export.what import AdapterExport, Export
from lockstep.rollout.hf import HFEngine
from lockstep.sharding.base import ShardedModel
from lockstep.testing import tiny_llama
from lockstep.transport.inproc import push
from lockstep.types import Prompt, Sample, Sampling
from lockstep.verify.canary import Canary, probe_prompts

SAMPLING = Sampling(temperature=0.7, max_new_tokens=8)


def probe_model(**overrides: Any) -> Any:
    """A tiny Llama with room for a probe of two blocks, whose next token is far from uniform."""
    model = tiny_llama(max_position_embeddings=512, **overrides)
    model.get_output_embeddings().weight.data.mul_(12)
    return model


def make_trainer(
    world: World, folder: str, *, backend: Any = "fsdp2", dtype: Any = torch.float32, **lora: Any
) -> ShardedModel:
    section = LoraSection(**{"rank": 4, "alpha": 8, "targets": "all-linear", **lora})
    return shard_folder(world, folder, section, backend=backend, dtype=dtype)


def update(sharded: ShardedModel, *, seed: int, size: float = 0.02) -> None:
    """What an optimizer step does, without one: every B moves by random amounts that do not depend on the ranks."""
    for index, (name, _) in enumerate(sharded.trainable()):
        if "lora_B" in name or "lora_embedding_B" in name:
            shape = next(tensor.shape for tensor in sharded.plan.parameters if tensor.name == name)
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed * 1000 + index)) * size
            start, stop = sharded.ranges(name)[sharded.world.rank]
            sharded.write_local(
                name, sharded.local_flat(name) + whole.reshape(-1)[start:stop].to(sharded.local_flat(name).dtype)
            )


def deliver(sharded: ShardedModel, engine: HFEngine, version: int, what: Export | None = None) -> None:
    """Collective. The usual path: export and push."""
    with export_weights(sharded, what or AdapterExport()) as stream:
        push(stream, engine, stream.manifest(version))


def make_canary(
    sharded: ShardedModel, *, sampling: Sampling = SAMPLING, dtypes: Any = ("float32", "float32"), **more: Any
) -> Canary:
    data = [Prompt(f"p{i}", tuple((7 * i + 3 * j + i * j) % 61 + 3 for j in range(20 + i)), "", "") for i in range(9)]
    prompts = probe_prompts(data, num_prompts=2, max_len=512, num_tokens=16)
    return Canary(sharded, sampling=sampling, world=sharded.world, pad_id=0, prompts=prompts, dtypes=dtypes, **more)


def answer(canary: Canary, engine: Any) -> list[Sample]:
    probe = canary.probe_request()
    return engine.generate(probe.prompts, probe.sampling, num_samples=probe.num_samples, draw=probe.draw)
