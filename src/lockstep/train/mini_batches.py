"""The items of all ranks in; for each optimizer step, this rank's micro-batches and the global counts, out.

Groups (a prompt's samples) are shuffled over the global batch and dealt out whole, so a shared prompt is still computed once.
What a mini-batch holds depends on the groups and the seed alone: not on ranks, nor on the order of samples.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lockstep.config import TrainConfig
from lockstep.data.masks import sampled
from lockstep.data.packing import MicroBatch, Packing, dummy_micro_batch, pack
from lockstep.data.room import check_fits
from lockstep.dist import World, all_or_none, gather_texts, max_over_ranks, sum_over_ranks
from lockstep.types import TrainItem

ByItem = dict[int, Tensor]
"""[sampled tokens of the item], by its place in what the update was given."""
Parts = list[list[list[int]]]
"""Per epoch and mini-batch, places of this rank's items."""


@dataclass(frozen=True, slots=True, eq=False)
class MiniBatch:
    """What one optimizer step trains on: this rank's part."""

    items: list[TrainItem]
    places: list[int]
    """Of `items`, in what the update was given."""
    batches: list[MicroBatch]
    """Of `items`; as many as on every rank."""
    num_tokens: int
    """Over all ranks."""
    denominator: float
    is_first_epoch: bool

    def split(self, values_N: Tensor, batch: MicroBatch) -> ByItem:
        """[N] of a micro-batch, by item."""
        parts = values_N.split([self.items[i].num_sampled for i in batch.items])
        return {self.places[i]: part for i, part in zip(batch.items, parts, strict=True)}

    def join(self, values: ByItem | None, batch: MicroBatch) -> Tensor | None:
        """[N] of a micro-batch, from what was kept by item; None where nothing was kept."""
        if values is None:
            return None
        parts = [values[self.places[i]] for i in batch.items]
        return torch.cat(parts) if parts else batch.targets.new_empty(0, dtype=torch.float32)


def deal(groups: Sequence[int], *, epochs: int, mini_batches: int, seed: str) -> Parts:
    """Pure. Per epoch and mini-batch, the groups in it: each group once per epoch, mini-batches of equal size but for one
    group; no more mini-batches than there are groups."""
    order = sorted(set(groups))
    num = min(mini_batches, len(order))
    dealt = []
    for epoch in range(epochs):
        shuffled = order[:]
        random.Random(f"{seed} {epoch}").shuffle(shuffled)
        cuts = [len(shuffled) * i // num for i in range(num + 1)] if num else [0]
        dealt.append([shuffled[start:stop] for start, stop in pairwise(cuts)])
    return dealt


def packing_of(train: TrainConfig) -> Packing:
    """Of a section in which `auto` has been decided (`train/choices.py`); where it has not, what is right for every model."""
    return "padded" if train.packing == "auto" else train.packing


class Planner:
    """Decides what every optimizer step of an update computes, before any of them is taken."""

    def __init__(
        self,
        train: TrainConfig,
        denominator: Callable[..., float],
        *,
        world: World,
        pad_id: int,
        max_len: int | None = None,
    ):
        """`denominator`: `Objective.denominator`. `max_len`: positions of the models that read the items; None: any number."""
        self._train, self._denominator, self._world, self._pad_id = train, denominator, world, pad_id
        self._max_len = max_len

    def deal(self, items: Sequence[TrainItem], *, seed: str) -> Parts:
        """Collective where there are several mini-batches. Every rank gets as many; in some it may have nothing. Items
        without completion are in none of several."""
        epochs, num = self._train.epochs, self._train.mini_batches
        if num == 1:
            return [[list(range(len(items)))] for _ in range(epochs)]
        mine = " ".join(str(group) for group in sorted({item.group for item in items if item.num_sampled}))
        texts = gather_texts(self._world, mine, phase="mini-batches")
        groups = [int(group) for text in texts for group in text.split()]
        dealt = deal(groups, epochs=epochs, mini_batches=num, seed=seed)
        return [[_places(items, set(each)) for each in epoch] for epoch in dealt]

    def pack(self, parts: Parts, items: Sequence[TrainItem]) -> list[MiniBatch]:
        """Collective. In each mini-batch the same number of micro-batches on every rank: where a rank has fewer, dummies.

        Raises, on every rank: `ValueError` (`LockstepError` where the fault is another rank's) for an item that has no
        prompt, not one log-probability per token, one that is not finite where it counts, or more tokens than `max_len`.
        """
        flat = [places for epoch in parts for places in epoch]
        if not flat:
            return []
        mine = [[items[place] for place in places] for places in flat]
        mode, max_tokens = packing_of(self._train), self._train.micro_batch_tokens
        with all_or_none(self._world, "packing"):
            check_fits(items, self._max_len)
            _check_lengths(items)
            _check_logprobs(items)
            packed = [pack(each, mode=mode, max_tokens=max_tokens, pad_id=self._pad_id) for each in mine]
        most = max_over_ranks([len(batches) for batches in packed], self._world)
        counts = sum_over_ranks([count for each in mine for count in _counts(each)], self._world)
        out = []
        for number, (places, each, batches) in enumerate(zip(flat, mine, packed, strict=True)):
            batches += [dummy_micro_batch(self._pad_id) for _ in range(int(most[number]) - len(batches))]
            num_tokens, num_sequences = counts[2 * number : 2 * number + 2]
            out.append(
                MiniBatch(
                    items=each,
                    places=places,
                    batches=[batch.to(self._world.device) for batch in batches],
                    num_tokens=int(num_tokens),
                    denominator=self._denominator(num_tokens=num_tokens, num_sequences=num_sequences),
                    is_first_epoch=number < len(parts[0]),
                )
            )
        return out


def _places(items: Sequence[TrainItem], groups: set[int]) -> list[int]:
    return [place for place, item in enumerate(items) if item.num_sampled and item.group in groups]


def _counts(items: Sequence[TrainItem]) -> tuple[int, int]:
    """Tokens in the loss, and samples that have any. Items left out by the caller do not count."""
    return sum(item.num_sampled for item in items), sum(1 for item in items if item.num_sampled)


def _check_lengths(items: Sequence[TrainItem]) -> None:
    for index, item in enumerate(items):
        given = {"a rollout logprob": item.rollout_logprobs}
        if item.token_advantages is not None:
            given["an advantage"] = item.token_advantages
        if item.loss_mask is not None:
            given["a place in the loss mask"] = item.loss_mask
        for what, values in given.items():
            if len(values) != len(item.ids):
                raise ValueError(
                    f"item {index}: expected {what} for each of its {len(item.ids)} completion tokens, {len(values)} came"
                )


def _check_logprobs(items: Sequence[TrainItem]) -> None:
    """Before any of them is in a ratio. What stands at tokens that are not trained on is nobody's business."""
    for index, item in enumerate(items):
        if all(map(math.isfinite, sampled(item.rollout_logprobs, item.loss_mask))):
            continue
        counts = item.loss_mask or (True,) * len(item.ids)
        place = next(i for i, value in enumerate(item.rollout_logprobs) if counts[i] and not math.isfinite(value))
        raise ValueError(
            f"item {index}: the engine's log-probability of completion token {place} (id {item.ids[place]}) is "
            f"{item.rollout_logprobs[place]}, expected a finite number for every token that is trained on. A token that was sampled "
            "has one: look at the engine's logits and dtype, or leave the sample out (loss_mask leaves out tokens)"
        )
