"""Tokens per sample in; which of a micro-batch's [N] tokens belong together and count, and sums over them, out. Pure.

The tokens of a sample lie behind each other, samples in the micro-batch's order (`MicroBatch.items`), and a sample is never
split over micro-batches: so what is summed within a sample needs no other rank, and only what is summed over samples does.

Shape suffixes: N tokens, S samples, T the longest sample's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The samples of one micro-batch. Make it with `Sequences.of`."""

    ids: Tensor
    """[N] int64, ascending: the token's sample, 0 .. S - 1."""
    columns: Tensor
    """[N] int64: the token's place within its sample."""
    mask: Tensor | None
    """[N] bool, True where a token is the policy's own and counts; None: all of them."""
    counts: Tensor
    """[S] float64: tokens that count."""
    longest: int
    """T: tokens of the longest sample, masked ones included."""

    @classmethod
    def of(cls, lengths: Sequence[int], *, device: torch.device | str = "cpu", mask: Tensor | None = None) -> Sequences:
        """`lengths` [S], 0 allowed; `mask` [N] bool leaves out observation tokens.

        Raises `ValueError` if the mask is not one bool per token.
        """
        sizes = torch.tensor(list(lengths), dtype=torch.int64)
        total = int(sizes.sum())
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (total,)):
            raise ValueError(f"expected a bool mask of [{total}], one per token; {mask.dtype} {list(mask.shape)} came")
        ids = torch.repeat_interleave(torch.arange(sizes.numel()), sizes)
        columns = torch.arange(total) - (sizes.cumsum(0) - sizes)[ids]
        counts = sizes.double()
        if mask is not None:
            counts = torch.zeros(sizes.numel(), dtype=torch.float64).index_add_(0, ids, mask.cpu().double())
            mask = mask.to(device)
        longest = int(sizes.max()) if sizes.numel() else 0
        return cls(ids.to(device), columns.to(device), mask, counts.to(device), longest)

    @property
    def num(self) -> int:
        """S."""
        return self.counts.numel()

    def clean(self, values_N: Tensor, fill: float = 0.0) -> Tensor:
        """`fill` in masked places, whatever stands there; neither its value nor a gradient gets through.

        To be called before any arithmetic: 0 * inf is NaN, and so is the gradient of a NaN that is dropped later. Raises
        `ValueError` for what is not [N]: a head's [N, 1] against an [N] would broadcast to [N, N], without a word.
        """
        self._check(values_N)
        return values_N if self.mask is None else torch.where(self.mask, values_N, fill)

    def sums(self, values_N: Tensor) -> Tensor:
        """[S]: sum over a sample's tokens, masked ones left out; differentiable.

        Through [S, T] and not by `index_add`, whose order of additions varies on a GPU: a sample's sum is the same from
        run to run, and does not depend on its neighbours. S * T numbers exist for it, at most N^2 / 4 (one long sample,
        many of one token).
        """
        return self.grid(self.clean(values_N)).sum(1)

    def means(self, values_N: Tensor) -> Tensor:
        """[S]: mean over a sample's tokens that count; 0 where none does."""
        return self.sums(values_N) / self.counts.clamp_min(1).to(values_N.dtype)

    def minima(self, values_N: Tensor) -> Tensor:
        """[S]: smallest value of a sample's tokens that count; inf where none does."""
        clean = self.clean(values_N, float("inf"))
        return (
            self.grid(clean, float("inf")).min(1).values if self.longest else clean.new_full((self.num,), float("inf"))
        )

    def spread(self, values_S: Tensor) -> Tensor:
        """[N]: each token gets its sample's value; differentiable. Raises `ValueError` for what is not [S]."""
        if values_S.shape != self.counts.shape:
            raise ValueError(f"expected one value per sample, [{self.num}]; {list(values_S.shape)} came")
        return values_S[:, None].expand(-1, self.longest)[self.ids, self.columns]

    def grid(self, values_N: Tensor, fill: float = 0.0) -> Tensor:
        """[S, T]. No place is written twice, so the order of writing does not matter."""
        self._check(values_N)
        empty = values_N.new_full((self.num, self.longest), fill)
        return empty.index_put((self.ids, self.columns), values_N)

    def _check(self, values_N: Tensor) -> None:
        if values_N.shape != self.ids.shape:
            raise ValueError(f"expected one value per token, {list(self.ids.shape)}; {list(values_N.shape)} came")
