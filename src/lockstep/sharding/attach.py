"""A model that somebody's trainer has wrapped already in; a `ShardedModel` that all ranks have agreed on out.

Whoever wrapped it, and in what: FSDP1 or FSDP2 by hand, accelerate, TRL or verl; DDP, or nothing; with activation
checkpointing and torch.compile anywhere between. The model is only looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.dist import World, agree
from lockstep.errors import ModelError, RanksDisagree
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.fsdp1 import FSDP1Model
from lockstep.sharding.fsdp2 import FSDP2Model
from lockstep.sharding.live import LiveModel
from lockstep.sharding.skeleton import unwrap
from lockstep.worlds import current_world

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Found:
    """How a model is wrapped."""

    kind: str
    """In words, for the agreement."""
    is_fsdp1: bool
    ranks: tuple[int, ...] | None
    """Global ranks that hold it, ascending; None: all of them."""
    group: dist.ProcessGroup | None
    device: torch.device


def attach(model: nn.Module, *, timeout_s: float = 60.0) -> ShardedModel:
    """Collective over the ranks that hold the model. See a wrapped model as lockstep does; nothing of it is changed.

    Units are the wrapped modules. Call it again when the model's structure changes (another adapter, other wrappers:
    `is_current()` says so). Raises `ModelError` naming what is not supported (tensor parallelism, two kinds of FSDP in one
    model), `RanksDisagree` on every rank, naming the first difference, when the ranks' models do not fit together, and
    `RankMissing` naming a rank that does not come within `timeout_s` (later waits have the limits of `ShardedModel.world`).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attach takes the model that the trainer wrapped (a torch module); a {type(model).__name__} came"
        )
    found = _look(model)
    world = current_world(ranks=found.ranks, group=found.group, device=found.device, timeout_s=timeout_s)
    made: LiveModel | None = None
    failure: ModelError | None = None
    try:
        made = FSDP1Model(model, world) if found.is_fsdp1 else FSDP2Model(model, world)
        lines = [f"the model is {found.kind}", *made.plan.lines(), *made.layout_lines(), *peft_lines(made.skeleton)]
    except ModelError as error:
        failure, lines = error, [f"refused here: {error}"]
    agree_or_raise(world, lines, failure, phase="attach", timeout_s=timeout_s)
    assert made is not None
    return cast(ShardedModel, made)


def agree_or_raise(
    world: World, lines: Sequence[str], failure: Exception | None, *, phase: str, timeout_s: float
) -> None:
    """Collective. Agree on the lines; a rank that failed raises its own error, and the others one that quotes it."""
    try:
        agree(world, phase=phase, fingerprint="\n".join(lines), describe=lambda: lines, timeout_s=timeout_s)
    except RanksDisagree:
        if failure is None:
            raise
    if failure is not None:
        raise failure


def peft_lines(skeleton: nn.Module) -> list[str]:
    """One line for each of PEFT's layers: adapters, their scales, which are active. Values that no tensor's shape shows."""
    out = [f"adapters {sorted(cast(Any, skeleton).peft_config)}"] if hasattr(skeleton, "peft_config") else []
    for name, module in skeleton.named_modules():
        scaling = module.__dict__.get("scaling")
        if isinstance(scaling, dict):
            active, merged = module.__dict__.get("_active_adapter"), module.__dict__.get("merged_adapters")
            out.append(f"adapters of {name}: scaling {scaling}, active {active}, merged {merged}")
    return out


def _look(model: nn.Module) -> _Found:
    wrappers = [each for each in model.modules() if isinstance(each, FullyShardedDataParallel)]
    tensors = [param for param in model.parameters() if isinstance(param, DTensor)]
    has_fsdp2 = any(isinstance(each, FSDPModule) for each in model.modules())
    if wrappers and (tensors or has_fsdp2):
        raise ModelError("the model has units of FSDP1 and of FSDP2 (or DTensors); wrap all of it in one of them")
    if wrappers:
        return _look_fsdp1(wrappers)
    if has_fsdp2 and not tensors:
        # Gathered by a forward without backward: the sharded parameters are back after this.
        for each in model.modules():
            if isinstance(each, FSDPModule):
                each.reshard()
        tensors = [param for param in model.parameters() if isinstance(param, DTensor)]
    if tensors:
        return _look_fsdp2(tensors)
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    if isinstance(model, DistributedDataParallel):
        ranks = tuple(dist.get_process_group_ranks(model.process_group))
        return _Found("wrapped in DDP", False, ranks, model.process_group, device)
    return _Found(f"not sharded ({type(unwrap(model)).__name__})", False, None, None, device)


def _look_fsdp2(tensors: Sequence[DTensor]) -> _Found:
    mesh = tensors[0].device_mesh
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    index = torch.cuda.current_device() if mesh.device_type == "cuda" else None
    group = mesh.get_group() if mesh.ndim == 1 else None
    device = torch.device(mesh.device_type, index) if index is not None else torch.device(mesh.device_type)
    return _Found("sharded by FSDP2", False, ranks, group, device)


def _look_fsdp1(wrappers: Sequence[FullyShardedDataParallel]) -> _Found:
    root = cast(Any, next((each for each in wrappers if cast(Any, each)._handle is not None), wrappers[0]))
    ranks = dist.get_process_group_ranks(root.process_group)
    num_replicas = root._inter_node_pg.size() if hasattr(root, "_inter_node_pg") else 1
    if num_replicas == 1:
        return _Found("sharded by FSDP1", True, tuple(ranks), root.process_group, root.compute_device)
    if num_replicas * len(ranks) != dist.get_world_size():
        raise ModelError(
            f"FSDP1 HYBRID_SHARD over {len(ranks)} ranks times {num_replicas} replicas is a part of the job's "
            f"{dist.get_world_size()} ranks; lockstep needs all of them"
        )
    return _Found(f"sharded by FSDP1, {num_replicas} replicas", True, None, None, root.compute_device)
