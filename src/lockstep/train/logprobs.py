"""A model and a micro-batch in; log-probabilities (and entropies) of its completion tokens under the sampling out.

Shape suffixes: B rows, T columns, D hidden size, N completion tokens, V vocabulary.

How the head is reached, and why. `[B, T, V]` logits must never be whole, but the head cannot be called by itself: under
FSDP the head and the embedding belong to the root unit, whose parameters are there only inside the root's forward. So
the whole model is called, and while it runs the output embedding's `forward` is ours: it picks the N hidden states that
predict something, sends them through the real head in chunks, and returns N log-probabilities in place of logits. All
hooks (root, head, PEFT) fire once and as usual; tied heads, a LoRA on the head and gradients to both need nothing more.
Backward recomputes a chunk's logits from its hidden states, again through the real head: FSDP gathers the root for
backward as soon as a gradient reaches the root's output, which here is the log-probabilities.

A model that does something to logits behind its head (Gemma's soft-capping, Cohere's and Granite's scale) must do it to
logits: for those the head returns `[1, N, V]` in the model's dtype, whole, and only the fp32 arithmetic is chunked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lockstep.data.packing import MicroBatch, Packing, pack
from lockstep.errors import LockstepError, ModelError
from lockstep.sampling import check_sampling, sampling_logprobs
from lockstep.sharding.skeleton import unwrap
from lockstep.train.distill import Answer, Taught
from lockstep.train.model_inputs import model_inputs
from lockstep.types import Sampling, TrainItem

CHANGES_LOGITS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
)
"""Config fields of models whose forward changes the logits after the head."""
CHUNK_TOKENS = 1024
"""Rows of logits at a time."""
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of log-probabilities that rounding explains, by dtype; a token seen wrongly moves them by more."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Per completion token, in the micro-batch's order."""

    logprobs: Tensor
    """[N] fp32, differentiable: log-probability of the token under the sampling distribution."""
    entropy: Tensor | None
    """[N] fp32: entropy of that distribution in nats, detached unless asked otherwise; None where it was not asked for."""
    taught: Taught | None = None
    """[N] each: what a teacher's answer makes of the tokens; None without one."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """What a model's head makes the logits of a micro-batch's completion tokens from."""

    rows: Tensor
    """[N, D]: the hidden states that predict a token; [N, V] logits of a model that changes them behind its head."""
    logits: Callable[[Tensor], Tensor]
    """[n, D] -> [n, V]: any of the rows to their logits."""
    head: nn.Module | None
    """Whose parameters `logits` needs (`ShardedModel.gathered`); None: it needs nothing."""


def token_logprobs(
    model: nn.Module,
    batch: MicroBatch,
    *,
    sampling: Sampling,
    chunk_tokens: int = CHUNK_TOKENS,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    teacher: Answer | None = None,
) -> TokenLogprobs:
    """One forward of `model` (plain, PEFT or FSDP-wrapped transformers causal LM). Collective where the model is sharded.

    The softmax is in fp32 whatever the model's dtype. At most `chunk_tokens` rows of logits exist at a time, in forward
    and in backward (a single chunk keeps its logits for backward instead of computing them twice). `entropy_gradient` lets
    the entropy be trained on (a bonus); it keeps one more [chunk, V] for backward. A `teacher`'s answer is compared chunk by
    chunk with the distribution at the sampling's temperature, over the whole vocabulary also where the sampling is cut (top-k,
    top-p); until backward is done it must be able to answer. Under FSDP a gradient has to reach `logprobs` too, be it 0: FSDP
    gathers the root for backward when one comes to the root's output.
    Raises `ModelError` if the model has no output embedding, `LockstepError` if its forward does not hand the head's
    result through, `ValueError` for a sampling that cannot be (a temperature below 0).
    """
    check_sampling(sampling)
    lm = cast(PreTrainedModel, model)
    head = head_of(lm)
    head_forward = cast(Callable[[Tensor], Tensor], head.forward)
    arguments = Scoring(batch.targets, sampling, chunk_tokens, with_entropy, entropy_gradient, teacher)
    if changes_logits(lm):
        return score_rows(lambda rows: rows, _whole_logits(lm, head, batch), arguments)
    scored: list[TokenLogprobs] = []

    def score(rows_ND: Tensor) -> Tensor:
        scored.append(score_rows(head_forward, rows_ND, arguments))
        return scored[-1].logprobs

    forward_with_head(lm, head, batch, score)
    return scored[0]


def head_rows(model: nn.Module, batch: MicroBatch) -> HeadRows:
    """One forward of `model` up to its head, for logits that are made later, a few rows at a time. Collective where it is sharded.

    N * D numbers, where D is the hidden size. Raises as `token_logprobs`.
    """
    lm = cast(PreTrainedModel, model)
    head = head_of(lm)
    if changes_logits(lm):
        return HeadRows(_whole_logits(lm, head, batch), lambda rows: rows, None)
    forward = cast(Callable[[Tensor], Tensor], head.forward)
    return HeadRows(forward_with_head(lm, head, batch, lambda rows_ND: rows_ND), forward, head)


def probe_packing(model: nn.Module, mode: Packing, *, sampling: Sampling, pad_id: int) -> None:
    """Collective where the model is sharded. Compare `mode` with `padded` on six short items that every rank makes alike.

    Raises `ModelError` with the difference if the model computes something else when packed, e.g. because it ignores
    position_ids when it builds its mask. Complements `data.packing.check_packing_supported`, which reads the config.
    """
    fault = packing_fault(model, packing_gap(model, mode, sampling=sampling, pad_id=pad_id), mode)
    if fault:
        raise ModelError(f"train.packing: {fault}; use padded")


def packing_gap(model: nn.Module, mode: Packing, *, sampling: Sampling, pad_id: int) -> float:
    """Collective where the model is sharded. The largest difference of log-probabilities between `mode` and `padded`."""
    config = cast(Any, model).config.get_text_config()
    words = [(7 * i + 3) % config.vocab_size for i in range(40)]
    long, short = tuple(words[:20]), tuple(words[20:24])
    # One long item, so that the short ones stand behind each other in a row of its length.
    items = [TrainItem(prompt, tuple(words[g : g + 3]), (), 0.0, g) for g, prompt in enumerate((long, short, short))]
    items += [TrainItem(short, tuple(words[24 + i : 27 + 2 * i]), (), 0.0, 1) for i in range(3)]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        plain, other = (_logprobs_of(model, items, layout, sampling, pad_id) for layout in ("padded", mode))
    model.train(was_training)
    return float((plain - other).abs().max())


def packing_fault(model: nn.Module, gap: float, mode: Packing) -> str:
    """What a `packing_gap` says against a mode; empty where rounding explains it."""
    dtype = next(model.parameters()).dtype
    if gap <= PROBE_TOLERANCE.get(dtype, PROBE_TOLERANCE[torch.bfloat16]):
        return ""
    return (
        f"{mode} gives {cast(Any, model).config.get_text_config().model_type} other log-probabilities than padded (they differ by "
        f"{gap:.2g} in {dtype}): its attention does not follow position_ids or the mask"
    )


def _logprobs_of(model: nn.Module, items: list[TrainItem], mode: Any, sampling: Sampling, pad_id: int) -> Tensor:
    device = next(model.parameters()).device
    (batch,) = pack(items, mode=mode, max_tokens=1024, pad_id=pad_id)
    return token_logprobs(model, batch.to(device), sampling=sampling).logprobs


def head_of(lm: PreTrainedModel) -> nn.Module:
    """Raises `ModelError` for a model without one."""
    head = lm.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(lm).__name__} has no output embedding; expected a causal language model with a head")
    # FSDP1's wrapper around a head gathers in its own `forward`, once, and so stays; chunks are the module's inside.
    return unwrap(head)


def _whole_logits(lm: PreTrainedModel, head: nn.Module, batch: MicroBatch) -> Tensor:
    """[N, V] in the model's dtype, as its forward changes them behind the head."""
    forward = cast(Callable[[Tensor], Tensor], head.forward)
    with _forward_replaced(head, lambda hidden_BTD: forward(_select_predictors(hidden_BTD, batch))[None]):
        return lm(**model_inputs(lm, batch)).logits[0]


