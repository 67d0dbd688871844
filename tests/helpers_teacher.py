"""Teachers over plain and sharded modules, the kinds of answers, and what distillation is by definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from helpers_train import Unsharded
from lockstep.config import TeacherConfig
from lockstep.testing import tiny_llama
from lockstep.train.teacher import Teacher
from lockstep.types import Sampling, TrainItem

KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "top_k": {"top_k": 5},
    "sampled": {"divergence": "sampled"},
}


def another_model(**options: Any) -> Any:
    """The student's shape, other weights, and logits of order 1, so that teacher and student differ."""
    model = tiny_llama(seed=11, **options)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
    return model.requires_grad_(False)


def make_teacher(
    module: nn.Module | Any,
    sampling: Sampling,
    *,
    vocabulary: int = 64,
    chunk_tokens: int = 1024,
    sharded: Any = None,
    **options: Any,
) -> Teacher:
    config = TeacherConfig(path="unused", **options)
    return Teacher(
        sharded or Unsharded(module), config, sampling=sampling, vocabulary=vocabulary, chunk_tokens=chunk_tokens
    )


def rows_of(model: Any, item: TrainItem, temperature: float) -> Tensor:
    """[tokens of the completion, V]: an item's log-probabilities, computed alone, unpadded, in float64."""
    ids = torch.tensor([[*item.prompt_ids, *item.ids]])
    logits = model(input_ids=ids).logits[0, len(item.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1)


def by_definition(
    student: Any, teacher: Any, items: Sequence[TrainItem], *, kind: str, temperature: float
) -> tuple[Tensor, Tensor]:
    """(KL per token, what is differentiated per token), from whole logits of float64 models."""
    values, losses = [], []
    for item in items:
        p = rows_of(student, item, temperature)
        with torch.no_grad():
            q = rows_of(teacher, item, temperature)
        picked = torch.arange(len(item.ids)), torch.tensor(item.ids)
        if kind == "whole":
            kl = (p.exp() * (p - q)).sum(-1)
        elif kind == "top_k":
            top = q.topk(5).indices
            p_top, q_top = p.gather(1, top), q.gather(1, top)
            p_rest, q_rest = 1 - p_top.exp().sum(-1), 1 - q_top.exp().sum(-1)
            kl = (p_top.exp() * (p_top - q_top)).sum(-1) + p_rest * (p_rest / q_rest).log()
        else:
            kl = (p - q)[picked]
        values.append(kl)
        losses.append(kl.detach() * p[picked] if kind == "sampled" else kl)
    return torch.cat(values), torch.cat(losses)
