"""A PEFT model in; verl's own wrapping and verl's own exports of it, unmodified and from the released package, out.

verl finds its accelerator through a registry of platforms that others may add to; it ships CUDA, ROCm and NPU. The CPU is
added through that registry (`verl_cpu_platform.py`). Nothing is replaced: the adapter comes from `layered_summon_lora_params`,
merged weights from the generator that its FSDP engine hands to the rollout, run on an object with the two attributes it reads.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

# Read at verl's first import.
os.environ.update(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="verl_cpu_platform", VERL_LOGGING_LEVEL="ERROR")

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from verl.utils.fsdp_utils import apply_fsdp2, layered_summon_lora_params

from lockstep.dist import World

with warnings.catch_warnings():
    # It warns of every engine whose package is not installed.
    warnings.simplefilter("ignore")
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine


def wrap(model: nn.Module, world: World) -> nn.Module:
    """Collective. Shard in place, a unit per decoder layer, as verl's FSDP2 workers do."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("fsdp",))
    apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, {})
    return model


def verl_adapter(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Collective. Every adapter tensor on every rank."""
    yield from layered_summon_lora_params(module).items()


def verl_merged(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Collective. Every merged tensor in bf16 on every rank. Writes to the live model, and restores it from a copy."""
    engine = SimpleNamespace(module=module, _is_offload_param=False)
    yield from FSDPEngine._merged_lora_per_tensor_param(engine)
