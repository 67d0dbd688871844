"""A parity batch in; what lockstep's functions make of it, out: each a function of the batch, for a row of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from parity_batch import GROUPS, LENGTHS, MAX_TOKENS, REWARDS, Batch, Result, with_gradients
from torch import Tensor

from lockstep.data import gae
from lockstep.data.advantages import advantages
from lockstep.train.corrections import Correction, correct
from lockstep.train.distill import reverse_kl
from lockstep.train.kl import kl_loss
from lockstep.train.losses import TokenInputs, actor_loss, denominator
from lockstep.train.value_loss import value_loss

Run = Callable[[Batch], Result]


def our_advantages(
    algorithm: Any, *, groups: tuple[int, ...] = GROUPS, eps: float = 1e-6, per_token: bool = True
) -> Run:
    def run(batch: Batch) -> Result:
        found = torch.tensor(advantages(REWARDS, groups, algorithm=algorithm, eps=eps, lengths=LENGTHS))
        return Result(batch.sequences.spread(found) if per_token else found)

    return run


def our_loss(kind: Any, how: Any, *, rules: tuple[Correction, ...] = (), on_policy: bool = False, **terms: Any) -> Run:
    def run(batch: Batch) -> Result:
        flat = batch.flat
        old = flat["logprobs"].detach() if on_policy else flat["old"]
        weights = correct(rules, flat["old"], flat["rollout"], batch.sequences) if rules else None
        tokens = TokenInputs(
            flat["logprobs"], old, flat["advantages"], batch.sequences, flat["ref"], flat["entropy"], weights
        )
        return with_gradients(batch, actor_loss(tokens, kind, aggregation=how, **terms).loss_sum / count(how))

    return run


def count(how: Any) -> float:
    return denominator(how, num_tokens=sum(LENGTHS), num_sequences=len(LENGTHS), max_tokens=MAX_TOKENS)


def our_weights(*rules: Correction, field: str = "weight") -> Run:
    def run(batch: Batch) -> Result:
        found = correct(rules, batch.flat["old"], batch.flat["rollout"], batch.sequences)
        return Result(getattr(found, field).double())

    return run


def our_kl(kind: Any) -> Run:
    def run(batch: Batch) -> Result:
        logprobs = batch.flat["logprobs"]
        values = kl_loss(kind, logprobs, batch.flat["ref"], old_logprobs=logprobs.detach())
        return with_gradients(batch, values.mean())

    return run


def our_gae(*, whiten: bool, gamma: float = 0.9, lam: float = 0.8) -> Run:
    def run(batch: Batch) -> Result:
        rewards, values, sequences = batch.flat["token_rewards"], batch.flat["old_values"], batch.sequences
        found = gae.gae(rewards, values, sequences, gamma=gamma, lam=lam)
        if not whiten:
            return Result(found.returns)
        total, num = gae.sum_and_count(found.advantages, sequences)
        variance = gae.squared_deviations(found.advantages, sequences, mean=total / num) / (num - 1)
        return Result(gae.whiten_tokens(found.advantages, sequences, mean=total / num, variance=variance))

    return run


def our_value_loss(batch: Batch) -> Result:
    flat = batch.flat
    sums = value_loss(flat["values"], flat["old_values"], flat["token_rewards"], batch.sequences, clip=0.5)
    return with_gradients(batch, sums.loss_sum / count("token_mean"))


def our_reverse_kl(student: Tensor, teacher: Tensor) -> Result:
    logits = student.clone().requires_grad_()
    loss = reverse_kl(torch.log_softmax(logits, -1), torch.log_softmax(teacher, -1)).mean()
    return Result(loss.detach(), torch.autograd.grad(loss, [logits]))


def gradients_alone(run: Run) -> Run:
    return lambda batch: Result(torch.stack(run(batch).gradients))


def distributions() -> tuple[Tensor, Tensor]:
    """Log-probabilities [5, 8] of a student and a teacher."""
    generator = torch.Generator().manual_seed(1)
    student, teacher = (torch.log_softmax(torch.randn(5, 8, generator=generator), -1) for _ in range(2))
    return student, teacher


def likeliest() -> tuple[Tensor, Tensor]:
    """The same of the teacher's three likeliest tokens, [5, 3]."""
    student, teacher = distributions()
    index = teacher.topk(3).indices
    return student.gather(1, index), teacher.gather(1, index)