def forward_with_head(
    lm: PreTrainedModel,
    head: nn.Module,
    batch: MicroBatch,
    instead: Callable[[Tensor], Tensor],
    *,
    may_change: bool = False,
) -> Tensor:
    """The whole model's forward with `instead` in the place of its head, given the [N, D] rows that predict a completion token; what
    `instead` made of them. Collective where the model is sharded.

    `may_change`: what the model does to it on the way out (a scaling of logits) does not matter. With a gradient it does all the
    same: FSDP gathers the root for backward when one reaches the root's output, so that has to be what is trained on.
    Raises `LockstepError` if the head did not run once, or its result came out changed.
    """
    given: list[Tensor] = []

    def forward(hidden_BTD: Tensor) -> Tensor:
        given.append(instead(_select_predictors(hidden_BTD, batch)))
        return given[-1]

    with _forward_replaced(head, forward):
        out = lm(**model_inputs(lm, batch)).logits
    if len(given) != 1 or (out is not given[0] and (out.requires_grad or not may_change)):
        raise LockstepError(
            f"{type(lm).__name__} ran its head {len(given)} times or changed what it returned; expected one unchanged "
            f"result. If its config scales the logits, name that field in {__name__}.CHANGES_LOGITS"
        )
    return given[0]


def changes_logits(lm: PreTrainedModel) -> bool:
    """Does its forward do something to logits behind the head? Those of a micro-batch are whole then."""
    return any(getattr(lm.config.get_text_config(), name, None) is not None for name in CHANGES_LOGITS)


