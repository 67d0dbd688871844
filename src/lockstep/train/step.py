"""A step's train items in, the policy one or more optimizer steps further out: pack, score, loss, backward, clip, step.

Every rank brings its own items, as many or as few as it has, and makes the same number of passes and optimizer steps: where it
has run out of micro-batches it runs dummies. The loss is a sum over tokens, divided by one number that counts over all ranks;
so how items are dealt to ranks and cut into micro-batches does not change the gradient.

Glossary: *mini-batch* what one optimizer step trains on, over all ranks · *micro-batch* what one pass computes, on one rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch.profiler import record_function

from lockstep.config import TrainConfig
from lockstep.data.masks import spread
from lockstep.data.packing import MicroBatch
from lockstep.data.room import least, positions_of
from lockstep.dist import World, data_phase, sum_stats
from lockstep.errors import LockstepError
from lockstep.sharding.base import ShardedModel
from lockstep.train.choices import by_config
from lockstep.train.distill import Answer
from lockstep.train.kl import kl_reward
from lockstep.train.logprobs import TokenLogprobs, token_logprobs
from lockstep.train.loss_scale import LossScaler
from lockstep.train.mini_batches import ByItem, MiniBatch, Planner
from lockstep.train.mismatch import MismatchSums, mismatch_over_ranks, mismatch_sums
from lockstep.train.objective import Objective, rollout_logprobs
from lockstep.train.offload import activations_on_host
from lockstep.train.optim import Optimizer, clip_and_step
from lockstep.train.teacher import Teacher
from lockstep.types import Sample, Sampling, Stat, TrainItem


@dataclass(frozen=True, slots=True)
class StepStats:
    """One mini-batch, over all ranks."""

    stats: dict[str, Stat]
    grad_norm: float | None
    """Global L2 norm before clipping; None: no optimizer step was taken, since its KL was above `train.stop_kl`, or `overflowed`."""
    overflowed: bool = False
    """Over a float16 base: the enlarged gradient was not finite (`train/loss_scale.py`)."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The same on every rank."""

    stats: dict[str, Stat]
    """Over all ranks and mini-batches: those of `losses.actor_loss`, and loss. Besides: skipped (1 where there was nothing
    to train on; the others then have count 0); over a float16 base grad_overflow (share of optimizer steps left out) and
    loss_scale (the next step's)."""
    mismatch: MismatchSums
    """Over all ranks: trainer, before the update, against engine on the sampled tokens."""
    grad_norm: float
    """Mean over optimizer steps of the global L2 norm before clipping; 0 when none was taken."""
    lr: float
    num_tokens: int
    """Completion tokens in the loss, over all ranks; each once."""
    mini_batches: tuple[StepStats, ...] = ()
    """In the order they were trained on; with `train.stop_kl`, up to the one that stopped it."""

    @property
    def num_optimizer_steps(self) -> int:
        return sum(each.grad_norm is not None for each in self.mini_batches)


