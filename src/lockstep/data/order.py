"""A step's number in, the rows of that step out: nothing to save, nothing to restore."""

from __future__ import annotations

import random


class PromptOrder:
    """The order in which training visits its prompts: epoch after epoch, each shuffled anew.

    What a step gets depends on (num_prompts, seed, shuffle, step, count) alone, and not on which steps were asked for
    before: a run that resumes at step k only asks for step k. `count` is the same at every step of a run.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool):
        if num_prompts < 1:
            raise ValueError(f"num_prompts must be at least 1; {num_prompts} came")
        self.num_prompts = num_prompts
        self.seed = seed
        self.shuffle = shuffle
        self._memo: tuple[int, int, list[int]] | None = None  # count, epoch, order: saves recomputation, nothing else

    def take(self, step: int, count: int) -> list[int]:
        """Indices of the `count` prompts of `step` (0 is the first): places step*count .. step*count+count-1 of the
        epochs laid end to end, so that a batch may straddle two.

        No prompt comes twice in a batch unless `count` exceeds `num_prompts`.
        """
        indices: list[int] = []
        position = step * count
        while len(indices) < count:
            epoch, start = divmod(position + len(indices), self.num_prompts)
            indices += self._order(epoch, count)[start : start + count - len(indices)]
        return indices

    def _order(self, epoch: int, count: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_prompts))
        first, order = 0, []
        if self._memo is not None and self._memo[0] == count and self._memo[1] <= epoch:
            first, order = self._memo[1] + 1, self._memo[2]
        for number in range(first, epoch + 1):
            order = self._next_order(number, order, count)
        self._memo = (count, epoch, order)
        return order

    def _next_order(self, epoch: int, previous: list[int], count: int) -> list[int]:
        """A shuffle in which what shares a batch with the end of the epoch before comes last, since it was just seen."""
        order = list(range(self.num_prompts))
        random.Random(f"{self.seed} {epoch}").shuffle(order)
        num_straddling = epoch * self.num_prompts % count
        if not num_straddling or count > self.num_prompts:
            return order
        just_seen = set(previous[-num_straddling:])
        head = [index for index in order if index not in just_seen]
        return head + [index for index in order if index in just_seen]
