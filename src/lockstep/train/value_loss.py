"""A critic's values, its old ones and returns per token in; a sum of squared errors and sums of statistics out. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.data.sequences import Sequences
from lockstep.train.losses import Aggregation, LossSums, aggregate, token_stats
from lockstep.train.ratios import in_full
from lockstep.types import Stat


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    sequences: Sequences,
    *,
    clip: float | None,
    aggregation: Aggregation = "token_mean",
) -> LossSums:
    """1/2 max((v - R)^2, (clip(v, v_old +- clip) - R)^2) per token, summed (arXiv 1707.06347's code; 2005.12729). [N] each.

    `clip` None: plain squared error. Values are never divided by the sampling temperature. Masked tokens are left out. Raises
    `ValueError` for a tensor that is not [N], such as the [N, 1] of a head, and for a clip below 0.
    Stats: value_loss, value, value_clip (share whose gradient the clip stops), and what `explained_variance` needs.
    """
    if clip is not None and not clip >= 0:
        raise ValueError(f"expected a clip of at least 0, or None; {clip} came")
    values, old_values, returns = (
        sequences.clean(in_full(tensor)) for tensor in (values, old_values.detach(), returns.detach())
    )
    loss = (values - returns).square()
    clipped = torch.zeros_like(loss, dtype=torch.bool)
    if clip is not None:
        # Not by minimum and maximum, which at the bound itself hand half the gradient to a constant.
        near = values.clamp(old_values - clip, old_values + clip)
        other = (near - returns).square()
        clipped = other > loss
        loss = torch.maximum(loss, other)
    loss = 0.5 * loss
    error = (returns - old_values).double()
    sums = {
        "value_loss": loss,
        "value": values,
        "value_clip": clipped,
        "return": returns,
        "return_squared": returns.double().square(),
        "value_error": error,
        "value_error_squared": error.square(),
    }
    return LossSums(aggregate(loss, sequences, aggregation), token_stats(sums, sequences))


def explained_variance(stats: dict[str, Stat]) -> float:
    """1 - var(R - v_old) / var(R) of summed stats: 1 is perfect, 0 no better than the mean; NaN if the returns are equal."""
    spread = stats["return_squared"].mean - stats["return"].mean ** 2
    left = stats["value_error_squared"].mean - stats["value_error"].mean ** 2
    # Equal returns leave only the rounding of the difference above, relative to their squares.
    if not spread > 1e-12 * stats["return_squared"].mean:
        return float("nan")
    return 1 - left / spread
