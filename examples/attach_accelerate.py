"""A model that accelerate has prepared in; its adapter, exported by lockstep while it trains, out.

    torchrun --nproc-per-node 2 examples/attach_accelerate.py [1 | 2]      the FSDP version

Without accelerators accelerate prepares with DDP whatever plugin it is given; the lines are the same.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model

import lockstep
from lockstep.testing import tiny_llama


def main(fsdp_version: int) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=fsdp_version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        use_orig_params=True if fsdp_version == 1 else None,
    )
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.arange(1, 17, device=accelerator.device)[None]
    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()

    sharded = lockstep.attach(model)
    with lockstep.export_weights(sharded, lockstep.AdapterExport(), to=0) as stream:
        tensors = {name: tensor for bucket in stream for name, tensor in bucket.items()}
    print(f"rank {accelerator.process_index}: {accelerator.distributed_type} gave {len(tensors)} adapter tensors")
    accelerator.end_training()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
