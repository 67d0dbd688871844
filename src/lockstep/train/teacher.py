"""A frozen, sharded model and the policy's micro-batches in; what it says of their tokens (`distill.Answer`) out.

Per rank it takes its shards, and while it scores a micro-batch what any forward of it does. What then stays until the policy's
backward is done, by `teacher.divergence` and `teacher.top_k`:

    whole vocabulary   [N, hidden] rows, and the unit that holds its head, whole; its logits exist `chunk_tokens` rows at a time,
                       made where the policy's are and, with several chunks, again in backward
    top k              [N, k] log-probabilities and ids
    sampled            [N] log-probabilities
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import record_function
from transformers import PreTrainedTokenizerBase

from lockstep.config import TeacherConfig
from lockstep.data.packing import MicroBatch
from lockstep.errors import ModelError
from lockstep.sharding.base import ShardedModel
from lockstep.train.distill import Answer, Distillation, SampledAnswer, Taught, TopAnswer, WholeAnswer
from lockstep.train.logprobs import head_rows, token_logprobs
from lockstep.types import Sampling


class Teacher:
    """A frozen model that answers for micro-batches, at the sampling's temperature (and without its top-k and top-p)."""

    def __init__(
        self,
        sharded: ShardedModel,
        config: TeacherConfig,
        *,
        sampling: Sampling,
        vocabulary: int,
        chunk_tokens: int = 1024,
    ):
        """`vocabulary`: rows of the policy's head. `chunk_tokens`: of its own scoring (top k, sampled)."""
        self.sharded = sharded
        self.distillation = distillation_of(config)
        self._sampling = Sampling(temperature=sampling.temperature)
        self._top_k = config.top_k
        self._vocabulary = vocabulary
        self._chunk_tokens = chunk_tokens
        sharded.module.eval()

    @contextmanager
    def answering(self, batch: MicroBatch) -> Iterator[Answer]:
        """Collective. One forward of the teacher in the layout of `batch`; inside, and for backward, its answer can be used."""
        with record_function("train::teacher"), torch.no_grad():
            answer, gathered = self._ask(batch)
        with gathered:
            yield answer
        self.sharded.settle()

    def _ask(self, batch: MicroBatch) -> tuple[Answer, AbstractContextManager[None]]:
        """The answer, and the context in which it can be used."""
        module = self.sharded.module
        if self.distillation.kind == "whole":
            found = head_rows(module, batch)
            answer = WholeAnswer(found.rows, found.logits, self._sampling.temperature)
            return answer, nullcontext() if found.head is None else self.sharded.gathered(found.head)
        keep = _KeepTop(self._top_k, self._vocabulary) if self.distillation.kind == "top_k" else None
        scored = token_logprobs(module, batch, sampling=self._sampling, chunk_tokens=self._chunk_tokens, teacher=keep)
        self.sharded.settle()
        return SampledAnswer(scored.logprobs) if keep is None else keep.answer(), nullcontext()


@dataclass(slots=True, eq=False)
class _KeepTop:
    """Asked as a teacher is, by the teacher's own scoring: keeps the k likeliest tokens of each chunk."""

    k: int
    vocabulary: int
    ids: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    sampled: list[Tensor] = field(default_factory=list)

    def taught(self, student_nV: Tensor, targets_n: Tensor, chunk: slice) -> Taught:
        rows_nV = student_nV[:, : self.vocabulary]
        if rows_nV.shape[1] < student_nV.shape[1]:
            rows_nV = torch.log_softmax(rows_nV, -1)
        top = rows_nV.topk(min(self.k, rows_nV.shape[1]), dim=-1)
        self.ids.append(top.indices)
        self.logprobs.append(top.values)
        self.sampled.append(rows_nV.gather(1, targets_n[:, None])[:, 0])
        return Taught(self.sampled[-1])

    def answer(self) -> TopAnswer:
        return TopAnswer(torch.cat(self.ids), torch.cat(self.logprobs), torch.cat(self.sampled))


def check_same_tokens(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, *, rows: int, path: str) -> None:
    """The KL compares tokens by id: every id must mean the same, and have a row (the fewer of both heads) on both sides."""
    one, other = ours.get_vocab(), theirs.get_vocab()
    if one != other:
        by_id, by_id_there = ({number: token for token, number in each.items()} for each in (one, other))
        first = next(i for i in sorted({*by_id, *by_id_there}) if by_id.get(i) != by_id_there.get(i))
        raise ModelError(
            f"teacher.path {path!r} has another tokenizer than the policy, and their distributions cannot be compared: token {first} "
            f"is {by_id_there.get(first)!r} there and {by_id.get(first)!r} here ({len(other)} and {len(one)} tokens); give a teacher "
            "of the policy's model family"
        )
    if max(one.values()) >= rows:
        raise ModelError(
            f"teacher.path {path!r}: token {max(one.values())} of the tokenizer has no row in a head of {rows} tokens; expected the "
            "policy's and the teacher's heads to have a row for each token"
        )


def distillation_of(config: TeacherConfig) -> Distillation:
    """How the teacher enters the loss."""
    if config.divergence == "sampled":
        return Distillation(config.coef, "sampled")
    return Distillation(config.coef, "top_k" if config.top_k else "whole")
