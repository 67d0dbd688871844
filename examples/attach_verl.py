"""A model that verl's own functions have wrapped in; its adapter and its merged weights, exported by lockstep, out. Needs verl.

    torchrun --nproc-per-node 2 examples/attach_verl.py [fsdp2 | fsdp]

In a verl worker the model is `self.actor_module_fsdp`, and the lines stand where it calls `collect_lora_params`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

import lockstep
from lockstep.testing import tiny_llama

if not torch.cuda.is_available():  # verl ships no CPU; it imports this addition to its registry of platforms by itself
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
    os.environ.update(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="verl_cpu_platform")

from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy


def wrap(model: nn.Module, strategy: str, device: str) -> nn.Module:
    if strategy == "fsdp2":
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, {})
        return model
    policy = get_fsdp_wrap_policy(model, config=None, is_lora=True)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=False, device_id=torch.device(device)
    )


def main(strategy: str) -> None:
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "cpu:gloo,cuda:nccl")
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear"))
    model = wrap(model, strategy, "cuda" if torch.cuda.is_available() else "cpu")
    ids = torch.arange(1, 17)[None]
    model(input_ids=ids, labels=ids).loss.backward()

    sharded = lockstep.attach(model)
    for export in (lockstep.AdapterExport(), lockstep.MergedExport()):
        with lockstep.export_weights(sharded, export, to=0) as stream:
            tensors = {name: tensor for bucket in stream for name, tensor in bucket.items()}
        print(f"rank {dist.get_rank()}: {type(export).__name__} gave {len(tensors)} tensors, {list(tensors)[:1]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fsdp2")
