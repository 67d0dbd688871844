"""An engine, held-out prompts and two rewards in, accuracy and format rate out, scored greedily and shared by all ranks.

`run_eval` is the command `lockstep eval`: no sharded model, only an engine, with or without an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from lockstep import dist
from lockstep.assemble import Data, check_held_out_fits, encode_held_out, eval_rewards
from lockstep.checkpoint import read_adapter_folder
from lockstep.config import Config
from lockstep.data.rewards import RewardSet
from lockstep.data.room import positions_of
from lockstep.data.source import load_rows
from lockstep.dist import World, agree, all_or_none, sum_over_ranks
from lockstep.engines import embedded_engine, make_sampling
from lockstep.environments.stage import Stage
from lockstep.episodes import Episodes
from lockstep.errors import ConfigError
from lockstep.model.load import find_model, load_tokenizer
from lockstep.observe.progress import configure_logging, make_console
from lockstep.rollout.base import Engine, Generate
from lockstep.transport.inproc import push
from lockstep.types import Bucket, Draw, Manifest, Prompt, Sample, Sampling, TensorSpec

_CHUNK = 64
"""Prompts per rank between two looks at whether the run should stop."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One scoring of the held-out problems."""

    accuracy: float
    """Share of answers that `eval.correct` gives more than 0.5."""
    format_rate: float | None
    """Share of answers that `eval.format` gives more than 0.5; None where the recipe names none."""
    num_problems: int
    template: str
    """Prompt template that was asked with."""


@dataclass(frozen=True, slots=True)
class Judges:
    correct: RewardSet
    format: RewardSet | None


def share(count: int, world: World) -> range:
    """The contiguous part of `count` things that this rank takes; sizes differ by at most one."""
    return range(count * world.rank // world.size, count * (world.rank + 1) // world.size)


def evaluate(
    generate: Generate,
    prompts: Sequence[Prompt],
    *,
    judges: Judges,
    sampling: Sampling,
    world: World,
    template: str = "{prompt}",
    should_stop: Callable[[], bool] = lambda: False,
) -> EvalResult | None:
    """Collective. Greedy answers to every prompt, scored. None if `should_stop()` (collective, if given) says so midway."""
    agree(world, phase="evaluation", fingerprint=str(len(prompts)), describe=lambda: [f"{len(prompts)} prompts"])
    mine = share(len(prompts), world)
    # The same number of rounds on every rank: should_stop is collective.
    rounds = math.ceil(math.ceil(len(prompts) / world.size) / _CHUNK)
    right = formed = 0
    for index in range(rounds):
        if should_stop():
            return None
        chunk = mine[index * _CHUNK : (index + 1) * _CHUNK]
        draw = Draw(seed=0, step=0, first_slot=chunk.start)
        samples = generate([prompts[i] for i in chunk], sampling, num_samples=1, draw=draw)
        with all_or_none(world, "evaluation"):
            right += _count(judges.correct, samples)
            formed += _count(judges.format, samples) if judges.format else 0
    right, formed = sum_over_ranks([right, formed], world)
    return EvalResult(right / len(prompts), formed / len(prompts) if judges.format else None, len(prompts), template)


def score_held_out(generate: Generate, data: Data, *, all_templates: bool, **how: Any) -> EvalResult | None:
    """Collective. Score the held-out data under the training template, or under all and take the highest accuracy: what the
    model can do when asked well. `how` goes to `evaluate`. None where there is no held-out data, or a stop was asked for.
    """
    results: list[EvalResult] = []
    for template, prompts in list(data.held_out.items())[: None if all_templates else 1]:
        result = evaluate(generate, prompts, judges=Judges(data.correct, data.format), template=template, **how)
        if result is None:
            return None
        results.append(result)
    return max(results, key=lambda result: result.accuracy, default=None)


def _count(judge: RewardSet, samples: Sequence[Sample]) -> int:
    return sum(scored.reward > 0.5 for scored in judge.score(samples))


def run_eval(config: Config, *, adapter: str | None, templates: tuple[str, ...] = ()) -> int:
    """Collective over the ranks that the environment names. Score data.eval and print a table; the exit code."""
    if config.data.eval is None:
        raise ConfigError("lockstep eval needs held-out data: give data.eval (a task or a path)")
    world = dist.start(config.run.device, config.dist)
    console = make_console(world.rank)
    configure_logging(world.rank, console)
    with ExitStack() as opened:
        opened.callback(dist.stop, world)
        judges = Judges(*eval_rewards(config))
        files = find_model(config.model.path)
        tokenizer = load_tokenizer(files)
        rows = load_rows(config.data.eval, origin="data.eval")
        held_out = encode_held_out(config.data, rows, tokenizer, templates)
        chosen = {name: held_out[name] for name in templates or held_out}
        stage = Stage.of(config.environment, tokenizer=tokenizer, prompt=config.data.prompt)
        check_held_out_fits(config, chosen, stage, positions=positions_of(files.config))
        engine = embedded_engine(config, files, tokenizer, world)
        if adapter is not None:
            _push_folder(engine, Path(adapter))
        sampling = replace(
            make_sampling(config, engine.eos_ids), temperature=0.0, max_new_tokens=config.eval.max_new_tokens
        )
        generate = _together(engine, world)
        if stage is not None:
            generate = opened.enter_context(
                closing(Episodes(stage, generate, world=world, max_len=engine.abilities.max_len))
            )
        results = [
            evaluate(generate, prompts, judges=judges, sampling=sampling, world=world, template=name)
            for name, prompts in chosen.items()
        ]
        console.print(
            _table(adapter or f"{config.model.path} without an adapter", [result for result in results if result])
        )
    return 0


def _together(engine: Engine, world: World) -> Generate:
    """One rank's failure is every rank's."""

    def generate(prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, draw: Draw) -> list[Sample]:
        with all_or_none(world, "evaluation"):
            return engine.generate(prompts, sampling, num_samples=num_samples, draw=draw) if prompts else []

    return generate


def _push_folder(engine: Engine, folder: Path) -> None:
    tensors, adapter_config = read_adapter_folder(folder)
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    push([Bucket(tuple(tensors.items()))], engine, Manifest(1, "adapter", specs, adapter_config))


def _table(title: str, results: Sequence[EvalResult]) -> Table:
    table = Table(title=title, title_justify="left", width=80)
    for place, name in enumerate(("template", "accuracy", "format rate", "problems")):
        table.add_column(name, justify="right" if place else "left", ratio=None if place else 1)
    for result in results:
        form = "-" if result.format_rate is None else f"{100 * result.format_rate:.1f} %"
        table.add_row(result.template, f"{100 * result.accuracy:.1f} %", form, str(result.num_problems))
    return table
