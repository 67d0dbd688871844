"""Samples of the canary's probe in; the trainer's log-probabilities of their tokens, as it is or under an assumption, out.

One micro-batch per rank, dummy where a rank has none, so that every rank makes the same number of collective forwards. The code
that scores is the training's own (`train.logprobs.token_logprobs`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from lockstep.data.masks import sampled
from lockstep.data.packing import MicroBatch, Packing, dummy_micro_batch, pack
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.skeleton import walk
from lockstep.train.logprobs import token_logprobs
from lockstep.types import Sampling, TrainItem


class Scorer:
    """The trainer's view of some items. Reads the model; its mode (train or eval) is put back after each call."""

    def __init__(self, sharded: ShardedModel, items: Sequence[TrainItem], *, packing: Packing, pad_id: int):
        """Not collective. `items` may be empty on some ranks."""
        self._sharded = sharded
        self._items = [item for item in items if item.num_sampled]
        self._pad_id = pad_id
        most = sum(len(item.prompt_ids) + len(item.ids) for item in self._items) * max(len(self._items), 1)
        batches = pack(self._items, mode=packing, max_tokens=most, pad_id=pad_id) or [dummy_micro_batch(pad_id)]
        assert len(batches) == 1
        self._batch = batches[0].to(sharded.world.device)

    def engine(self) -> Tensor:
        """[N] float64 on the CPU: the engine's own log-probabilities, in the order of `trainer`."""
        return torch.tensor(
            [p for item in self._items for p in sampled(item.rollout_logprobs, item.loss_mask)], dtype=torch.float64
        )

    def trainer(self, sampling: Sampling, assuming: AbstractContextManager[None] | None = None) -> Tensor:
        """Collective. [N] float64 on the CPU: the tokens' log-probabilities under `sampling`, inside `assuming`."""
        return self._score(self._sharded.module, self._batch, sampling, assuming)

    def behind_stale_prefix(
        self, sampling: Sampling, *, prefix: int, before: AbstractContextManager[None], filler: Sequence[int]
    ) -> Tensor:
        """Collective. As `trainer`, but keys and values of each prompt's first `prefix` tokens are made inside `before`.

        What an engine does that keeps its prefix cache over an update (prime-rl #1650, vLLM #42125). `filler`: a prompt for
        ranks that have no item.
        """
        rows = [(item.prompt_ids, item.ids) for item in self._items] or [(tuple(filler), ())]
        device = self._sharded.world.device
        ids = torch.tensor([prompt[:prefix] for prompt, _ in rows], device=device)
        model = self._sharded.module
        was_training = model.training
        model.eval()
        with torch.no_grad(), before:
            cache = new_cache(self._sharded)
            model(input_ids=ids, use_cache=True, **{cache_argument(self._sharded): cache})
        model.train(was_training)
        self._sharded.settle()
        rest = _suffix([(prompt[prefix:], ids) for prompt, ids in rows], start=prefix, pad_id=self._pad_id)
        continued = cast(nn.Module, _Continued(model, {cache_argument(self._sharded): cache}, prefix))
        return self._score(continued, rest.to(device), sampling, None)

    @torch.no_grad()
    def _score(
        self, model: Any, batch: MicroBatch, sampling: Sampling, assuming: AbstractContextManager[None] | None
    ) -> Tensor:
        module = self._sharded.module
        was_training = module.training
        module.eval()
        try:
            with record_function("verify::score the probe"), assuming or nullcontext():
                return token_logprobs(model, batch, sampling=sampling).logprobs.double().cpu()
        finally:
            module.train(was_training)
            self._sharded.settle()


def new_cache(sharded: ShardedModel) -> DynamicCache:
    return DynamicCache(config=cast(Any, sharded.module).config)


def cache_argument(sharded: ShardedModel) -> str:
    """What the model's forward calls its cache: transformers renamed `past_key_values` to `cache` in 5.24."""
    plain = next(
        module
        for _, module in walk(sharded.module)
        if isinstance(module, PreTrainedModel) and module.get_output_embeddings()
    )
    return "cache" if "cache" in inspect.signature(plain.forward).parameters else "past_key_values"


class _Continued:
    """A model whose calls go on from a cache: what `token_logprobs` needs of a model, and no more."""

    def __init__(self, model: nn.Module, cache: dict[str, Any], prefix: int):
        self._model, self._cache, self._prefix = cast(Any, model), cache, prefix
        self.config = self._model.config

    def get_output_embeddings(self) -> nn.Module:
        return self._model.get_output_embeddings()

    def __call__(self, **inputs: Any) -> Any:
        mask = inputs["attention_mask"]
        mask = torch.cat([mask.new_ones(len(mask), self._prefix), mask], dim=1)
        return self._model(**{**inputs, **self._cache, "attention_mask": mask, "use_cache": True})


def _suffix(rows: Sequence[tuple[Sequence[int], Sequence[int]]], *, start: int, pad_id: int) -> MicroBatch:
    """A padded micro-batch of rows that begin at position `start`: (rest of the prompt, completion)."""
    width = max(len(prompt) + len(ids) for prompt, ids in rows)
    filled = [[*prompt, *ids] for prompt, ids in rows]
    tokens = torch.tensor([row + [pad_id] * (width - len(row)) for row in filled])
    blocks = torch.tensor([[0] * len(row) + [-1] * (width - len(row)) for row in filled])
    predictors = [
        number * width + len(prompt) - 1 + place
        for number, (prompt, ids) in enumerate(rows)
        for place in range(len(ids))
    ]
    owners = [number for number, (_, ids) in enumerate(rows) for _ in ids]
    return MicroBatch(
        mode="padded",
        input_ids=tokens,
        position_ids=torch.arange(start, start + width).repeat(len(rows), 1),
        block_ids=blocks,
        branch_ids=torch.zeros_like(tokens),
        items=tuple(sorted(set(owners))),
        predictors=torch.tensor(predictors, dtype=torch.int64),
        targets=torch.tensor([token for _, ids in rows for token in ids], dtype=torch.int64),
        item_ids=torch.tensor(owners, dtype=torch.int64),
    )
