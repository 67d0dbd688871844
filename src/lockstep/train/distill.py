"""Log-probabilities of a student p and a teacher q over the vocabulary (or its likeliest part) in; KL(p || q) per token out.

Reverse KL on the student's own samples: on-policy distillation (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543; Thinking
Machines, "On-policy distillation", 2025). Pure; sums are the caller's (`losses.aggregate`). Masked tokens: clean the result's
inputs first (`Sequences`), or pass rows of tokens that count only.

Shape suffixes: N tokens, V vocabulary, K the tokens that the teacher's answer carries.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lockstep.data.sequences import Sequences

LOGPROB_FLOOR = -50.0
"""A teacher's log-probability below this counts as this (e^-50 is below fp32's rounding of 1): what it excludes entirely
costs the student much, not infinitely much."""

Tail = Literal["bucket", "renormalise", "drop"]
"""What becomes of the vocabulary outside the K tokens. bucket: all of it is one more outcome, so the result is a KL again
(never < 0, never more than the full one) · renormalise: both distributions given that the token is one of the K · drop: the
K terms alone, which are no KL: may be negative, and reward the student for moving mass outside."""


def reverse_kl(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """[N] sum over V of p (log p - log q), from normalised log-probabilities; differentiable in the student's.

    A token that the student excludes (-inf) adds nothing.
    """
    return _kl(student_NV, teacher_NV)


def reverse_kl_topk(student_NK: Tensor, teacher_NK: Tensor, *, tail: Tail = "bucket") -> Tensor:
    """[N] the same from K tokens a row: both models' normalised log-probabilities of the same K tokens."""
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
    return teacher_N.detach().clamp_min(LOGPROB_FLOOR) - logprobs_N.detach()


def _kl(student: Tensor, teacher: Tensor) -> Tensor:
    excluded = student == float("-inf")
    log_p = student.masked_fill(excluded, LOGPROB_FLOOR)
    terms = log_p.exp() * (log_p - teacher.detach().clamp_min(LOGPROB_FLOOR))
    return terms.masked_fill(excluded, 0.0).sum(-1)


def _with_rest(logprobs_NK: Tensor) -> Tensor:
    """[N, K + 1]: the last column is log(1 - sum of the others). A rest below the dtype's rounding counts as that (1e-7 in
    fp32): it is not known better, and its logarithm stays finite."""
    rest = -torch.expm1(torch.logsumexp(logprobs_NK, -1, keepdim=True))
    tiny = torch.finfo(logprobs_NK.dtype).eps
    return torch.cat([logprobs_NK, rest.clamp_min(tiny).log()], -1)
