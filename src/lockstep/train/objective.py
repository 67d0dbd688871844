"""The train section in; the loss of one micro-batch, and what the sums of all of them are divided by, out. No ranks.

What the recipe's words mean in terms of `losses`, `kl` and `corrections` is decided here, once, when the actor is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from lockstep.config import TrainConfig, correction_bounds
from lockstep.data.masks import sampled
from lockstep.data.packing import MicroBatch
from lockstep.data.sequences import Sequences
from lockstep.errors import LockstepError
from lockstep.train.corrections import NAMED, Correction, correct
from lockstep.train.distill import Distillation, distillation_advantages
from lockstep.train.logprobs import TokenLogprobs
from lockstep.train.losses import (
    CISPO,
    GSPO,
    Aggregation,
    Clip,
    KLTerm,
    LossSums,
    Surrogate,
    TokenInputs,
    actor_loss,
    denominator,
    token_stats,
)
from lockstep.train.ratios import reweighted
from lockstep.types import Stat, TrainItem

DUAL_CLIP = 3.0
"""verl's `clip_ratio_c`."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised."""

    surrogate: Surrogate
    aggregation: Aggregation
    kl: KLTerm | None
    """None: no KL in the loss, and no reference pass for it."""
    entropy_coef: float
    corrections: tuple[Correction, ...]
    max_tokens: int
    """Longest possible completion, for the aggregation that divides by it."""
    distillation: Distillation | None = None
    """None: no teacher."""

    @classmethod
    def of(cls, train: TrainConfig, *, max_new_tokens: int, distillation: Distillation | None = None) -> Objective:
        """Pure."""
        in_loss = train.kl_in == "loss" and train.kl_coef > 0
        return cls(
            surrogate=_surrogate(train),
            aggregation=_aggregation(train),
            kl=KLTerm(train.kl_kind, train.kl_coef) if in_loss else None,
            entropy_coef=train.entropy_coef,
            corrections=_corrections(train),
            max_tokens=max_new_tokens,
            distillation=distillation,
        )

    def loss(
        self,
        scored: TokenLogprobs,
        batch: MicroBatch,
        items: Sequence[TrainItem],
        *,
        old: Tensor | None,
        reference: Tensor | None,
    ) -> LossSums:
        """One micro-batch's sum of losses, and its stats. `items` is what was packed; [N] tensors in the batch's order.

        `old`: log-probabilities of the policy that the ratio compares with; None: the current ones, so the ratio is
        exactly 1 (CASES B82). `reference`: needed where there is a `kl`. With a `distillation`, `scored` holds what the teacher
        said.
        """
        sequences = sequences_of(batch, items)
        current = scored.logprobs.detach()
        before = current if old is None else old
        weights = None
        if self.corrections:
            weights = correct(self.corrections, before, rollout_logprobs(batch, items, like=current), sequences)
        advantages = per_token([_advantages(items[i]) for i in batch.items], like=current)
        divergence, watched = self._taught(scored, before)
        tokens = TokenInputs(
            scored.logprobs, before, advantages, sequences, reference, scored.entropy, weights, divergence
        )
        sums = actor_loss(
            tokens,
            self.surrogate,
            aggregation=self.aggregation,
            kl=self.kl,
            entropy_coef=self.entropy_coef,
            divergence_coef=self.distillation.coef if self.distillation else 0.0,
        )
        stats = sums.stats | token_stats(watched, sequences) | token_stats({"loss": sums.loss_sum[None]})
        return LossSums(sums.loss_sum, stats)

    def _taught(self, scored: TokenLogprobs, before: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """[N] divergence from the teacher, and what else is watched of it."""
        if self.distillation is None:
            return None, {}
        taught = scored.taught
        assert taught is not None
        divergence = taught.divergence
        if divergence is None:
            # Of k1 and its gradient, d KL = E[(1 + x) dlogp], the 1 is left out: 0 on average, and all noise near the teacher.
            lost = -distillation_advantages(scored.logprobs, taught.logprobs)
            divergence = reweighted(lost, scored.logprobs, before)
        watched = {"distill/teacher_logprob": taught.logprobs}
        return divergence, watched if taught.mass is None else watched | {"distill/top_k_mass": taught.mass}

    def denominator(self, *, num_tokens: float, num_sequences: float) -> float:
        """From counts over all ranks."""
        return denominator(
            self.aggregation, num_tokens=num_tokens, num_sequences=num_sequences, max_tokens=self.max_tokens
        )

    def empty_stats(self) -> dict[str, Stat]:
        """The names of `loss`'s stats, for an update that counted nothing."""
        none = torch.empty(0, requires_grad=True)
        weights = correct(self.corrections, none, none, Sequences.of([])) if self.corrections else None
        reference = none if self.kl else None
        divergence = none if self.distillation else None
        tokens = TokenInputs(none, none, none, Sequences.of([]), reference, none, weights, divergence)
        sums = actor_loss(tokens, self.surrogate, aggregation=self.aggregation, kl=self.kl)
        watched = self.distillation.watched if self.distillation else ()
        return dict.fromkeys((*sums.stats, *watched, "loss"), Stat(0.0, 0.0))


def sequences_of(batch: MicroBatch, items: Sequence[TrainItem]) -> Sequences:
    """Raises `LockstepError` if the micro-batch holds a part of a sample: a sample's ratio, mean or mask would be wrong."""
    lengths = [items[i].num_sampled for i in batch.items]
    if sum(lengths) != batch.num_tokens:
        raise LockstepError(
            f"a micro-batch has {batch.num_tokens} completion tokens of samples that have {sum(lengths)}; expected whole samples"
        )
    return Sequences.of(lengths, device=batch.targets.device)


def rollout_logprobs(batch: MicroBatch, items: Sequence[TrainItem], *, like: Tensor) -> Tensor:
    """[N]: what the engine said of its samples."""
    return per_token([sampled(items[i].rollout_logprobs, items[i].loss_mask) for i in batch.items], like=like)


def per_token(values: Sequence[Sequence[float]], *, like: Tensor) -> Tensor:
    """[N] from values of each item's sampled tokens (`masks.sampled`), in the order of `MicroBatch.items`."""
    return torch.tensor(list(chain.from_iterable(values)), dtype=torch.float32, device=like.device)


def _advantages(item: TrainItem) -> Sequence[float]:
    if item.token_advantages is None:
        return [item.advantage] * item.num_sampled
    return sampled(item.token_advantages, item.loss_mask)


def _surrogate(train: TrainConfig) -> Surrogate:
    usual = {"ppo": Clip(), "gspo": GSPO(), "cispo": CISPO()}[train.loss]
    low = usual.low if train.clip_low is None else train.clip_low
    high = usual.high if train.clip_high is None else train.clip_high
    if isinstance(usual, GSPO):
        return GSPO(low, high, gradient="token" if _tokens_differ(train) else "sequence")
    if isinstance(usual, CISPO):
        return CISPO(low, high)
    if train.clip_dual is None:
        return Clip(low, high, dual=DUAL_CLIP if 1 + high < DUAL_CLIP else None)
    return Clip(low, high, dual=train.clip_dual or None)


def _tokens_differ(train: TrainConfig) -> bool:
    """Whether tokens of one sample have different advantages (`make_items`)."""
    return train.algorithm == "gae" or (
        train.algorithm == "reinforce_pp" and train.kl_in == "reward" and train.kl_coef > 0
    )


def _aggregation(train: TrainConfig) -> Aggregation:
    if train.aggregation != "auto":
        return train.aggregation
    if train.algorithm == "dr_grpo":
        return "constant_length"
    return "seq_mean_token_mean" if train.loss == "gspo" else "token_mean"


def _corrections(train: TrainConfig) -> tuple[Correction, ...]:
    if train.correction == "none":
        return ()
    low, high = correction_bounds(train)
    return (replace(NAMED[train.correction], low=low, high=high),)
