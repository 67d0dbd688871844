"""The dtypes that a sharded model computes and reduces in, whichever FSDP it is: one frozen value in, each one's policy out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lockstep.errors import ModelError


@dataclass(frozen=True, slots=True)
class Precision:
    """None keeps the parameters' own dtypes. Shards, and so exports, are always in the parameters' own."""

    param_dtype: torch.dtype | None = None
    """What gathered parameters are cast to for forward and backward."""
    reduce_dtype: torch.dtype | None = None
    """What gradients are reduced over ranks in."""
    buffer_dtype: torch.dtype | None = None
    """FSDP1 only: it casts buffers, also integer-like ones and rotary tables; FSDP2 leaves them alone."""
    output_dtype: torch.dtype | None = None
    """FSDP2 only: what a unit's floating outputs are cast to."""
    cast_forward_inputs: bool = True
    """Cast the root's (FSDP2: every unit's) floating inputs to `param_dtype`."""

    def check(self, backend: Literal["fsdp1", "fsdp2"]) -> None:
        """Raises `ModelError` for a dtype that the backend has no place for."""
        if backend == "fsdp1" and self.output_dtype is not None:
            raise ModelError("precision.output_dtype exists on FSDP2 only; cast the model's output yourself")
        if backend == "fsdp2" and self.buffer_dtype is not None:
            raise ModelError("precision.buffer_dtype exists on FSDP1 only; cast the buffers before sharding")
