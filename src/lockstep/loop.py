"""A config in, a trained adapter in its run directory out. Read this file to know what a run does; it is the flow, in order.

    prompts -> engine.generate -> rewards -> learn (advantages, actor.update) -> export -> transport -> engine   (and again)

Every rank runs this file. What is collective is called by all; rank 0 writes and prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from lockstep import checkpoint, dist
from lockstep.assemble import Parts, assemble
from lockstep.config import Config
from lockstep.dist import World
from lockstep.evaluate import EvalResult, run_eval, score_held_out, share
from lockstep.observe.metrics import refuse_empty, reward_stats
from lockstep.observe.observer import Observer
from lockstep.observe.progress import configure_logging, make_console
from lockstep.observe.report import Carried
from lockstep.rescue import rescued
from lockstep.rundir import RunDir, open_run_dir
from lockstep.serving import Synced
from lockstep.signals import stop_requested
from lockstep.train.learn import learn
from lockstep.train.step import UpdateResult
from lockstep.types import Draw, ScoredSample
from lockstep.verify.mismatch import check_metrics, coarser

__all__ = ["Loop", "run_eval", "run_training", "train_in"]


def run_training(config: Config, *, resume: bool) -> int:
    """Train as the config says. Collective over the ranks that the environment names. The exit code: 0, also when stopped."""
    world = dist.start(config.run.device, config.dist)
    configure_logging(world.rank, make_console(world.rank))
    try:
        train_in(world, config, resume=resume)
    finally:
        dist.stop(world)
    return 0


def train_in(world: World, config: Config, *, resume: bool) -> None:
    """Collective. `run_training` for ranks that have met already."""
    with dist.lost_ranks_named(world):
        _train_in(world, config, resume=resume)


def _train_in(world: World, config: Config, *, resume: bool) -> None:
    with dist.all_or_none(world, "opening the run directory"):
        run = open_run_dir(config, resume=resume, is_main=world.is_main)
    with run:
        found, parts = checkpoint.newest(run.checkpoints, world) if resume else None, assemble(config, world)
        with (
            closing(parts),
            Observer(config, run, world, resume_step=found.step if found else 0) as observer,
        ):
            loop = Loop(config, world, parts=parts, run=run, observer=observer)
            if found is not None:
                loop.restore(found)
            loop.train()


class Loop:
    """One training run, from its first step, or the one it is resumed at, to its last."""

    def __init__(self, config: Config, world: World, *, parts: Parts, run: RunDir, observer: Observer):
        self.config, self.world, self.parts, self.run, self.observer = config, world, parts, run, observer
        self.step = 0  # train steps done, each of one update and one sync: the policy version of the trainer's weights
        self.saved_step: int | None = None
        self.carried = Carried()

    def restore(self, found: checkpoint.Found) -> None:
        """Collective. Go on from a checkpoint."""
        meta = checkpoint.load(found, self.parts.state)
        self.parts.serving.canary_from(meta.get("canary"))
        self.step = self.saved_step = found.step
        self.carried = Carried.from_json(meta["carried"])
        self.observer.resumed(found.path, meta["times"])

    def train(self) -> None:
        """Collective. All steps that are left, evaluated before and after."""
        self.sync()
        if self.step == 0 and self.config.eval.before and self.carried.before is None:
            self.carried = replace(self.carried, before=self.evaluate("before"))
        self.observer.start_training()
        while self.step < self.config.run.num_steps and not self.is_over():
            self.train_step()
        self.save()
        after = self.evaluate("after") if self.config.eval.after and not self.is_stopped() else None
        self.observer.finish(self.carried, after=after, steps=self.step)

    def train_step(self) -> None:
        """Collective. The flow, once: the policy becomes one version newer, and the engine serves it."""
        began = time.perf_counter()
        scored = self.rollout()
        with self.observer.phase("update") as phase:
            actor, critic, seed = self.parts.actor, self.parts.critic, self.config.run.seed
            learned = learn(scored, actor, critic, train=self.config.train, world=self.world, seed=seed, step=self.step)
            phase.tokens, update = self.total(learned.num_tokens), learned.update
        self.step += 1
        metrics = {"policy_version": float(self.step), "optimizer_steps": float(update.num_optimizer_steps)}
        metrics |= learned.metrics | {"step_seconds": time.perf_counter() - began}
        with self.rescued(partial(self.record, scored, update=update, metrics=metrics)):
            synced = self.sync()
        metrics |= {"sync_bytes": float(synced.pushed.nbytes), "step_seconds": time.perf_counter() - began}
        self.record(scored, update=update, metrics=metrics | synced.metrics)
        if self.is_due(self.config.checkpoint.every_steps):
            self.save()
        if self.is_due(self.config.eval.every_steps) and self.step < self.config.run.num_steps:
            self.evaluate(f"step {self.step}")

    def rollout(self) -> list[ScoredSample]:
        """Collective. This rank's prompts of the step, sampled and scored; one rank's failure is every rank's."""
        config, data = self.config, self.parts.data
        indices = data.order.take(self.step, config.rollout.prompts_per_step)
        mine = share(len(indices), self.world)
        prompts = [data.train[indices[slot]] for slot in mine]
        with self.rescued(), self.observer.phase("generate") as phase:
            draw = Draw(config.run.seed, self.step, first_slot=mine.start)
            num_samples = config.rollout.group_size
            samples = self.parts.generate(prompts, self.parts.sampling, num_samples=num_samples, draw=draw)
            phase.tokens = self.total(sum(sample.num_sampled for sample in samples))
        with self.rescued(), self.observer.phase("reward"), dist.all_or_none(self.world, "reward"):
            return data.rewards.score(samples)

    def sync(self) -> Synced:
        """Collective. The engine serves the trainer's weights, as one transaction, and the canary has seen it."""
        with self.observer.phase("sync"):
            return self.parts.serving.sync(self.step)

    def record(self, scored: Sequence[ScoredSample], *, update: UpdateResult, metrics: dict[str, float]) -> None:
        """Collective. The step's numbers over all ranks, to disk and screen."""
        stats = reward_stats(scored, self.parts.data.rewards.labels, with_episodes=self.parts.episodes is not None)
        sums = dist.sum_stats(stats, self.world)
        # A count of 0: the step had no gradient.
        means = {name: stat.mean for name, stat in (sums | update.stats).items() if stat.count}
        metrics = means | {"grad_norm": update.grad_norm, "lr": update.lr, "loss_tokens": update.num_tokens} | metrics
        metrics |= (mismatch := update.mismatch.metrics())
        metrics["completion_tokens_total"] = sums["completion_tokens"].total
        self.carried = self.carried.after_step(reward=metrics["reward"], seconds=metrics["step_seconds"])
        with dist.all_or_none(self.world, "writing metrics"):
            self.observer.step(self.step, metrics, scored)
        refuse_empty(sums, step=self.step, samples=self.run.samples)
        dtype = coarser(self.config.model.dtype, self.parts.serving.engine.abilities.dtype)
        check_metrics(mismatch, dtype=dtype, dropout=self.parts.dropout, step=self.step)

    def save(self) -> None:
        """Collective. A checkpoint of the present step, unless there is one."""
        if self.saved_step != self.step:
            with self.observer.phase("checkpoint"), dist.data_phase(self.world, "checkpoint"):
                extra = {"policy_version": self.step, "carried": asdict(self.carried), "times": self.observer.times()}
                extra["canary"] = self.parts.serving.canary_state()
                keep = self.config.checkpoint.keep
                checkpoint.save(self.run.checkpoints, self.parts.state, step=self.step, keep=keep, extra=extra)
            self.saved_step = self.step

    def rescued(self, *first: Callable[[], object]) -> AbstractContextManager[None]:
        """Where the block fails, the steps so far are saved (after `first`) before the run ends: the trainer's state is whole."""
        critic = self.parts.critic.valuer.sharded if self.parts.critic else None
        is_due = self.step > (self.saved_step or 0)
        return rescued(self.parts.sharded, [*first, self.save], is_due=is_due, critic=critic)

    def evaluate(self, name: str) -> EvalResult | None:
        """Collective. Score the held-out data greedily; before training under every template, of which the best counts."""
        greedy = replace(self.parts.sampling, temperature=0.0, max_new_tokens=self.config.eval.max_new_tokens)
        how: dict[str, Any] = {"sampling": greedy, "world": self.world, "should_stop": self.is_stopped}
        with self.rescued(), self.observer.phase(f"eval {name}"):
            result = score_held_out(self.parts.generate, self.parts.data, all_templates=name == "before", **how)
        if result is not None:
            self.observer.score(name, result)
        return result

    def is_stopped(self) -> bool:
        """Collective. Has a signal asked one of the ranks to stop?"""
        return dist.any_rank(stop_requested() is not None, self.world)

    def is_over(self) -> bool:
        """Collective. Stopped, or out of the time that the recipe gives."""
        limit = self.config.run.max_train_seconds
        late = limit is not None and self.carried.train_seconds >= limit
        return dist.any_rank(late or stop_requested() is not None, self.world)

    def is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def total(self, count: float) -> float:
        """Collective. Over all ranks."""
        return dist.sum_over_ranks([count], self.world)[0]