class Actor:
    """The policy's update. Holds no state of its own beyond the model, the optimizer and, over a float16 base, the `scaler`."""

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: Optimizer,
        *,
        train: TrainConfig,
        sampling: Sampling,
        world: World,
        pad_id: int,
        max_new_tokens: int,
        seed: int = 0,
        teacher: Teacher | None = None,
    ):
        """`seed`: of what mini-batches hold. `teacher`: whose KL is added to the loss."""
        train = by_config(train, sharded.module)
        self.sharded = sharded
        self.optimizer = optimizer
        self.scaler = LossScaler() if torch.float16 in sharded.compute_dtypes() else None
        self.world = world
        distillation = teacher.distillation if teacher else None
        self.objective = Objective.of(train, max_new_tokens=max_new_tokens, distillation=distillation)
        self._teacher = teacher
        self._train = train
        self._sampling = sampling
        self._seed = seed
        readers = [sharded, *([teacher.sharded] if teacher else [])]
        max_len = least(positions_of(cast(Any, each.module).config) for each in readers)
        self._planner = Planner(train, self.objective.denominator, world=world, pad_id=pad_id, max_len=max_len)

    def update(self, items: Sequence[TrainItem], *, step: int) -> UpdateResult:
        """Collective. `epochs * mini_batches` optimizer steps on the items of all ranks, which may be split in any way; a
        rank may bring none. Leaves the model in eval mode. Bit-reproducible for given items, seed and ranks (shown on CPUs).

        The ratio compares with the policy before the first of these steps (with a single one: exactly 1). If no rank brings
        a completion token there is no gradient, and no step is taken: all ranks agree on it, since they compare the global
        count. Raises, on every rank and without (another) step: `ValueError` (`LockstepError` on the ranks that are not to
        blame) for an item whose prompt is empty or whose logprobs are not one per token and finite, `LockstepError` if the gradient is
        not finite (over a float16 base: if the loss is not, or the gradient however little it is enlarged), `RankMissing` if a
        rank is lost.
        """
        epochs = self._planner.deal(items, seed=f"{self._seed} {step}")
        plan = self._planner.pack(epochs, items)
        lr = self.optimizer.lr(step)
        first = [mini for mini in plan if mini.is_first_epoch]
        num_tokens = sum(mini.num_tokens for mini in first)
        if num_tokens == 0:
            stats = self.objective.empty_stats() | {"skipped": Stat(1.0, 1.0)} | self._scaling(())
            return UpdateResult(stats, MismatchSums(), grad_norm=0.0, lr=lr, num_tokens=0)
        with data_phase(self.world, f"update {step}"):
            old = self._score_all(first, policy="current") if len(plan) > 1 else None
            reference = self._score_all(first, policy="reference") if self.objective.kl else None
        done: list[StepStats] = []
        mismatch = MismatchSums()
        for mini in plan:
            result, part = self._optimizer_step(mini, old, reference, lr, step=step)
            done.append(result)
            mismatch += part
            if result.grad_norm is None and not result.overflowed:
                break
        return _result(done, self._scaling(done), mismatch_over_ranks(mismatch, self.world), lr, num_tokens)

    def kl_rewards(self, samples: Sequence[Sample]) -> list[tuple[float, ...]] | None:
        """Collective. Token rewards -kl_coef * KL to the reference of this rank's samples, one per id (0 at observations); None
        where the recipe has none.

        One forward of the policy and one of the reference. The mean of them all is what the rewards lose per token.
        """
        if self._train.kl_in == "loss" or self._train.kl_coef == 0:
            return None
        items = [
            TrainItem(each.prompt.ids, each.ids, each.logprobs, 0.0, each.slot, loss_mask=each.loss_mask)
            for each in samples
        ]
        (mini,) = self._planner.pack([[list(range(len(items)))]], items)
        with data_phase(self.world, "KL in the reward"):
            old, ref = (self._score_all([mini], policy=policy) for policy in ("current", "reference"))
        kind, coef = self._train.kl_kind, self._train.kl_coef
        assert kind in ("k1", "k2", "k3")
        return [
            spread(kl_reward(kind, old[i], ref[i], coef=coef).tolist() if item.num_sampled else (), item.loss_mask)
            for i, item in enumerate(items)
        ]

    def _score_all(self, minis: Sequence[MiniBatch], *, policy: Literal["current", "reference"]) -> ByItem:
        """Collective. Log-probabilities per item, without gradient and dropout, in the layout that they are used in first."""
        self.sharded.module.eval()
        out: ByItem = {}
        with (
            record_function(f"train::{policy} logprobs"),
            torch.no_grad(),
            self.sharded.adapter_off() if policy == "reference" else nullcontext(),
        ):
            for mini in minis:
                for batch in mini.batches:
                    out |= mini.split(self._score(batch).logprobs, batch)
        return out

    def _score(self, batch: MicroBatch, *, with_entropy: bool = False, teacher: Answer | None = None) -> TokenLogprobs:
        return token_logprobs(
            self.sharded.module,
            batch,
            sampling=self._sampling,
            with_entropy=with_entropy,
            entropy_gradient=with_entropy and self.objective.entropy_coef > 0,
            teacher=teacher,
        )

    def _optimizer_step(
        self, mini: MiniBatch, old: ByItem | None, reference: ByItem | None, lr: float, *, step: int
    ) -> tuple[StepStats, MismatchSums]:
        """Collective. Unless the policy has moved too far already."""
        self.optimizer.zero_grad()
        with data_phase(self.world, f"update {step}"):
            mine, mismatch = self._accumulate(mini, old, reference)
            stats = self._summed(mine, mini)
            if self._train.stop_kl and stats["approx_kl"].mean > self._train.stop_kl:
                self.optimizer.zero_grad()
                return StepStats(stats, None), mismatch
            grad_norm = self._clip_and_step(lr, step=step, loss=stats["loss"].total)
        return StepStats(stats, grad_norm, overflowed=grad_norm is None), mismatch

    def _summed(self, mine: dict[str, Stat], mini: MiniBatch) -> dict[str, Stat]:
        """Collective."""
        stats = sum_stats(mine, self.world)
        return stats | {"loss": Stat(stats["loss"].total, mini.denominator)}

    def _accumulate(
        self, mini: MiniBatch, old: ByItem | None, reference: ByItem | None
    ) -> tuple[dict[str, Stat], MismatchSums]:
        """Collective. Gradients of the scaled loss in the parameters; this rank's stats, and mismatch in the first epoch.

        FSDP averages gradients over ranks: the scale holds the number of ranks to undo that. Gradients travel once, with
        the last micro-batch.
        """
        self.sharded.module.train()
        scale = self.world.size / mini.denominator * (self.scaler.scale if self.scaler else 1.0)
        kept = activations_on_host if self._train.offload_activations else nullcontext
        stats: dict[str, Stat] = defaultdict(lambda: Stat(0.0, 0.0))
        mismatch = MismatchSums()
        for number, batch in enumerate(mini.batches, start=1):
            self.sharded.set_gradient_sync(number == len(mini.batches))
            before = mini.join(old, batch)
            with self._teacher.answering(batch) if self._teacher else nullcontext() as answer:
                with record_function("train::forward"), kept():
                    scored = self._score(batch, with_entropy=True, teacher=answer)
                    ref = mini.join(reference, batch)
                    sums = self.objective.loss(scored, batch, mini.items, old=before, reference=ref)
                with record_function("train::backward"):
                    (sums.loss_sum * scale).backward()
            if mini.is_first_epoch:
                sampled_from = scored.logprobs if before is None else before
                mismatch += mismatch_sums(sampled_from, rollout_logprobs(batch, mini.items, like=sampled_from))
            for name, stat in sums.stats.items():
                stats[name] += stat
        self.sharded.module.eval()
        return dict(stats), mismatch

    def _clip_and_step(self, lr: float, *, step: int, loss: float) -> float | None:
        """Collective. The norm before clipping is global, so all ranks step, or none: then all raise, or, over a float16 base
        where only the gradient is not finite, all go on (None)."""
        if self.scaler is not None:
            self.optimizer.scale_gradients(1 / self.scaler.scale)
        grad_norm = clip_and_step(self.sharded, self.optimizer, max_norm=self._train.max_grad_norm, lr=lr)
        if self.scaler is not None and math.isfinite(loss):
            if not math.isfinite(grad_norm):
                self.scaler.overflowed(step=step)
                return None
            self.scaler.stepped()
        if not math.isfinite(grad_norm):
            raise LockstepError(
                f"step {step}: the gradient norm is {grad_norm}, expected a finite number; no optimizer step was taken. "
                "Look for non-finite rewards or advantages, or lower train.lr"
            )
        return grad_norm

    def _scaling(self, done: Sequence[StepStats]) -> dict[str, Stat]:
        if self.scaler is None:
            return {}
        overflows = Stat(float(sum(each.overflowed for each in done)), float(len(done)))
        return {"grad_overflow": overflows, "loss_scale": Stat(self.scaler.scale, 1.0)}


def _result(
    done: Sequence[StepStats], scaling: dict[str, Stat], mismatch: MismatchSums, lr: float, num_tokens: int
) -> UpdateResult:
    names = done[0].stats
    stats = {name: sum((each.stats[name] for each in done), Stat(0.0, 0.0)) for name in names}
    norms = [each.grad_norm for each in done if each.grad_norm is not None]
    return UpdateResult(
        stats | {"skipped": Stat(0.0, 1.0)} | scaling,
        mismatch,
        grad_norm=math.fsum(norms) / len(norms) if norms else 0.0,
        lr=lr,
        num_tokens=num_tokens,
        mini_batches=tuple(done),
    )
