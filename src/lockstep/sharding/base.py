"""A model whose parameters are spread over ranks, seen without asking by which FSDP: `ShardedModel`, and one bounded gather.

Every backend gives, for each live name, the contiguous range of elements (row-major) that each rank holds, and this rank's
elements. On that alone `gather_flat` builds whole tensors with one collective, and never writes to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from lockstep.dist import World, data_phase
from lockstep.sharding.plan import ShardingPlan

Destination = Literal["all", 0]
Ranges = tuple[tuple[int, int], ...]
"""Per rank, the half-open range of elements (row-major order of the whole tensor) that it holds. May be empty."""


class ShardedModel(Protocol):
    """What training, export and checkpoint need of a sharded model."""

    module: nn.Module
    """The wrapped model: call it as the plain one."""
    skeleton: nn.Module
    """A plain copy of it on meta, without wrappers (`sharding/skeleton.py`): what to ask for names and for how PEFT merges."""
    plan: ShardingPlan
    """Names are the skeleton's (clean names)."""
    world: World

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """(live name, sharded parameter) of what the optimizer updates, in plan order."""
        ...

    def set_gradient_sync(self, on: bool) -> None:
        """Reduce gradients over ranks in the next backward (the last micro-batch of an update), or only accumulate them."""
        ...

    def clip_grad_norm(self, max_norm: float) -> float:
        """Collective. Scale gradients to a global L2 norm of at most `max_norm`; returns the norm before."""
        ...

    def adapter_off(self) -> AbstractContextManager[None]:
        """Inside, the forward is the reference policy's. Not collective by itself; every rank enters it alike."""
        ...

    def settle(self) -> None:
        """Bring every parameter to its sharded form (a forward without backward can leave the root gathered)."""
        ...

    def local_flat(self, name: str) -> torch.Tensor:
        """This rank's elements of a parameter (its range), 1-D, detached, in the parameter's own dtype.

        A view of live memory where `shard_dim` is 0: read it, never write it, never keep it. Under CPU offload it is on the CPU.
        """
        ...

    def ranges(self, name: str) -> Ranges:
        """Which elements of a parameter each rank holds, in row-major order of the tensor with `shard_dim` moved to the front.

        The same on every rank, without communication. Ascending and disjoint; together they are the whole tensor. What
        several ranks hold alike belongs to the first of them, and the others' ranges are empty.
        """
        ...

    def write_local(self, name: str, values: torch.Tensor) -> None:
        """Overwrite this rank's elements (`values`: 1-D, as many as its range). For loading only; the plan stays valid.

        A parameter that is still on meta gets its memory here.
        """
        ...

    def copy_to_replicas(self) -> None:
        """Collective, after `write_local`: what several ranks hold alike gets the first one's values on the others too."""
        ...

    def shard_dim(self, name: str) -> int:
        """The tensor dimension that is dealt out: 0, unless somebody placed the parameter as `Shard(1)` or beyond."""
        ...

    def buffer(self, name: str) -> torch.Tensor:
        """A live buffer, whole; every rank holds one."""
        ...

    def is_current(self) -> bool:
        """Do the model's slots still hold the objects that the plan was made of? Cheap (well below a millisecond).

        False after somebody added an adapter, swapped a parameter or wrapped anew: `attach` again.
        """
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor to gather: this rank's part, and where every rank's part belongs."""

    local: torch.Tensor
    """1-D, contiguous, in the dtype that travels."""
    ranges: Ranges
    shape: tuple[int, ...]


def gather_flat(pieces: Sequence[Piece], world: World, *, to: Destination, phase: str) -> list[torch.Tensor] | None:
    """Collective: one all-gather, or one gather for `to=0` (None on the other ranks). Whole tensors that own their memory.

    Every rank brings the same pieces in the same order (agreed before, by the plan). Holds one padded copy of the pieces
    per rank that receives, and the result.
    """
    mine = torch.cat([piece.local.detach().reshape(-1).view(torch.uint8) for piece in pieces])
    if world.size == 1:
        return _unpack([mine], pieces)
    sizes = [_bytes_on_rank(pieces, rank) for rank in range(world.size)]
    padded = torch.nn.functional.pad(mine, (0, max(sizes) - mine.numel())) if mine.numel() < max(sizes) else mine
    parts = [torch.empty_like(padded) for _ in range(world.size)] if to == "all" or world.is_main else None
    with data_phase(world, phase):
        if to == "all":
            dist.all_gather(parts, padded, group=world.data)
        else:
            dist.gather(padded, parts, dst=world.ranks[0] if world.ranks else 0, group=world.data)
    return None if parts is None else _unpack(parts, pieces)


def _bytes_on_rank(pieces: Sequence[Piece], rank: int) -> int:
    return sum((piece.ranges[rank][1] - piece.ranges[rank][0]) * piece.local.element_size() for piece in pieces)


def _unpack(parts: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Cut each rank's bytes at the pieces' bounds and put every tensor together in rank order."""
    offsets = [0] * len(parts)
    out = []
    for piece in pieces:
        chunks = []
        for rank, part in enumerate(parts):
            start, stop = piece.ranges[rank]
            nbytes = (stop - start) * piece.local.element_size()
            chunks.append(part[offsets[rank] : offsets[rank] + nbytes])
            offsets[rank] += nbytes
        out.append(torch.cat(chunks).view(piece.local.dtype).reshape(piece.shape))
    return out
