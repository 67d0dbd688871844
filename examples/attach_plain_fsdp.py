"""A model in plain PyTorch FSDP in; its adapter and its merged weights, exported by lockstep while it trains, out.

torchrun --nproc-per-node 2 examples/attach_plain_fsdp.py [fsdp2 | fsdp1 | ddp]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lockstep
from lockstep.testing import tiny_llama


def wrap(model: nn.Module, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    for layer in [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]:
        fully_shard(layer)
    fully_shard(model)
    return model


def main(kind: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same adapter on every rank: FSDP sends nothing
    model = wrap(get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear")), kind)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    ids = torch.arange(1, 17)[None]
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    sharded = lockstep.attach(model)
    for export in (lockstep.AdapterExport(), lockstep.MergedExport()):
        with lockstep.export_weights(sharded, export, to=0) as stream:
            tensors = {name: tensor for bucket in stream for name, tensor in bucket.items()}
        print(f"rank {dist.get_rank()}: {type(export).__name__} gave {len(tensors)} tensors, {list(tensors)[:1]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fsdp2")
