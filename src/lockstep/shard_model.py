"""An empty model with its adapter, its checkpoint and the config in; the model sharded over all ranks and filled out."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from lockstep.config import Config
from lockstep.dist import World
from lockstep.known_warnings import while_recomputing
from lockstep.model.load import ModelFiles
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.fill import fill
from lockstep.sharding.plan import LayerClasses, plan_sharding
from lockstep.sharding.shard import shard

log = logging.getLogger(__name__)


def shard_and_fill(
    model: Any, files: ModelFiles, config: Config, world: World, *, keep: Collection[str] = ()
) -> ShardedModel:
    """Collective. Plan, shard, fill, as the sharding section says: no rank holds the whole base.

    `model`: a PEFT model (`model.lora`). `keep`: see `fill`.
    """
    if config.model.gradient_checkpointing:
        with while_recomputing():
            model.gradient_checkpointing_enable({"use_reentrant": False})
    plan = plan_sharding(model, LayerClasses(config.sharding.layer_classes))
    backend = config.sharding.backend if world.size > 1 else "fsdp2"
    if backend != config.sharding.backend:
        # There it shards nothing, and of tied weights that are frozen torch loses one at the second forward.
        log.info(
            "one rank has nothing to shard: sharding.backend=%s is for several, fsdp2 is used", config.sharding.backend
        )
    sharded = shard(
        model,
        plan,
        backend=backend,
        reshard_after_forward=config.sharding.reshard_after_forward,
        # AdamW wants fp32 adapters: over a bf16 base FSDP1 gets units of their own for them (FSDP2 takes both in one).
        mixed_dtypes="split" if backend == "fsdp1" else None,
        timeout_s=config.dist.agree_timeout_s,
    )
    fill(sharded, files, attention=config.model.attention, keep=keep)
    return sharded
