"""A model whose parameters are spread over ranks, seen without asking by which FSDP: `ShardedModel`.

Every backend gives, for each live name, the contiguous range of elements (row-major) that each rank holds, and this rank's
elements. On that alone exports are planned and sent, checkpoints read, and values filled in.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch
from torch import nn

from lockstep.dist import World
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
    evens_out: Literal["tensor", "unit"]
    """Over what the ranks hold equally many bytes: each tensor (FSDP2's rows), or each unit (FSDP1's flat parameters)."""

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

    def gathered(self, part: nn.Module) -> AbstractContextManager[None]:
        """Collective, entering. Inside, the parameters of a module of the live model are whole on every rank, so that its `forward`
        (not the call, whose hooks may gather and free) works by itself, as often as each rank likes.

        After the model's first forward, and not within one; without gradients. Takes the memory of the units that hold the
        parameters, and FSDP1 keeps a root's afterwards.
        """
        ...

    def compute_dtypes(self) -> frozenset[torch.dtype]:
        """Floating dtypes that forward and backward compute in: the parameters' own, and those FSDP casts them to."""
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

        A parameter that is still on meta gets its memory here; it counts as filled afterwards.
        """
        ...

    def copy_to_replicas(self) -> None:
        """Collective, after `write_local`: what several ranks hold alike gets the first one's values on the others too."""
        ...

    def unfilled(self) -> list[str]:
        """Names, in plan order, of parameters that were on meta and got no values yet, then of buffers that are on meta.

        Their memory, where they have any (FSDP1 gives it while wrapping), holds whatever lay there. Cheap.
        """
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
