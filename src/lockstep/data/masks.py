"""Values one per id and a sample's loss mask in; those of the tokens that the policy sampled, and back again, out. Pure.

A sample of several turns holds ids of two kinds: what the policy sampled, and what an environment said in between
(observations). Whatever is summed, averaged, compared or counted per token goes through `sampled` first, by selection and
not by multiplication: what stands at an observation (NaN included) is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import TypeVar

T = TypeVar("T")


def sampled(values: Sequence[T], mask: Sequence[bool] | None) -> Sequence[T]:
    """The values, one per id, of the ids that the policy sampled. Raises `ValueError` for unequal lengths."""
    if mask is None:
        return values
    if len(values) != len(mask):
        raise ValueError(f"expected a value for each of the {len(mask)} ids of a loss mask; {len(values)} came")
    return tuple(compress(values, mask))


def spread(values: Sequence[float], mask: Sequence[bool] | None) -> tuple[float, ...]:
    """One per id again, 0 at observations: the inverse of `sampled`. Raises `ValueError` if they are not one per sampled id."""
    if mask is None:
        return tuple(values)
    if len(values) != sum(mask):
        raise ValueError(f"expected a value for each of the {sum(mask)} sampled ids; {len(values)} came")
    left = iter(values)
    return tuple(next(left) if is_sampled else 0.0 for is_sampled in mask)


def num_read(mask: Sequence[bool] | None, num_ids: int) -> int:
    """Ids up to and including the last that the policy sampled: an observation behind it changes nothing."""
    if mask is None:
        return num_ids
    return next((place for place in range(num_ids, 0, -1) if mask[place - 1]), 0)
