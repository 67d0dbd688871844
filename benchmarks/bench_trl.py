"""The demo's recipe in; lockstep beside TRL's GRPOTrainer (reward, samples per second, peak memory) out.

Same model (SmolLM2-135M in fp32), task, prompts, rewards, LoRA, samples per step, learning rate and schedule; one process on a CPU.
The two take turns, a seed after the other, each in a process of its own. Seconds are CPU seconds of whole steps (sampling, rewards,
update; in lockstep also the export to its engine and the canary), so that other work on the machine counts less; without start-up: a
run of one step is taken off. Memory is the most that the process had resident, as the kernel counts it, Python and libraries
included. A forward pass takes the same samples in both, `--batch` of them; `--tokens` gives lockstep's passes another size.

    make bench-trl                                                 # in the environment that has TRL
    python benchmarks/bench_trl.py --seeds 0 1 2 --steps 8 --batch 32
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from lockstep.config import Config, load_config
from lockstep.data.reward_functions import format_regex, last_number
from lockstep.data.source import load_rows
from lockstep.data.tasks import split_rows
from lockstep.model.load import find_model, load_tokenizer

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "smollm2-sums.yaml"
LIMIT_S = 3600


@dataclass(frozen=True, slots=True)
class Run:
    """What one training run came to."""

    rewards: list[float]
    """Mean over each step's samples."""
    cpu: float
    """Seconds per step."""


@dataclass(frozen=True, slots=True)
class Measured:
    who: str
    seed: int
    run: Run
    peak_mib: float

    def samples_per_second(self, per_step: int) -> float:
        return per_step / self.run.cpu


def main() -> None:
    args = parse_args()
    config = load_config(RECIPE)
    if args.trl_out:
        rewards = train_with_trl(config, seed=args.seeds[0], steps=args.steps, batch=args.batch)
        args.trl_out.write_text(json.dumps(rewards))
        return
    tokens = args.tokens or tokens_of(args.batch, config)
    print(f"a forward pass: {args.batch} samples in TRL, at most {tokens} tokens in lockstep", flush=True)
    done = []
    for seed in args.seeds:
        done += [trl_run(seed, args.steps, args.batch), lockstep_run(seed, args.steps, tokens)]
    show(done, per_step=config.rollout.prompts_per_step * config.rollout.group_size)


def tokens_of(samples: int, config: Config) -> int:
    """Room for so many samples and no further group: a group's prompt is there once, and every completion of full length."""
    rollout = config.rollout
    groups = samples // rollout.group_size
    assert groups * rollout.group_size == samples, f"{samples} samples are no whole groups of {rollout.group_size}"
    return groups * (config.data.prompt.max_tokens + rollout.group_size * rollout.max_new_tokens)


def lockstep_run(seed: int, steps: int, tokens: int) -> Measured:
    """`lockstep train` with the demo's recipe, as a user starts it."""

    def train(num_steps: int, folder: str) -> tuple[list[float], float, float]:
        changes = [f"run.dir={folder}/run", f"run.seed={seed}", f"run.num_steps={num_steps}"]
        changes += ["eval.before=false", "eval.after=false", "checkpoint.every_steps=0"]
        changes += ["run.max_train_seconds=null", f"train.micro_batch_tokens={tokens}"]
        command = [sys.executable, "-m", "lockstep", "train", str(RECIPE), "--nproc", "1", *changes]
        cpu, peak = measured(command)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        return [line["reward"] for line in lines], cpu, peak

    return _beyond_the_first("lockstep", seed, steps, train)


def trl_run(seed: int, steps: int, batch: int) -> Measured:
    def train(num_steps: int, folder: str) -> tuple[list[float], float, float]:
        out = Path(folder) / "rewards.json"
        how = ["--seeds", str(seed), "--steps", str(num_steps), "--batch", str(batch)]
        cpu, peak = measured([sys.executable, __file__, *how, "--trl-out", str(out)])
        return json.loads(out.read_text()), cpu, peak

    return _beyond_the_first("TRL", seed, steps, train)


