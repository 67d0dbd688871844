"""A step's train items in, the policy one optimizer step further out: pack, score, loss, backward, clip, step.

Every rank brings its own items, as many or as few as it has, and makes the same number of passes: where it has run out of
micro-batches it runs dummies. The loss is a sum over tokens, divided by one number that counts over all ranks; so how
items are dealt to ranks and cut into micro-batches does not change the gradient.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.profiler import record_function

from lockstep.config import TrainConfig
from lockstep.data.packing import MicroBatch, dummy_micro_batch, pack
from lockstep.dist import World, all_or_none, data_phase, max_over_ranks, sum_over_ranks, sum_stats
from lockstep.errors import LockstepError
from lockstep.sharding.base import ShardedModel
from lockstep.train.logprobs import TokenLogprobs, token_logprobs
from lockstep.train.losses import policy_loss, token_stats
from lockstep.train.mismatch import MismatchSums, mismatch_over_ranks, mismatch_sums
from lockstep.train.optim import Optimizer
from lockstep.types import Sampling, Stat, TrainItem


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The same on every rank."""

    stats: dict[str, Stat]
    """Over all ranks. Per token: loss, ratio, clip_low, clip_high, approx_kl, entropy, kl_ref (with a reference).
    Besides: skipped (1 where there was nothing to train on; the others then have count 0)."""
    mismatch: MismatchSums
    """Over all ranks: trainer against engine on the sampled tokens."""
    grad_norm: float
    """Global L2 norm before clipping; 0 when skipped."""
    lr: float
    num_tokens: int
    """Completion tokens in the loss, over all ranks."""


