"""A seed in; one batch of token arrays out, flat ([N], as lockstep takes them) and padded ([B, T], as verl and TRL do).

Float64, so that what differs by more than 1e-6 is a difference of definitions and not of rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.data.sequences import Sequences

LENGTHS = (5, 1, 7, 3, 4, 2)
GROUPS = (0, 0, 0, 1, 1, 1)
REWARDS = (1.0, 0.0, 0.25, 2.0, -1.0, 0.5)
MAX_TOKENS = 9
"""The longest possible completion: padded arrays are wider than the longest sample."""
NAMES = ("logprobs", "old", "rollout", "ref", "entropy", "values", "old_values", "token_rewards")


@dataclass(frozen=True)
class Batch:
    flat: dict[str, Tensor]
    """[N] float64 by name, and the samples' advantages repeated over their tokens. `leaves` carry gradients."""
    sequences: Sequences
    mask: Tensor
    """[B, MAX_TOKENS] float64: 1 where a token is."""

    def padded(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        """[N] -> [B, MAX_TOKENS], differentiable."""
        grid = flat.new_full((self.sequences.num, MAX_TOKENS), fill)
        return grid.index_put((self.sequences.ids, self.sequences.columns), flat)

    def unpadded(self, padded: Tensor) -> Tensor:
        """[B, T], or [B, 1] for a value per sample, -> [N]."""
        wide = padded.expand(-1, MAX_TOKENS) if padded.shape[1] == 1 else padded
        return wide[self.sequences.ids, self.sequences.columns]


def make_batch(seed: int = 0, *, gap: float = 0.4) -> Batch:
    """`gap`: standard deviation of the log-ratios, large enough that every bound is hit on both sides."""
    generator = torch.Generator().manual_seed(seed)
    num = sum(LENGTHS)

    def draw() -> Tensor:
        return torch.randn(num, generator=generator, dtype=torch.float64)

    logprobs = -draw().abs() - 0.5
    flat = {"logprobs": logprobs} | {name: logprobs + gap * draw() for name in ("old", "rollout", "ref")}
    flat |= {"entropy": draw().abs(), "values": draw(), "old_values": draw(), "token_rewards": draw()}
    per_sample = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    sequences = Sequences.of(LENGTHS)
    flat["advantages"] = sequences.spread(per_sample)
    flat = {name: flat[name].requires_grad_(name in ("logprobs", "entropy", "values")) for name in flat}
    mask = torch.zeros(len(LENGTHS), MAX_TOKENS, dtype=torch.float64)
    mask[sequences.ids, sequences.columns] = 1
    return Batch(flat, sequences, mask)


@dataclass(frozen=True)
class Result:
    """What is compared: numbers, and gradients in the leaves (zeros where a loss has none)."""

    value: Tensor
    gradients: tuple[Tensor, ...] = ()


def with_gradients(batch: Batch, loss: Tensor) -> Result:
    leaves = [tensor for tensor in batch.flat.values() if tensor.requires_grad]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    zeros = (torch.zeros_like(leaf) for leaf in leaves)
    return Result(loss.detach(), tuple(zero if grad is None else grad for grad, zero in zip(found, zeros, strict=True)))


def gap_of(one: Result, other: Result) -> float:
    """Largest difference of a number or a gradient's entry; shapes must agree."""
    pairs = [(one.value, other.value), *zip(one.gradients, other.gradients, strict=True)]
    return max(float((torch.as_tensor(a).double() - torch.as_tensor(b).double()).abs().max()) for a, b in pairs)
