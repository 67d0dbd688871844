"""Rank 0's buffers in, the same buffers on every rank of a sharded model out; and where the tensors of a live model hang.

Buffers are whole on every rank. The order in which they travel is the plan's, on which ranks have agreed: never that of
`named_buffers()`, which may differ from rank to rank (verl #6365).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lockstep.dist import World, data_phase
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.plan import PlannedTensor
from lockstep.sharding.skeleton import walk

WINDOW_BYTES = 4 << 20
"""What travels to one rank at once, at most (a buffer larger than this travels alone)."""


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_Part = TypeVar("_Part", bound=_Sized)


class LiveTensors:
    """Where each tensor of a live model hangs, by clean name, below whatever wraps it. Walks the model once."""

    def __init__(self, module: nn.Module):
        self._owners = dict(walk(module))

    def find(self, name: str) -> torch.Tensor:
        """The parameter or buffer itself."""
        owner, attr = self._slot(name)
        found = owner._parameters.get(attr)
        found = owner._buffers.get(attr) if found is None else found
        assert found is not None, name
        return found

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        owner, attr = self._slot(name)
        if isinstance(tensor, nn.Parameter):
            owner._parameters[attr] = tensor
        else:
            owner._buffers[attr] = tensor

    def write_buffer(self, tensor: PlannedTensor, value: torch.Tensor, device: torch.device) -> None:
        """Set a buffer: in place where it has memory, and with memory on `device`, under all its names, where it has none."""
        old = self.find(tensor.name)
        if not old.is_meta:
            old.copy_(value)
            return
        placed = value.to(device=device, dtype=tensor.dtype)
        for name in (tensor.name, *tensor.aliases):
            self.replace(name, placed)

    def _slot(self, name: str) -> tuple[nn.Module, str]:
        path, _, attr = name.rpartition(".")
        return self._owners[path], attr


def send_buffers(sharded: ShardedModel, names: Collection[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Collective: one broadcast per `WINDOW_BYTES`. Rank 0's `tensors` (others bring none) become every rank's `names`.

    Every rank brings the same names (agreed before); the order is the plan's.
    """
    wanted, world = set(names), sharded.world
    chosen = [tensor for tensor in sharded.plan.buffers if tensor.name in wanted]
    if not chosen:
        return
    live = LiveTensors(sharded.module)
    with data_phase(world, "sending rank 0's buffers"), torch.no_grad():
        for window in windows(chosen, WINDOW_BYTES):
            sizes = [tensor.nbytes for tensor in window]
            message = torch.empty(sum(sizes), dtype=torch.uint8, device=world.device)
            if world.is_main:
                flat = [tensors[tensor.name].detach().reshape(-1).view(torch.uint8) for tensor in window]
                message.copy_(torch.cat([part.to(world.device) for part in flat]))
            if world.size > 1:
                dist.broadcast(message, global_rank(world, 0), group=world.data)
            for tensor, part in zip(window, message.split(sizes), strict=True):
                # A copy: bytes from the middle of a message need not be aligned for their dtype, and the message goes.
                value = part.clone().view(tensor.dtype).reshape(tensor.shape)
                live.write_buffer(tensor, value, world.device)


def global_rank(world: World, rank: int) -> int:
    """Number of one of this world's ranks in the default process group, which is what collectives take."""
    return world.ranks[rank] if world.ranks else rank


def windows(parts: Iterable[_Part], most: int) -> Iterator[list[_Part]]:
    """In the same order, together where they fit into `most` bytes; a larger one is alone."""
    window: list[_Part] = []
    for part in parts:
        if window and sum(each.nbytes for each in window) + part.nbytes > most:
            yield window
            window = []
        window.append(part)
    if window:
        yield window
