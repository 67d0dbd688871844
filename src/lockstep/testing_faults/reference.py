"""A version and a sample that claims it in; how far its log-probabilities are from that version's own, out.

The weights of a version are a formula of names and numbers, so trainer and reference get them apart: the reference is a plain model
in this process, which nothing was ever exported from or sent to.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.config import LoraSection
from lockstep.model.load import find_model, load_whole
from lockstep.model.lora import inject_lora
from lockstep.sharding.base import ShardedModel
from lockstep.testing import tiny_llama
from lockstep.types import Draw, Prompt, Sample, Sampling

LORA = LoraSection(rank=4, alpha=8, targets="all-linear")
TOLERANCE = 2e-4
"""Nats. fp32 with a key-value cache, batches and (merged) rounded weights, against one plain pass: below 2e-5 as measured. Two
versions differ by more than 1e-2 (`Reference.apart`)."""

SAMPLING = Sampling(temperature=1.0, max_new_tokens=6)
DRAW = Draw(seed=7, step=0)
PROBES = tuple(Prompt(f"probe-{i}", tuple((11 * i + 5 * j) % 61 + 3 for j in range(9 + i)), "", "") for i in range(2))


def make_fault_model(folder: Path) -> str:
    """Write the model that the harness serves and trains: a tiny Llama whose next token is far from uniform."""
    model = tiny_llama(max_position_embeddings=128)
    model.lm_head.weight.data.mul_(12)
    model.save_pretrained(folder)
    return str(folder)


def value_of(name: str, shape: Sequence[int], version: int) -> torch.Tensor:
    """An adapter's tensor in a version, fp32: every B is new in each, and zero in version 0."""
    is_b = "lora_B" in name
    if is_b and version == 0:
        return torch.zeros(*shape)
    seed = zlib.crc32(name.encode()) + (1_000_003 * version if is_b else 0)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * (0.3 if is_b else 0.2)


def write_version(sharded: ShardedModel, version: int) -> None:
    """Not collective. This rank's elements of a version."""
    shapes = {tensor.name: tensor.shape for tensor in sharded.plan.parameters}
    for name, _ in sharded.trainable():
        start, stop = sharded.ranges(name)[sharded.world.rank]
        sharded.write_local(name, value_of(name, shapes[name], version).reshape(-1)[start:stop])


class Reference:
    """The model of any version, unsharded."""

    def __init__(self, folder: str):
        base = load_whole(find_model(folder), dtype=torch.float32, attention="sdpa", device=torch.device("cpu"))
        self._model: Any = inject_lora(base, LORA, seed=0).eval()
        self._adapter = {name: value for name, value in self._model.named_parameters() if "lora_" in name}
        self._version: int | None = None

    def distance(self, samples: Sequence[Sample], version: int) -> float:
        """Largest difference in nats between the samples' log-probabilities and those of `version`, at temperature 1."""
        return max(float((torch.tensor(each.logprobs) - self._logprobs(each, version)).abs().max()) for each in samples)

    @torch.no_grad()
    def _logprobs(self, sample: Sample, version: int) -> torch.Tensor:
        self._become(version)
        ids = torch.tensor([sample.prompt.ids + sample.ids])
        start = len(sample.prompt.ids) - 1
        logprobs = self._model(input_ids=ids, use_cache=False).logits[0, start:-1].log_softmax(dim=-1)
        return logprobs.gather(1, ids[0, start + 1 :, None]).squeeze(1)

    def _become(self, version: int) -> None:
        if version == self._version:
            return
        for name, parameter in self._adapter.items():
            if "lora_B" in name or self._version is None:
                parameter.data.copy_(value_of(name, parameter.shape, version))
        self._version = version