def _beyond_the_first(
    who: str, seed: int, steps: int, train: Callable[[int, str], tuple[list[float], float, float]]
) -> Measured:
    """The CPU seconds of all steps but the first, by taking off a run of one step: start-up is in both."""
    with tempfile.TemporaryDirectory() as short, tempfile.TemporaryDirectory() as whole:
        _, start, _ = train(1, short)
        rewards, cpu, peak = train(steps, whole)
    print(f"{who}, seed {seed}: {(cpu - start) / (steps - 1):.1f} CPU s a step, {peak:.0f} MiB", flush=True)
    return Measured(who, seed, Run(rewards, (cpu - start) / (steps - 1)), peak)


def measured(command: list[str]) -> tuple[float, float]:
    """Run it to its end: CPU seconds, and peak resident memory in MiB, of it and what it waited for. Its output is shown if it fails."""
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        late = threading.Timer(LIMIT_S, child.kill)
        late.start()
        _, status, usage = os.wait4(child.pid, 0)
        late.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            log.seek(0)
            raise SystemExit(f"{' '.join(command)}\nended with {child.returncode}:\n{log.read()[-4000:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def train_with_trl(config: Config, *, seed: int, steps: int, batch: int) -> list[float]:
    """What the recipe says, in TRL's words. `batch`: samples in one forward pass; the rest of a step is accumulated."""
    files = find_model(config.model.path)
    train, rollout, lora = config.train, config.rollout, config.lora
    pattern = str(config.reward[1].args["pattern"])
    num_samples = rollout.prompts_per_step * rollout.group_size

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        right = [last_number(text, each) for text, each in zip(texts, answer, strict=True)]
        return [value + 0.2 * format_regex(text, pattern=pattern) for value, text in zip(right, texts, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                seed=seed,
                max_steps=steps,
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=num_samples // batch,
                num_generations=rollout.group_size,
                max_completion_length=rollout.max_new_tokens,
                temperature=rollout.temperature,
                learning_rate=train.lr,
                lr_scheduler_type=train.schedule,
                max_grad_norm=train.max_grad_norm,
                beta=train.kl_coef,
                loss_type="dapo",  # a token mean, as the recipe's
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=prompts_of(config),
            processing_class=load_tokenizer(files),
            peft_config=LoraConfig(
                r=lora.rank, lora_alpha=int(lora.alpha), target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        )
        trainer.train()
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


def prompts_of(config: Config) -> Dataset:
    """The recipe's training rows, without the held-out questions, as TRL wants them."""
    assert config.data.eval is not None
    column = config.data.train.prompt_column
    rows = split_rows(
        load_rows(config.data.train, origin="data.train"),
        load_rows(config.data.eval, origin="data.eval"),
        column,
        eval_column=config.data.eval.prompt_column,
    )
    template = config.data.prompt.template
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": template.replace("{prompt}", row[column])}],
                "answer": str(row[config.data.train.answer_column]),
            }
            for row in rows
        ]
    )


def show(done: list[Measured], *, per_step: int) -> None:
    names = list(dict.fromkeys(each.who for each in done))
    table = Table(
        title=f"SmolLM2-135M, fp32, {per_step} samples per step, {torch.get_num_threads()} threads",
        title_justify="left",
    )
    for name in (
        "",
        "seeds",
        "samples/CPU s",
        "of TRL's",
        "peak MiB",
        "of TRL's",
        "mean reward",
        "last 3 steps",
    ):
        table.add_column(name, justify="right" if name else "left")
    speeds, peaks = {}, {}
    for name in names:
        runs = [each for each in done if each.who == name]
        speeds[name] = statistics.median(each.samples_per_second(per_step) for each in runs)
        peaks[name] = statistics.median(each.peak_mib for each in runs)
    for name in names:
        runs = [each.run for each in done if each.who == name]
        table.add_row(
            name,
            str(len(runs)),
            f"{speeds[name]:.2f}",
            f"{speeds[name] / speeds['TRL']:.2f}x",
            f"{peaks[name]:.0f}",
            f"{peaks[name] / peaks['TRL']:.2f}x",
            spread([statistics.fmean(run.rewards) for run in runs]),
            spread([statistics.fmean(run.rewards[-3:]) for run in runs]),
        )
    Console(width=120).print(table)


def spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {deviation:.3f}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="samples of one forward pass")
    parser.add_argument(
        "--tokens", type=int, help="lockstep's train.micro_batch_tokens, if not those of --batch samples"
    )
    parser.add_argument("--trl-out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