class Actor:
    """The policy's update. Holds no state of its own beyond the model and the optimizer."""

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
    ):
        self.sharded = sharded
        self.optimizer = optimizer
        self.world = world
        self._train = train
        self._sampling = sampling
        self._pad_id = pad_id
        self._max_new_tokens = max_new_tokens

    def update(self, items: Sequence[TrainItem], *, step: int) -> UpdateResult:
        """Collective. One optimizer step on the items of all ranks; a rank may bring none. Leaves the model in eval mode.

        If no rank brings a completion token there is no gradient, and no step is taken: all ranks agree on it, since
        they compare the global count. Raises, on every rank and without a step: `ValueError` (`LockstepError` on the
        ranks that are not to blame) for an item whose prompt is empty or whose logprobs are not one per token,
        `LockstepError` if the gradient is not finite, `RankMissing` if a rank is lost.
        """
        batches = self._batches(items)
        lr = self.optimizer.lr(step)
        num_tokens, normaliser = self._global_counts(items)
        if num_tokens == 0:
            return UpdateResult(self._empty_stats(), MismatchSums(), grad_norm=0.0, lr=lr, num_tokens=0)
        self.optimizer.zero_grad()
        with data_phase(self.world, f"update {step}"):
            reference = self._reference(batches)
            stats, mismatch = self._accumulate(batches, items, reference, scale=self.world.size / normaliser)
            grad_norm = self._clip_and_step(lr, step=step)
        summed = sum_stats(stats, self.world)
        return UpdateResult(summed, mismatch_over_ranks(mismatch, self.world), grad_norm, lr, num_tokens)

    def _batches(self, items: Sequence[TrainItem]) -> list[MicroBatch]:
        """Collective. This rank's micro-batches, and dummies up to the largest number that a rank has."""
        train = self._train
        with all_or_none(self.world, "packing"):
            _check_logprobs(items)
            batches = pack(items, mode=train.packing, max_tokens=train.micro_batch_tokens, pad_id=self._pad_id)
        (most,) = max_over_ranks([len(batches)], self.world)
        batches += [dummy_micro_batch(self._pad_id) for _ in range(int(most) - len(batches))]
        return [batch.to(self.world.device) for batch in batches]

    def _global_counts(self, items: Sequence[TrainItem]) -> tuple[int, float]:
        """Collective. Tokens in the loss, and what the summed loss is divided by (at least 1)."""
        mine = [float(sum(len(item.ids) for item in items)), self._loss_count(items)]
        num_tokens, count = sum_over_ranks(mine, self.world)
        return int(num_tokens), max(count, 1.0)

    def _loss_count(self, items: Sequence[TrainItem]) -> float:
        """This rank's part of the normaliser.

        Tokens (DAPO's token mean, arXiv 2503.14476), or for dr_grpo a length that does not depend on the samples: items
        times the longest possible completion (arXiv 2503.20783). Items left out by the caller do not count.
        """
        if self._train.algorithm == "dr_grpo":
            return float(sum(1 for item in items if item.ids) * self._max_new_tokens)
        return float(sum(len(item.ids) for item in items))

    def _reference(self, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Collective. The reference policy's logprobs per micro-batch, where a KL term needs them."""
        if self._train.kl_coef == 0:
            return [None] * len(batches)
        self.sharded.module.eval()
        with record_function("train::reference"), torch.no_grad(), self.sharded.adapter_off():
            return [self._score(batch).logprobs for batch in batches]

    def _clip_and_step(self, lr: float, *, step: int) -> float:
        """Collective. The norm before clipping is global, so all ranks step or all raise."""
        with record_function("train::clip and step"):
            grad_norm = self.sharded.clip_grad_norm(self._train.max_grad_norm)
            if math.isfinite(grad_norm):
                self.optimizer.step(lr)
            self.optimizer.zero_grad()
        if not math.isfinite(grad_norm):
            raise LockstepError(
                f"step {step}: the gradient norm is {grad_norm}, expected a finite number; no optimizer step was taken. "
                "Look for non-finite rewards or advantages, or lower train.lr"
            )
        return grad_norm

    def _score(self, batch: MicroBatch, *, with_entropy: bool = False) -> TokenLogprobs:
        return token_logprobs(self.sharded.module, batch, sampling=self._sampling, with_entropy=with_entropy)

    def _accumulate(
        self,
        batches: Sequence[MicroBatch],
        items: Sequence[TrainItem],
        reference: Sequence[Tensor | None],
        *,
        scale: float,
    ) -> tuple[dict[str, Stat], MismatchSums]:
        """Collective. Gradients of the scaled loss in the parameters; this rank's stats and mismatch.

        FSDP averages gradients over ranks: `scale` holds the number of ranks to undo that. Gradients travel once, with
        the last micro-batch.
        """
        self.sharded.module.train()
        stats: dict[str, Stat] = defaultdict(lambda: Stat(0.0, 0.0))
        mismatch = MismatchSums()
        for number, (batch, ref_logprobs) in enumerate(zip(batches, reference, strict=True), start=1):
            self.sharded.set_gradient_sync(number == len(batches))
            with record_function("train::forward"):
                scored = self._score(batch, with_entropy=True)
                loss, part = self._loss(scored, batch, items, ref_logprobs)
            with record_function("train::backward"):
                (loss * scale).backward()
            mismatch += mismatch_sums(
                scored.logprobs, _per_token([items[i].rollout_logprobs for i in batch.items], loss)
            )
            for name, stat in part.items():
                stats[name] += stat
        self.sharded.module.eval()
        stats["loss"] = Stat(stats["loss"].total, self._loss_count(items))
        stats["skipped"] = Stat(0.0, 1.0)
        return dict(stats), mismatch

    def _loss(
        self, scored: TokenLogprobs, batch: MicroBatch, items: Sequence[TrainItem], ref_logprobs: Tensor | None
    ) -> tuple[Tensor, dict[str, Stat]]:
        """Sum of token losses, and stats, of one micro-batch."""
        assert scored.entropy is not None
        current = scored.logprobs.detach()
        advantages = _per_token([[items[i].advantage] * len(items[i].ids) for i in batch.items], current)
        # The only update on these samples: the policy that the ratio compares with is this one, exactly.
        sums = policy_loss(
            scored.logprobs,
            current,
            advantages,
            clip_low=self._train.clip_low,
            clip_high=self._train.clip_high,
            ref_logprobs=ref_logprobs,
            kl_coef=self._train.kl_coef,
        )
        extra = token_stats({"loss": sums.loss_sum[None], "entropy": scored.entropy})
        return sums.loss_sum, sums.stats | extra

    def _empty_stats(self) -> dict[str, Stat]:
        """The stats of an update that was skipped: nothing was counted."""
        none = torch.empty(0)
        ref = none if self._train.kl_coef else None
        names = policy_loss(none, none, none, clip_low=0.0, clip_high=0.0, ref_logprobs=ref).stats
        return dict.fromkeys((*names, "loss", "entropy"), Stat(0.0, 0.0)) | {"skipped": Stat(1.0, 1.0)}


def _check_logprobs(items: Sequence[TrainItem]) -> None:
    for index, item in enumerate(items):
        if len(item.rollout_logprobs) != len(item.ids):
            raise ValueError(
                f"item {index}: expected a rollout logprob for each of its {len(item.ids)} completion tokens, "
                f"{len(item.rollout_logprobs)} came"
            )


def _per_token(values: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    return torch.tensor(list(chain.from_iterable(values)), dtype=torch.float32, device=like.device)
