"""The update's own code and a few rows in; how many tensors it has at once, of a chunk of logits or of an optimizer's step, out.

Counted, not derived: the code runs on the CPU over as few rows and elements as show it, and every tensor that it makes is watched
until it is freed. All of it is elementwise or a row at a time, so bytes grow with rows and elements.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.config import TrainConfig
from lockstep.train.distill import Answer, Distillation, SampledAnswer, TopAnswer, WholeAnswer
from lockstep.train.logprobs import Scoring, score_rows
from lockstep.train.optim import Optimizer
from lockstep.types import Sampling

_ROWS = 8
_ELEMENTS = 1024


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations inside made and that still exist, autograd's own among them: `now`, and the `peak`."""

    def __init__(self, known: Iterable[Tensor] = (), *, at_least: int = 1):
        """`known`: tensors of before, which are not counted. `at_least`: nor are those of fewer bytes than this."""
        super().__init__()
        self.now = self.peak = 0
        self._at_least = at_least
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self._watch(value.untyped_storage())
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known or storage.nbytes() < self._at_least:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes()).atexit = False

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


@dataclass(frozen=True, slots=True)
class LogitsUse:
    """What scoring a micro-batch and going back through it holds of logits at once."""

    rows: int
    """Of a chunk."""
    vocabulary: int
    num_live: float
    """Tensors as large as an fp32 chunk, at most."""

    @property
    def chunk_bytes(self) -> int:
        """One chunk in fp32."""
        return 4 * self.rows * self.vocabulary

    @property
    def nbytes(self) -> int:
        return round(self.num_live * self.chunk_bytes)


def measure_logits(
    *,
    num_tokens: int,
    chunk_tokens: int,
    vocabulary: int,
    dtype: torch.dtype,
    sampling: Sampling,
    entropy_gradient: bool,
    distillation: Distillation | None,
) -> LogitsUse:
    """`num_tokens`: completion tokens of a micro-batch; `dtype`: of the head. By the update's own `score_rows`, on 8 rows a chunk."""
    num_chunks = 2 if num_tokens > chunk_tokens else 1  # further ones come and go like the second
    weight = torch.zeros(vocabulary, 1, dtype=dtype)
    head = partial(nn.functional.linear, weight=weight)
    rows = torch.zeros(num_chunks * _ROWS, 1, dtype=dtype, requires_grad=True)
    targets = torch.zeros(len(rows), dtype=torch.long)
    answer = _answer(distillation, rows.detach(), head, sampling.temperature)
    scoring = Scoring(targets, sampling, _ROWS, True, entropy_gradient, answer)
    with LiveBytes([weight, rows, targets], at_least=_ROWS * vocabulary) as live:
        scored = score_rows(head, rows, scoring)
        parts = [scored.logprobs, scored.entropy if entropy_gradient else None]
        parts.append(scored.taught.divergence if scored.taught else None)
        torch.stack([part.sum() for part in parts if part is not None]).sum().backward()
    return LogitsUse(min(num_tokens, chunk_tokens), vocabulary, live.peak / (4 * _ROWS * vocabulary))


def _answer(distillation: Distillation | None, rows: Tensor, head: Any, temperature: float) -> Answer | None:
    """As a teacher's, of a vocabulary as large as the policy's."""
    if distillation is None:
        return None
    said = torch.zeros(len(rows))
    match distillation.kind:
        case "whole":
            return WholeAnswer(rows, head, temperature)
        case "top_k":
            return TopAnswer(torch.zeros(len(rows), 1, dtype=torch.long), said[:, None], said)
        case "sampled":
            return SampledAnswer(said)


def measure_step(dtypes: Collection[torch.dtype], *, train: TrainConfig) -> float:
    """Bytes for each element of a rank's parameters that a step of their optimizer makes and drops again, at most."""
    train = train.model_copy(update={"offload_optimizer": False})
    params = [nn.Parameter(torch.zeros(_ELEMENTS, dtype=dtype)) for dtype in dtypes for _ in range(2)]
    optimizer = Optimizer([(str(place), param) for place, param in enumerate(params)], train=train, num_steps=1)
    optimizer.step(train.lr)
    state = [slot for param in params for slot in optimizer.torch.state[param].values()]
    grads = [param.grad for param in params if param.grad is not None]
    with LiveBytes([*params, *grads, *state]) as live:
        optimizer.step(train.lr)
    return live.peak / (_ELEMENTS * len(params))
