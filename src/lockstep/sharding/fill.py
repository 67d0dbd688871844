"""A sharded model whose base is on meta and its checkpoint's files in; every rank's own rows, read from the files, out.

No rank holds the whole model where the checkpoint's names map one to one to the model's; where they do not (fused
experts, renamed modules) each rank loads the checkpoint through transformers, keeps its rows, and says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.dist import agree, all_or_none
from lockstep.errors import ModelError
from lockstep.model.load import ModelFiles, load_whole
from lockstep.names import checkpoint_name, is_adapter_name
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.plan import PlannedTensor

log = logging.getLogger(__name__)

ReadRows = Callable[[PlannedTensor, int, int], torch.Tensor]
"""(tensor, first row, row after the last) -> those rows, in the file's dtype."""


def fill(sharded: ShardedModel, files: ModelFiles, *, attention: str) -> None:
    """Collective. Give every base parameter on meta its values, then load persistent buffers; adapters are left as they are.

    Raises `ModelError` on every rank if one rank cannot read a tensor, or a stored shape is not the model's.
    """
    plan = sharded.plan
    agree(sharded.world, phase="fill", fingerprint=plan.fingerprint(), describe=plan.lines)
    with all_or_none(sharded.world, "reading the checkpoint"), torch.no_grad():
        read = _reader(sharded, files, attention)
        state: dict[str, Any] = {}
        for tensor in plan.parameters:
            if not is_adapter_name(tensor.name):
                param = _read_shard(sharded, tensor, read)
                state.update(dict.fromkeys((tensor.name, *tensor.aliases), param))
        sharded.module.load_state_dict(state, strict=False, assign=True)
        _fill_buffers(sharded, files, read)
        _check_nothing_left(sharded)


def _read_shard(sharded: ShardedModel, tensor: PlannedTensor, read: ReadRows) -> nn.Parameter:
    empty = sharded.module.get_parameter(tensor.name)
    assert isinstance(empty, DTensor)
    row_numel = max(tensor.numel // max(tensor.shape[0], 1), 1)
    start, stop = (bound // row_numel for bound in sharded.ranges(tensor.name)[sharded.world.rank])
    local = read(tensor, start, stop).to(device=sharded.world.device, dtype=tensor.dtype).contiguous()
    whole = DTensor.from_local(
        local, empty.device_mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride()
    )
    # One Parameter under all its names: assigning keeps tied weights tied.
    return nn.Parameter(whole, requires_grad=tensor.is_trainable)


def _reader(sharded: ShardedModel, files: ModelFiles, attention: str) -> ReadRows:
    wanted = {
        tensor.name: _stored_name(tensor, files)
        for tensor in sharded.plan.parameters
        if not is_adapter_name(tensor.name)
    }
    unmapped = [name for name, stored in wanted.items() if stored is None]
    if unmapped:
        log.warning(
            "%d parameters, the first %r, are stored under other names; each rank reads the whole checkpoint through transformers",
            len(unmapped),
            unmapped[0],
        )
        return _rows_of_whole(files, next(iter(sharded.plan.parameters)).dtype, attention)
    return _rows_of_files(files)


def _stored_name(tensor: PlannedTensor, files: ModelFiles) -> str | None:
    names = [checkpoint_name(name) for name in (tensor.name, *tensor.aliases)]
    return next((name for name in names if name in files.weights), None)


def _rows_of_files(files: ModelFiles) -> ReadRows:
    handles = {path: safe_open(path, framework="pt") for path in set(files.weights.values())}

    def read(tensor: PlannedTensor, start: int, stop: int) -> torch.Tensor:
        stored = _stored_name(tensor, files)
        if stored is None:
            raise ModelError(f"{checkpoint_name(tensor.name)!r} is not in {files.path}")
        rows = handles[files.weights[stored]].get_slice(stored)
        if tuple(rows.get_shape()) != tensor.shape:
            raise ModelError(
                f"{files.path}: {stored!r} is stored as {list(rows.get_shape())}; the model has {list(tensor.shape)}"
            )
        return rows[start:stop] if tensor.shape else handles[files.weights[stored]].get_tensor(stored)

    return read


def _rows_of_whole(files: ModelFiles, dtype: torch.dtype, attention: str) -> ReadRows:
    state = load_whole(files, dtype=dtype, attention=attention, device=torch.device("cpu")).state_dict()

    def read(tensor: PlannedTensor, start: int, stop: int) -> torch.Tensor:
        whole = state[checkpoint_name(tensor.name)]
        return whole[start:stop].clone() if tensor.shape else whole

    return read


def _fill_buffers(sharded: ShardedModel, files: ModelFiles, read: ReadRows) -> None:
    """Persistent buffers come from the files; the others were computed by the constructor and only move to the device."""
    for tensor in sharded.plan.buffers:
        owner, _, leaf = tensor.name.rpartition(".")
        module = sharded.module.get_submodule(owner)
        buffer = module.get_buffer(leaf)
        if checkpoint_name(tensor.name) in files.weights:
            buffer = read(tensor, 0, tensor.shape[0] if tensor.shape else 1).to(tensor.dtype)
        module._buffers[leaf] = buffer.to(sharded.world.device)


def _check_nothing_left(sharded: ShardedModel) -> None:
    tensors = [*sharded.module.named_parameters(), *sharded.module.named_buffers()]
    left = [name for name, tensor in tensors if tensor.is_meta]
    if left:
        raise ModelError(f"{len(left)} tensors got no value from the checkpoint, the first {left[0]!r}")
