"""One update of every algorithm family on ranks, sharded in every way, and on one rank without: for what must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from helpers_sharded import randomise_b, shard_folder
from helpers_train import Unsharded, known_peft_warnings, make_actor, make_items
from lockstep.config import LoraSection
from lockstep.dist import World
from lockstep.model.lora import inject_lora
from lockstep.sharding.attach import attach
from lockstep.testing import tiny_llama
from lockstep.train.step import UpdateResult
from lockstep.types import TrainItem

LORA = LoraSection(rank=3, alpha=6)  # rank 3: uneven on two ranks, and one of four has nothing

SINGLE: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"algorithm": "dr_grpo"},
    "sample means, entropy, k3": {"aggregation": "seq_mean_token_mean", "entropy_coef": 0.05, "kl_coef": 0.1},
    "sample sums, k1": {"aggregation": "seq_mean_token_sum", "kl_coef": 0.1, "kl_kind": "k1"},
    "gspo, k2": {"loss": "gspo", "kl_coef": 0.1, "kl_kind": "k2"},
    "cispo": {"loss": "cispo"},
    "token_tis": {"correction": "token_tis"},
    "sequence_tis": {"correction": "sequence_tis", "correction_high": 3.0},
    "sequence_mask": {"correction": "sequence_mask", "correction_high": 3.0},
    "icepop, k3": {"correction": "icepop", "kl_coef": 0.1},
    "geometric": {"correction": "geometric_reject", "correction_low": 0.5, "correction_high": 2.0},
    "token advantages": {"aggregation": "seq_mean_token_mean"},
}
"""One optimizer step: the ratio is 1, and what differs is everything else."""

SEVERAL: dict[str, dict[str, Any]] = {
    "ppo, k3_weighted": {"kl_coef": 0.1, "kl_kind": "k3_weighted", "clip_low": 0.1, "clip_high": 0.1},
    "ppo, dual": {"clip_low": 0.05, "clip_high": 0.05, "clip_dual": 1.1},
    "gspo": {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    "cispo, icepop": {"loss": "cispo", "clip_low": 0.1, "clip_high": 0.1, "correction": "icepop"},
}
"""Four optimizer steps: the ratio moves away from 1, and clips."""
TWICE_TWO = {"epochs": 2, "mini_batches": 2, "lr": 1e-2}

Way = Literal["fsdp2", "fsdp1", "hsdp"]
LAYOUTS: dict[Way, dict[str, Any]] = {
    "fsdp2": {"packing": "shared_prefix", "micro_batch_tokens": 60},
    "fsdp1": {"packing": "packed", "micro_batch_tokens": 30},
    "hsdp": {"packing": "padded", "micro_batch_tokens": 50},
}


def items_of(family: str) -> list[TrainItem]:
    """Six ragged groups; what the engine said differs from the trainer by up to e^2."""
    items = make_items(6, 3, seed=4)
    if family != "token advantages":
        return items
    return [
        TrainItem(
            i.prompt_ids, i.ids, i.rollout_logprobs, 0.0, i.group, tuple(0.3 * k - 0.5 for k in range(len(i.ids)))
        )
        for i in items
    ]


def share_of(items: Sequence[TrainItem], world: World) -> list[TrainItem]:
    """Groups are split over ranks too: every third sample of the first groups, whole groups after."""
    return [
        item for index, item in enumerate(items) if (index if item.group < 2 else item.group) % world.size == world.rank
    ]


Gradients = dict[str, Any]


def make_sharded(world: World, folder: str, way: Way) -> Any:
    """Collective. The same weights whatever the way and the number of ranks."""
    if way == "hsdp":
        mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
        with known_peft_warnings():
            model: nn.Module = inject_lora(tiny_llama(), LORA, seed=0)
        for layer in [each for each in model.modules() if isinstance(each, LlamaDecoderLayer)]:
            fully_shard(layer, mesh=mesh)
        sharded = attach(fully_shard(model, mesh=mesh))
    else:
        sharded = shard_folder(world, folder, LORA, backend=way)
    randomise_b(sharded)
    sharded.copy_to_replicas()
    return sharded


def spy(sharded: Any) -> Gradients:
    """This rank's own elements of the gradients that were last clipped: name -> (start, elements)."""
    clip, seen = sharded.clip_grad_norm, {}

    def clip_and_keep(max_norm: float) -> float:
        for name, parameter in sharded.trainable():
            start, stop = sharded.ranges(name)[sharded.world.rank]
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            flat = np.zeros(stop - start, np.float32) if local is None else local.reshape(-1)[: stop - start].numpy()
            seen[name.replace("_fsdp_wrapped_module.", "")] = (start, flat.copy())
        return clip(max_norm)

    sharded.clip_grad_norm = clip_and_keep
    return seen


def families_of(size: int, way: Way) -> list[str]:
    """All on two ranks; on four, every other one on each FSDP, and on HSDP all but most of those that take several steps."""
    every = [*SINGLE, *(f"several: {name}" for name in SEVERAL)]
    if size == 2:
        return every
    return every[: len(SINGLE) + 1] if way == "hsdp" else every[way == "fsdp1" :: 2]


def run_way(world: World, folder: str, way: Way) -> dict[str, tuple[Gradients, UpdateResult]]:
    """Collective. Learning rate 1e-12 leaves the weights where they are; families that step for real have their own model."""
    out = {}
    sharded = make_sharded(world, folder, way)
    seen = spy(sharded)
    for family in families_of(world.size, way):
        if family.startswith("several: "):
            out[family] = run_several(world, folder, way, family.removeprefix("several: "))
            continue
        actor = make_actor(sharded, sharded.world, **{"lr": 1e-12, **LAYOUTS[way], **SINGLE[family]})
        result = actor.update(share_of(items_of(family), world), step=0)
        out[family] = (dict(seen), result)
    return out


def run_several(world: World, folder: str, way: Way, family: str) -> tuple[Gradients, UpdateResult]:
    sharded = make_sharded(world, folder, way)
    seen = spy(sharded)
    actor = make_actor(sharded, sharded.world, **TWICE_TWO, **LAYOUTS[way], **SEVERAL[family])
    result = actor.update(share_of(items_of(family), world), step=0)
    return dict(seen), result


def alone() -> Unsharded:
    """The same model in one process."""
    with known_peft_warnings():
        module = Unsharded(inject_lora(tiny_llama(), LORA, seed=0))
    with torch.no_grad():
        for index, (name, param) in enumerate(module.trainable()):
            if "lora_B" in name:
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1000 + index)) * 0.1)
    return module


def whole(parts: Sequence[Gradients], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The ranks' elements put together; every element must have come from exactly one rank."""
    assert all(part.keys() == like.keys() for part in parts)
    out = {}
    for name, tensor in like.items():
        flat = np.full(tensor.numel(), np.nan, np.float32)
        for part in parts:
            start, values = part[name]
            assert np.isnan(flat[start : start + len(values)]).all()
            flat[start : start + len(values)] = values
        out[name] = torch.from_numpy(flat).reshape(tensor.shape)
    return out
