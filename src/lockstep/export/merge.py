"""This rank's rows of a base weight and of B, and the whole of A, in; the same rows of the merged weight out.

*rows* way of merging: each rank merges the rows that it holds, before they travel. The values are bit-identical to PEFT's
own merge of the whole matrix on the CPU, since a row of B @ A depends on no other row - except that the CPU's matrix product takes
another kernel for fewer than a handful of rows. Layers that leave a rank with fewer than `MIN_ROWS` are computed whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import nn

from lockstep.errors import IncompleteExport
from lockstep.model.lora import scaling_of

MIN_ROWS = 16
"""Slices of fewer rows than this are not sure to round like the whole product (measured: 1 to 3 rows differ on MKL)."""


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """Where a layer's factors live and how they are scaled."""

    a: str
    """Live name of A, [rank, in]."""
    b: str
    """Live name of B, [out, rank]."""
    rank: int
    scaling: float
    """The layer's own, as PEFT computed it."""


def factors_of(name: str, layer: LoraLayer, adapter: str) -> LoraFactors:
    """Raises `IncompleteExport` for every kind of LoRA layer whose merge is more than W + s * B @ A on a linear layer."""
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    reasons = [
        (
            not isinstance(layer, LoraLinear) or not isinstance(layer.get_base_layer(), nn.Linear),
            f"it wraps {type(layer.get_base_layer()).__name__}",
        ),
        (variant is not None, f"it uses {type(variant).__name__}"),
        (bool(layer.lora_bias.get(adapter, False)), "it trains a LoRA bias"),
        (bool(getattr(layer, "fan_in_fan_out", False)), "its weight is stored transposed"),
    ]
    why = [reason for is_so, reason in reasons if is_so]
    if why:
        raise IncompleteExport(
            f"{name}: merged export handles plain LoRA on linear layers; {why[0]}. Export the adapter instead"
        )
    prefix = f"{name}.lora_"
    return LoraFactors(
        f"{prefix}A.{adapter}.weight", f"{prefix}B.{adapter}.weight", layer.r[adapter], scaling_of(layer, adapter)
    )


def merge_rows(base: torch.Tensor, b: torch.Tensor, a: torch.Tensor, scaling: float, *, rows: slice) -> torch.Tensor:
    """A new tensor: `base` [rows, in] plus the delta's `rows`; `b` [.., rank] holds the rows that `rows` counts in, `a` [rank, in].

    Rounds as PEFT does (peft.tuners.lora.Linear): factors of 16 bits are multiplied in fp32 and the delta rounded back to
    their dtype; the sum is taken in the wider dtype and rounded once to the base's.
    """
    wide = b.dtype in (torch.float16, torch.bfloat16)
    delta = (b.float() @ a.float() if wide else b @ a) * scaling  # [.., in]
    merged = base.detach().clone()
    merged += delta[rows].to(b.dtype)
    return merged
