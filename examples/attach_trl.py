"""A TRL trainer in; the adapter that it trains, exported by lockstep after every step, out. Needs trl.

    torchrun --nproc-per-node 2 examples/attach_trl.py

TRL's trainers (SFT here, GRPO alike) are transformers' Trainer over accelerate: what they call is `trainer.model_wrapped`.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import lockstep
from lockstep.testing import tiny_llama


class Export(TrainerCallback):
    """Collective: TRL calls callbacks on every rank."""

    def __init__(self) -> None:
        self.trainer: SFTTrainer | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        sharded = lockstep.attach(self.trainer.model_wrapped)
        with lockstep.export_weights(sharded, lockstep.AdapterExport(), to=0) as stream:
            tensors = {name: tensor for bucket in stream for name, tensor in bucket.items()}
        print(f"rank {args.process_index}, step {state.global_step}: {len(tensors)} adapter tensors")


def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{index}": index for index in range(3, 64)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="w3"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def main() -> None:
    export = Export()
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=tiny_llama(),
            args=SFTConfig(
                output_dir=folder,
                max_steps=2,
                per_device_train_batch_size=1,
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                gradient_checkpointing=False,
                report_to="none",
                save_strategy="no",
                seed=0,
            ),
            train_dataset=Dataset.from_dict({"input_ids": [list(range(3, 19)) for _ in range(8)]}),
            peft_config=LoraConfig(r=4, target_modules="all-linear"),
            processing_class=tokenizer(),
            callbacks=[export],
        )
        export.trainer = trainer
        trainer.train()


if __name__ == "__main__":
    main()
