"""An empty model with its adapter, its checkpoint and the config in; the model sharded over all ranks and filled out."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lockstep.config import Config
from lockstep.dist import World
from lockstep.known_warnings import while_recomputing
from lockstep.model.dtype import Rule
from lockstep.model.load import ModelFiles
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.fill import fill
from lockstep.sharding.plan import LayerClasses, MinParams, Policy, plan_sharding
from lockstep.sharding.shard import Backend, shard

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a run shards one of its models; `lockstep plan` reads it too."""

    backend: Backend
    policy: Policy
    mixed_dtypes: Rule | None
    """See `lockstep.model.dtype`."""
    reshard_after_forward: bool


def trained_sharding(config: Config, world_size: int) -> Sharding:
    """Of the policy, and of a critic with a model of its own."""
    backend = backend_of(config, world_size)
    # AdamW wants fp32 adapters: over a bf16 base FSDP1 gets units of their own for them (FSDP2 takes both in one).
    rule: Rule | None = "split" if backend == "fsdp1" else None
    return Sharding(backend, LayerClasses(config.sharding.layer_classes), rule, config.sharding.reshard_after_forward)


def frozen_sharding(config: Config, world_size: int) -> Sharding:
    """Of a teacher. Its units are dropped after forward whatever the policy does: no backward follows that would free them."""
    return Sharding(backend_of(config, world_size), LayerClasses(), None, reshard_after_forward=True)


def head_sharding(config: Config, world_size: int) -> Sharding:
    """Of a critic that is a head: one unit."""
    return Sharding(backend_of(config, world_size), MinParams(), None, reshard_after_forward=True)


def backend_of(config: Config, world_size: int) -> Backend:
    """One rank has nothing to shard, and of tied weights that are frozen torch's FSDP1 loses one at the second forward there."""
    return config.sharding.backend if world_size > 1 else "fsdp2"


def shard_and_fill(
    model: Any, files: ModelFiles, config: Config, world: World, *, keep: Collection[str] = ()
) -> ShardedModel:
    """Collective. Plan, shard, fill, as the sharding section says: no rank holds the whole base.

    `model`: a PEFT model (`model.lora`). `keep`: see `fill`.
    """
    if config.model.gradient_checkpointing:
        with while_recomputing():
            model.gradient_checkpointing_enable({"use_reentrant": False})
    how = trained_sharding(config, world.size)
    if how.backend != config.sharding.backend:
        log.info(
            "one rank has nothing to shard: sharding.backend=%s is for several, fsdp2 is used", config.sharding.backend
        )
    sharded = shard(
        model,
        plan_sharding(model, how.policy),
        backend=how.backend,
        reshard_after_forward=how.reshard_after_forward,
        mixed_dtypes=how.mixed_dtypes,
        timeout_s=config.dist.agree_timeout_s,
    )
    fill(sharded, files, attention=config.model.attention, keep=keep)
    return sharded
