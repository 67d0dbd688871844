"""A model before sharding, real on rank 0 and perhaps on meta elsewhere, in; its values in every rank's shards afterwards, out.

Two steps, around the wrapping: `take_values` compares what ranks hold and sets rank 0's tensors aside where another rank has
none; `send_from_rank0` deals them out. No rank but 0 ever holds more than its shards, one tensor's part of its own and one
window; rank 0 lets each tensor go once it is dealt out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lockstep.dist import World, agree, data_phase, gather_bytes
from lockstep.errors import RanksDisagree
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.buffers import WINDOW_BYTES, LiveTensors, global_rank, send_buffers, windows
from lockstep.sharding.plan import PlannedTensor, ShardingPlan
from lockstep.transport.base import tensor_line

_DIGEST_BYTES = 16


@dataclass(slots=True)
class Values:
    """What rank 0 has for ranks that have nothing."""

    parameters: tuple[str, ...]
    """Names that are sent, in plan order; the same on every rank."""
    buffers: tuple[str, ...]
    tensors: dict[str, torch.Tensor]
    """On rank 0 the whole tensors, emptied while they are sent; on the others nothing."""


def take_values(model: nn.Module, plan: ShardingPlan, world: World) -> Values:
    """Collective, before wrapping. Find out which tensors are real on which rank.

    Real on every rank: they must be equal (`fully_shard` cuts each rank's own copy and sends nothing, so an unseeded LoRA
    would become a mix of different ranks' rows). Real on rank 0, on meta elsewhere: parameters leave the model, which is
    then on meta on every rank (ties kept), and wait in the result for `send_from_rank0`. On meta everywhere: left alone,
    for `fill`. Raises `RanksDisagree`, on every rank, naming the first tensor that differs or that rank 0 lacks.
    """
    if world.size == 1:
        return Values((), (), {})
    agree(world, phase="values before sharding", fingerprint=plan.fingerprint(), describe=plan.lines)
    live = LiveTensors(model)
    parameters, buffers = list(plan.parameters), list(plan.buffers)
    marks = b"".join(_mark(live, tensor) for tensor in (*parameters, *buffers))
    every = gather_bytes(world, marks, phase="values before sharding", timeout_s=world.timeout_s)
    sent = _to_send([*parameters, *buffers], every)
    taken = {tensor.name: _take_out(live, tensor) for tensor in parameters if tensor.name in sent}
    kept = {tensor.name: live.find(tensor.name) for tensor in buffers if tensor.name in sent}
    return Values(tuple(taken), tuple(kept), {**taken, **kept} if world.is_main else {})


def send_from_rank0(sharded: ShardedModel, values: Values) -> None:
    """Collective. Give every rank its elements of what `take_values` set aside, and the whole buffers. Empties `values`.

    Packs tensors into windows of `WINDOW_BYTES` per rank and sends each rank only what it holds. Raises `RanksDisagree`
    when ranks hold other ranges than they think, `RankMissing` when one is lost.
    """
    if not values.parameters and not values.buffers:
        return
    world = sharded.world
    # In the words of the plan that will be followed: a plan that lacks a tensor here is a difference, not a hang.
    parameters, buffers = set(values.parameters), set(values.buffers)
    lines = [
        f"{tensor.line()} in {sharded.ranges(tensor.name)} of dim {sharded.shard_dim(tensor.name)}"
        for tensor in sharded.plan.parameters
        if tensor.name in parameters
    ]
    lines += [f"buffer {tensor.line()}" for tensor in sharded.plan.buffers if tensor.name in buffers]
    agree(world, phase="sending rank 0's values", fingerprint="\n".join(lines), describe=lambda: lines)
    with data_phase(world, "sending rank 0's values"), torch.no_grad():
        deal = _Deal(sharded, values)
        for window in windows(_segments(sharded, values.parameters), WINDOW_BYTES):
            deal.window(window)
    send_buffers(sharded, values.buffers, values.tensors)
    values.tensors.clear()


def _mark(live: LiveTensors, tensor: PlannedTensor) -> bytes:
    """One byte: is it real here? Then the digest of its values."""
    found = live.find(tensor.name)
    if found.is_meta:
        return bytes(1 + _DIGEST_BYTES)
    return b"\1" + bytes.fromhex(tensor_line(tensor.name, found).rpartition(" ")[2])


def _to_send(tensors: Sequence[PlannedTensor], every: Sequence[bytes]) -> set[str]:
    """Names that a rank lacks. Looks at every rank's marks alike, so that all ranks come to the same end."""
    sent: set[str] = set()
    size = 1 + _DIGEST_BYTES
    for index, tensor in enumerate(tensors):
        marks = [marks[index * size : (index + 1) * size] for marks in every]
        real = [rank for rank, mark in enumerate(marks) if mark[0]]
        if not real:
            continue
        if real[0] != 0:
            raise RanksDisagree(
                f"{tensor.name} has values on rank {real[0]} and is on meta on rank 0. Values come from rank 0: give them to it "
                "(ranks on meta get theirs from there), or leave the tensor on meta everywhere and call fill()"
            )
        other = next((rank for rank in real if marks[rank] != marks[0]), None)
        if other is not None:
            raise RanksDisagree(
                f"{tensor.name} {tensor.dtype} {list(tensor.shape)} has other values on rank {other} (xxh3 "
                f"{marks[other][1:].hex()}) than on rank 0 ({marks[0][1:].hex()}). Sharding would mix them: seed every rank "
                "alike before what is random (LoRA's A), or keep values on rank 0 only and build the others on meta"
            )
        if len(real) < len(every):
            sent.add(tensor.name)
    return sent


def _take_out(live: LiveTensors, tensor: PlannedTensor) -> torch.Tensor:
    """Put one meta parameter under all names of a parameter; returns what was there."""
    old = live.find(tensor.name)
    if not old.is_meta:
        empty = nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=old.requires_grad)
        vars(empty).update(vars(old))
        for name in (tensor.name, *tensor.aliases):
            live.replace(name, empty)
    return old.detach()


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of one tensor that travels at once."""

    name: str
    dtype: torch.dtype
    spans: tuple[tuple[int, int], ...]
    """Per rank, the elements that it gets now (positions in the same order as the tensor's ranges)."""
    is_last: bool

    @property
    def nbytes(self) -> int:
        return max(stop - start for start, stop in self.spans) * self.dtype.itemsize


def _segments(sharded: ShardedModel, names: Collection[str]) -> Iterator[_Segment]:
    """In plan order; no segment has more than a window for any rank."""
    wanted = set(names)
    for tensor in sharded.plan.parameters:
        if tensor.name not in wanted:
            continue
        ranges = sharded.ranges(tensor.name)
        most = max(stop - start for start, stop in ranges) * tensor.dtype.itemsize
        cuts = max(1, -(-most // WINDOW_BYTES))
        for cut in range(cuts):
            spans = tuple(
                (start + (stop - start) * cut // cuts, start + (stop - start) * (cut + 1) // cuts)
                for start, stop in ranges
            )
            yield _Segment(tensor.name, tensor.dtype, spans, cut == cuts - 1)


class _Deal:
    """Sends or receives windows, and writes each tensor once it is complete."""

    def __init__(self, sharded: ShardedModel, values: Values):
        self._sharded = sharded
        self._world = sharded.world
        self._tensors = values.tensors
        self._flat: dict[str, torch.Tensor] = {}
        self._mine: dict[str, torch.Tensor] = {}

    def window(self, segments: Sequence[_Segment]) -> None:
        if self._world.is_main:
            self._send(segments)
        else:
            self._receive(segments)

    def _send(self, segments: Sequence[_Segment]) -> None:
        for segment in segments:
            if segment.name not in self._flat:
                whole = self._tensors.pop(segment.name)
                dim = self._sharded.shard_dim(segment.name)
                self._flat[segment.name] = (whole.movedim(dim, 0) if dim else whole).reshape(-1)
        for rank in range(1, self._world.size):
            parts = [self._flat[each.name][slice(*each.spans[rank])] for each in segments]
            message = torch.cat([part.view(torch.uint8) for part in parts]).to(self._world.device)
            if message.numel():
                dist.send(message, global_rank(self._world, rank), group=self._world.data)
        for segment in segments:
            if segment.is_last:
                start, stop = self._sharded.ranges(segment.name)[0]
                self._sharded.write_local(segment.name, self._flat.pop(segment.name)[start:stop])

    def _receive(self, segments: Sequence[_Segment]) -> None:
        rank = self._world.rank
        sizes = [(stop - start) * each.dtype.itemsize for each in segments for start, stop in (each.spans[rank],)]
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=self._world.device)
        if message.numel():
            dist.recv(message, global_rank(self._world, 0), group=self._world.data)
        for segment, part in zip(segments, message.split(sizes), strict=True):
            begin, end = self._sharded.ranges(segment.name)[rank]
            if segment.name not in self._mine:
                self._mine[segment.name] = torch.empty(end - begin, dtype=segment.dtype, device=message.device)
            mine = self._mine[segment.name]
            start, stop = segment.spans[rank]
            mine[start - begin : stop - begin].view(torch.uint8).copy_(part)
            if segment.is_last:
                self._sharded.write_local(segment.name, self._mine.pop(segment.name))