def _select_predictors(hidden_BTD: Tensor, batch: MicroBatch) -> Tensor:
    """The N hidden states that predict a completion token.

    `index_select`, because its backward is deterministic on the CPU also where a prompt's last token predicts the first
    token of several completions.
    """
    if hidden_BTD.shape[:-1].numel() != batch.padded_tokens:
        raise LockstepError(f"the head was given {list(hidden_BTD.shape)} for {list(batch.input_ids.shape)} tokens")
    return hidden_BTD.reshape(-1, hidden_BTD.shape[-1]).index_select(0, batch.predictors)


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Call `forward` instead of the module's own; an override that is already there (accelerate's) is put back."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """What becomes of rows of logits; see `token_logprobs`."""

    targets: Tensor
    sampling: Sampling
    chunk_tokens: int
    with_entropy: bool
    entropy_gradient: bool
    teacher: Answer | None


def score_rows(head: Callable[[Tensor], Tensor], rows: Tensor, scoring: Scoring) -> TokenLogprobs:
    """Score rows, at most `chunk_tokens` at a time. No rows still make one (empty) chunk, so that backward has a path."""
    size = scoring.chunk_tokens
    starts = range(0, max(rows.shape[0], 1), size)
    parts = []
    for start in starts:
        chunk = slice(start, start + size)
        if len(starts) == 1:
            parts.append(_score(head, rows[chunk], chunk, scoring))
        else:
            parts.append(checkpoint(_score, head, rows[chunk], chunk, scoring, use_reentrant=False))
    logprobs, entropy, taught, divergence, mass = (
        None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)
    )
    assert logprobs is not None
    return TokenLogprobs(logprobs, entropy, None if taught is None else Taught(taught, divergence, mass))


def _score(
    head: Callable[[Tensor], Tensor], rows: Tensor, chunk: slice, scoring: Scoring
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """[n] each: log-probabilities, entropies, and the fields of `Taught`."""
    targets = scoring.targets[chunk]
    logprobs_nV, whole_nV = _distributions(head(rows).float(), targets, scoring)
    chosen = logprobs_nV.gather(1, targets[:, None])[:, 0]
    entropy = _entropy(logprobs_nV, scoring) if scoring.with_entropy else None
    if scoring.teacher is None:
        return chosen, entropy, None, None, None
    taught = scoring.teacher.taught(whole_nV, targets, chunk)
    return chosen, entropy, taught.logprobs, taught.divergence, taught.mass


def _distributions(logits_nV: Tensor, targets: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Log-probabilities that are sampled from, and those that a teacher is compared with: without top-k and top-p."""
    sampling = scoring.sampling
    sampled = sampling_logprobs(logits_nV, sampling, keep_B=targets)
    if scoring.teacher is None or (sampling.top_k == 0 and sampling.top_p == 1):
        return sampled, sampled
    return sampled, sampling_logprobs(logits_nV, replace(sampling, top_k=0, top_p=1.0))


def _entropy(logprobs_nV: Tensor, scoring: Scoring) -> Tensor:
    with torch.set_grad_enabled(scoring.entropy_gradient and torch.is_grad_enabled()):
        # A token that sampling excludes has logprob -inf and adds 0, and no gradient: 0 * -inf would be NaN, 0 * lowest is 0.
        finite = logprobs_nV.clamp_min(torch.finfo(torch.float32).min)
        return -(logprobs_nV.exp() * finite).sum(-1)
