"""A small trainer, an engine that it pushes to, and engines with one fault each, for the canary's tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from helpers_rollout import plain_logprobs
from helpers_sharded import shard_folder
from lockstep.config import LoraSection
from lockstep.dist import World
from lockstep.export.stream import export_weights
from lockstep.export.what import AdapterExport, Export
from lockstep.rollout.hf import HFEngine
from lockstep.sampling import sampling_logprobs
from lockstep.sharding.base import ShardedModel
from lockstep.testing import tiny_llama
from lockstep.transport.inproc import push
from lockstep.types import Prompt, Sample, Sampling
from lockstep.verify.canary import Canary, probe_prompts

SAMPLING = Sampling(temperature=0.7, max_new_tokens=8)


def probe_model(**overrides: Any) -> Any:
    """A tiny Llama with room for a probe of two blocks, whose next token is far from uniform."""
    model = tiny_llama(max_position_embeddings=512, **overrides)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(12 if name in ("lm_head.weight", "model.embed_tokens.weight") else 3 if weight.ndim > 1 else 1)
    return model


def make_trainer(
    world: World, folder: str, *, backend: Any = "fsdp2", dtype: torch.dtype = torch.float32, **lora: Any
) -> ShardedModel:
    section = LoraSection(**{"rank": 4, "alpha": 12, "targets": "all-linear", **lora})
    return shard_folder(world, folder, section, backend=backend, dtype=dtype)


def update(sharded: ShardedModel, *, seed: int, size: float = 0.01) -> None:
    """What an optimizer step does, without one: every B moves by random amounts that do not depend on the ranks."""
    for index, (name, _) in enumerate(sharded.trainable()):
        if "lora_B" in name or "lora_embedding_A" in name:
            shape = next(tensor.shape for tensor in sharded.plan.parameters if tensor.name == name)
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed * 1000 + index)) * size
            start, stop = sharded.ranges(name)[sharded.world.rank]
            before = sharded.local_flat(name)
            sharded.write_local(name, before + whole.reshape(-1)[start:stop].to(before.dtype))


def start_over(sharded: ShardedModel) -> None:
    """Every B back to zero."""
    for name, _ in sharded.trainable():
        if "lora_B" in name:
            sharded.write_local(name, torch.zeros_like(sharded.local_flat(name)))


def deliver(sharded: ShardedModel, engine: Any, version: int, what: Export | None = None, **more: Any) -> None:
    """Collective. The usual path: export and push."""
    with export_weights(sharded, what or AdapterExport(), **more) as stream:
        push(stream, engine, stream.manifest(version))


def make_canary(
    sharded: ShardedModel, *, sampling: Sampling = SAMPLING, dtypes: Any = ("float32", "float32"), **more: Any
) -> Canary:
    data = [Prompt(f"p{i}", tuple((7 * i + 3 * j + i * j) % 61 + 3 for j in range(20 + i)), "", "") for i in range(9)]
    prompts = probe_prompts(data, num_prompts=1, max_len=512, num_tokens=16)
    return Canary(
        sharded,
        sampling=sampling,
        world=sharded.world,
        pad_id=0,
        prompts=prompts,
        dtypes=dtypes,
        **{"packing": "shared_prefix", **more},
    )


def answer(canary: Canary, engine: Any, *, version: int | None = None) -> list[Sample]:
    """The engine's answer to the probe; with `version` it claims to have that one."""
    probe = canary.probe_request()
    samples = engine.generate(probe.prompts, probe.sampling, num_samples=probe.num_samples, draw=probe.draw)
    return samples if version is None else [replace(sample, policy_version=version) for sample in samples]


@dataclass
class Altered:
    """An engine of whose answers something is other than asked."""

    engine: HFEngine
    ask: Callable[[Sampling], Sampling] = lambda sampling: sampling
    report: Callable[[Sample, Sampling], Sequence[float]] | None = None

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, **more: Any) -> list[Sample]:
        samples = self.engine.generate(prompts, self.ask(sampling), **more)
        if self.report is None:
            return samples
        return [replace(sample, logprobs=tuple(self.report(sample, sampling))) for sample in samples]


def raw_of(engine: HFEngine) -> Altered:
    """Draws as asked, reports the log-probabilities of the raw distribution."""

    def report(sample: Sample, sampling: Sampling) -> list[float]:
        return plain_logprobs(engine._model, sample, Sampling(temperature=1.0)).tolist()

    return Altered(engine, report=report)


@torch.no_grad()
def behind(old: Any, new: Any, sample: Sample, sampling: Sampling, *, prefix: int) -> list[float]:
    """Log-probabilities of a sample whose prompt's first tokens have keys and values of `old`."""
    ids = torch.tensor([sample.prompt.ids + sample.ids])
    cache = DynamicCache(config=new.config)
    argument = "cache" if "cache" in inspect.signature(new.forward).parameters else "past_key_values"
    old(input_ids=ids[:, :prefix], use_cache=True, **{argument: cache})
    logits = new(input_ids=ids[:, prefix:], use_cache=True, **{argument: cache}).logits[0]
    logprobs = sampling_logprobs(logits[len(sample.prompt.ids) - 1 - prefix : -1], sampling)
    return logprobs.gather(1, torch.tensor(sample.ids)[:, None]).squeeze(1).tolist()


@contextmanager
def scaled(engine: HFEngine, scale: Callable[[str, float], float]) -> Iterator[None]:
    """The engine's adapter scaled otherwise on some of its modules."""
    layers = [
        (name, module)
        for name, module in engine._model.named_modules()
        if isinstance(getattr(module, "scaling", None), dict)
    ]
    before = [dict(module.scaling) for _, module in layers]
    for name, module in layers:
        module.scaling["default"] = scale(name, module.scaling["default"])
    yield
    for (_, module), values in zip(layers, before, strict=True):
        module.scaling.update(values)
