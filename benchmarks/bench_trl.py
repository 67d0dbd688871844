"""The demo's recipe in; lockstep beside TRL's GRPOTrainer (reward, samples per second, peak memory) out.

Same model (SmolLM2-135M in fp32), task, prompts, rewards, LoRA, samples per step, learning rate and schedule; one process on a CPU.
The two take turns, a seed after the other, each in a process of its own. Seconds are those of whole steps (sampling, rewards, update;
in lockstep also the export to its engine and the canary), the first step left out. Memory is the most that the process had
resident, as the kernel counts it, Python and libraries included.

    make bench-trl                                                 # in the environment that has TRL
    python benchmarks/bench_trl.py --seeds 0 1 2 --steps 8 --trl-batch 128
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
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, TrainerCallback
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
    seconds: list[float]
    """Of each step."""


@dataclass(frozen=True, slots=True)
class Measured:
    who: str
    seed: int
    run: Run
    peak_mib: float

    def samples_per_second(self, per_step: int) -> float:
        return per_step / statistics.median(self.run.seconds[1:])


def main() -> None:
    args = parse_args()
    config = load_config(RECIPE)
    if args.trl_out:
        result = train_with_trl(config, seed=args.seeds[0], steps=args.steps, batch=args.trl_batch[0])
        args.trl_out.write_text(json.dumps(asdict(result)))
        return
    done = []
    for seed in args.seeds:
        done.append(lockstep_run(seed, args.steps))
        done += [trl_run(seed, args.steps, batch) for batch in args.trl_batch]
    show(done, per_step=config.rollout.prompts_per_step * config.rollout.group_size)


def lockstep_run(seed: int, steps: int) -> Measured:
    """`lockstep train` with the demo's recipe, as a user starts it."""
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"run.dir={folder}/run", f"run.seed={seed}", f"run.num_steps={steps}"]
        changes += ["eval.before=false", "eval.after=false", "checkpoint.every_steps=0"]
        peak = measured([sys.executable, "-m", "lockstep", "train", str(RECIPE), "--nproc", "1", *changes])
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    run = Run([line["reward"] for line in lines], [line["step_seconds"] for line in lines])
    return Measured("lockstep", seed, run, peak)


def trl_run(seed: int, steps: int, batch: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        how = ["--seeds", str(seed), "--steps", str(steps), "--trl-batch", str(batch)]
        peak = measured([sys.executable, __file__, *how, "--trl-out", str(out)])
        run = Run(**json.loads(out.read_text()))
    return Measured(f"TRL, {batch} at a time", seed, run, peak)


def measured(command: list[str]) -> float:
    """Run it to its end; the peak resident memory of it (and of what it waited for) in MiB. Its output is shown if it fails."""
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
    return usage.ru_maxrss / 1024


class StepTimes(TrainerCallback):
    """From the end of one optimizer step to the end of the next: TRL samples inside a step."""

    def __init__(self) -> None:
        self.ends = [0.0]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends = [time.perf_counter()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def train_with_trl(config: Config, *, seed: int, steps: int, batch: int) -> Run:
    """What the recipe says, in TRL's words. `batch`: samples in one forward pass; the rest of a step is accumulated."""
    files = find_model(config.model.path)
    train, rollout, lora = config.train, config.rollout, config.lora
    pattern = str(config.reward[1].args["pattern"])
    num_samples = rollout.prompts_per_step * rollout.group_size

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        right = [last_number(text, each) for text, each in zip(texts, answer, strict=True)]
        return [value + 0.2 * format_regex(text, pattern=pattern) for value, text in zip(right, texts, strict=True)]

    times = StepTimes()
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
            callbacks=[times],
        )
        trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    seconds = [stop - start for start, stop in zip(times.ends, times.ends[1:], strict=False)]
    return Run(rewards, seconds)


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
    for name in ("", "seeds", "samples/s", "lockstep is", "peak MiB", "lockstep has", "mean reward", "last 3 steps"):
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
            f"{speeds[names[0]] / speeds[name]:.2f}x",
            f"{peaks[name]:.0f}",
            f"{peaks[names[0]] / peaks[name]:.2f}x",
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
    parser.add_argument(
        "--trl-batch",
        nargs="+",
        type=int,
        default=[128, 32],
        help="samples that TRL takes at a time; several are tried",
    )
    parser.add_argument("--trl-out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
