"""Log-probabilities of a student p and what a teacher q says of the same tokens in; KL(p || q) per token out.

Reverse KL on the student's own samples: on-policy distillation (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543; Thinking
Machines, "On-policy distillation", 2025). Pure; sums are the caller's (`losses.aggregate`). Masked tokens: clean the result's
inputs first (`Sequences`), or pass rows of tokens that count only.

What a teacher says is an *answer*: its distribution as what its head is given (`WholeAnswer`: logits are made a chunk at a
time, where the student's are), its K likeliest tokens (`TopAnswer`), or the sampled token alone (`SampledAnswer`).

Shape suffixes: N tokens (of a micro-batch), n of a chunk of them, V vocabulary, K the tokens that the teacher's answer carries,
D what the teacher's head is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from lockstep.data.sequences import Sequences
from lockstep.train.ratios import in_full, log_ratio

LOGPROB_FLOOR = -50.0
"""A teacher's log-probability below this counts as this (e^-50 is below fp32's rounding of 1): what it excludes entirely
costs the student much, not infinitely much."""

Tail = Literal["bucket", "renormalise", "drop"]
"""What becomes of the vocabulary outside the K tokens. bucket: all of it is one more outcome, so the result is a KL again
(never < 0, never more than the full one) · renormalise: both distributions given that the token is one of the K · drop: the
K terms alone, which are no KL: may be negative, and reward the student for moving mass outside."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """How a teacher enters the loss."""

    coef: float
    kind: Literal["whole", "top_k", "sampled"] = "whole"

    @property
    def watched(self) -> tuple[str, ...]:
        """The stats that it adds, beside distill/kl: the teacher's log-probability of what was sampled, its k tokens' mass."""
        return ("distill/teacher_logprob", *(("distill/top_k_mass",) if self.kind == "top_k" else ()))


@dataclass(frozen=True, slots=True, eq=False)
class Taught:
    """Per token, fp32."""

    logprobs: Tensor
    """Of the sampled token under the teacher, at the temperature of sampling; detached."""
    divergence: Tensor | None = None
    """KL(p || q), differentiable in the student; None where the sampled token's log-probabilities are all that is known."""
    mass: Tensor | None = None
    """What the teacher gives to its K tokens; detached. None where it is not asked for K."""


class Answer(Protocol):
    """What a teacher says of a micro-batch."""

    def taught(self, student_nV: Tensor, targets_n: Tensor, chunk: slice) -> Taught:
        """For these of the N tokens: `student_nV` normalised log-probabilities, `targets_n` the sampled tokens."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class WholeAnswer:
    """The whole distribution, at [n, V] of memory for each chunk, and of computing the teacher's head in each."""

    rows_ND: Tensor
    head: Callable[[Tensor], Tensor]
    """[n, D] -> logits [n, V]; may be called where the student's chunks are computed, again in backward."""
    temperature: float

    def taught(self, student_nV: Tensor, targets_n: Tensor, chunk: slice) -> Taught:
        with torch.no_grad():
            logits_nV = fit_vocabulary(self.head(self.rows_ND[chunk]).float(), student_nV.shape[-1])
            teacher_nV = torch.log_softmax(logits_nV / self.temperature, -1)
            del logits_nV  # the KL below takes several times as much
        sampled = teacher_nV.gather(1, targets_n[:, None])[:, 0]
        return Taught(sampled, reverse_kl(student_nV, teacher_nV))


@dataclass(frozen=True, slots=True, eq=False)
class TopAnswer:
    """The K likeliest tokens, and the rest of the vocabulary as one outcome."""

    ids_NK: Tensor
    logprobs_NK: Tensor
    sampled_N: Tensor

    def taught(self, student_nV: Tensor, targets_n: Tensor, chunk: slice) -> Taught:
        ours_nK, theirs_nK = student_nV.gather(1, self.ids_NK[chunk]), self.logprobs_NK[chunk]
        mass = torch.logsumexp(theirs_nK, -1).exp()
        return Taught(self.sampled_N[chunk], reverse_kl_topk(ours_nK, theirs_nK), mass)


@dataclass(frozen=True, slots=True, eq=False)
class SampledAnswer:
    sampled_N: Tensor

    def taught(self, student_nV: Tensor, targets_n: Tensor, chunk: slice) -> Taught:
        return Taught(self.sampled_N[chunk])


def fit_vocabulary(rows_nV: Tensor, num: int) -> Tensor:
    """[n, num]: logits (or log-probabilities) for as many tokens as the student has. Of one tokenizer, checkpoints pad their
    heads to different sizes: rows beyond it are cut, or come in as excluded."""
    missing = num - rows_nV.shape[-1]
    if missing <= 0:
        return rows_nV[:, :num]
    return torch.nn.functional.pad(rows_nV, (0, missing), value=float("-inf"))


def reverse_kl(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """[N] sum over V of p (log p - log q), from normalised log-probabilities; differentiable in the student's.

    A token that the student excludes (-inf) adds nothing.
    """
    return _kl(student_NV, teacher_NV)


def reverse_kl_topk(student_NK: Tensor, teacher_NK: Tensor, *, tail: Tail = "bucket") -> Tensor:
    """[N] the same from K tokens a row: both models' normalised log-probabilities of the same K tokens."""
    student_NK, teacher_NK = in_full(student_NK), in_full(teacher_NK)
    match tail:
        case "drop":
            return _kl(student_NK, teacher_NK)
        case "renormalise":
            return _kl(torch.log_softmax(student_NK, -1), torch.log_softmax(teacher_NK, -1))
        case "bucket":
            return _kl(_with_rest(student_NK), _with_rest(teacher_NK))
    raise ValueError(f"expected a tail of bucket, renormalise or drop; {tail!r} came")


def clean_rows(rows_NV: Tensor, sequences: Sequences) -> Tensor:
    """Rows of masked tokens replaced by zeros before any arithmetic; their result is to be masked again when summed."""
    return rows_NV if sequences.mask is None else torch.where(sequences.mask[:, None], rows_NV, 0.0)


def distillation_advantages(logprobs_N: Tensor, teacher_N: Tensor) -> Tensor:
    """[N] detached log q - log p of the sampled tokens: as token advantages their policy gradient is the reverse KL's, one
    step at a time (the effect of a token on later ones is left out, as in the methods above)."""
    return log_ratio(teacher_N.detach().clamp_min(LOGPROB_FLOOR), logprobs_N.detach())


def _kl(student: Tensor, teacher: Tensor) -> Tensor:
    if student.shape != teacher.shape:
        raise ValueError(
            f"expected a row of each model per token; {list(student.shape)} and {list(teacher.shape)} came"
        )
    student, teacher = in_full(student), in_full(teacher)
    excluded = student == float("-inf")
    log_p = student.masked_fill(excluded, LOGPROB_FLOOR)
    terms = log_p.exp() * (log_p - teacher.detach().clamp_min(LOGPROB_FLOOR))
    return terms.masked_fill(excluded, 0.0).sum(-1)


def _with_rest(logprobs_NK: Tensor) -> Tensor:
    """[N, K + 1]: the last column is log(1 - sum of the others). A rest below the dtype's rounding counts as that (1e-7 in
    fp32): it is not known better, and its logarithm stays finite."""
    # Of nothing but -inf (a student that excludes all K) logsumexp has no gradient but NaN.
    rest = -torch.expm1(torch.logsumexp(logprobs_NK.clamp_min(LOGPROB_FLOOR), -1, keepdim=True))
    tiny = torch.finfo(logprobs_NK.dtype).eps
    return torch.cat([logprobs_NK, rest.clamp_min(tiny).log()], -1)
