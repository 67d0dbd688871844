"""lockstep: RL post-training for LoRA adapters on PyTorch FSDP. The trainer's ranks and the rollout engine stay in lockstep.

The weight path for one's own trainer, every name importable from here:

    plan    = lockstep.plan_sharding(model)                   # which parameters are sharded together; pure
    sharded = lockstep.shard(model, plan, backend="fsdp2")    # or lockstep.attach(model) for one that is wrapped already
    with lockstep.export_weights(sharded, lockstep.MergedExport()) as stream:
        for bucket in stream:
            for name, tensor in bucket.items(): ...

Names are loaded when they are first used: the command line starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "plan_sharding": "sharding.plan",
    "LayerClasses": "sharding.policy",
    "MinParams": "sharding.policy",
    "Modules": "sharding.policy",
    "ShardingPlan": "sharding.plan",
    "shard": "sharding.shard",
    "Precision": "sharding.precision",
    "attach": "sharding.attach",
    "fill": "sharding.fill",
    "ShardedModel": "sharding.base",
    "export_weights": "export.stream",
    "plan_export": "export.plan",
    "WeightStream": "export.stream",
    "AdapterExport": "export.what",
    "MergedExport": "export.what",
    "FullExport": "export.what",
    "strip": "model.strip",
    "text_config": "model.text_config",
    "init_adapter": "model.lora",
    "errors": "",
}
"""Public name -> the module it lives in; "" for a module of the package itself."""

if TYPE_CHECKING:
    from lockstep import errors as errors
    from lockstep.export.plan import plan_export as plan_export
    from lockstep.export.stream import WeightStream as WeightStream
    from lockstep.export.stream import export_weights as export_weights
    from lockstep.export.what import AdapterExport as AdapterExport
    from lockstep.export.what import FullExport as FullExport
    from lockstep.export.what import MergedExport as MergedExport
    from lockstep.model.lora import init_adapter as init_adapter
    from lockstep.model.strip import strip as strip
    from lockstep.model.text_config import text_config as text_config
    from lockstep.sharding.attach import attach as attach
    from lockstep.sharding.base import ShardedModel as ShardedModel
    from lockstep.sharding.fill import fill as fill
    from lockstep.sharding.plan import ShardingPlan as ShardingPlan
    from lockstep.sharding.plan import plan_sharding as plan_sharding
    from lockstep.sharding.policy import LayerClasses as LayerClasses
    from lockstep.sharding.policy import MinParams as MinParams
    from lockstep.sharding.policy import Modules as Modules
    from lockstep.sharding.precision import Precision as Precision
    from lockstep.sharding.shard import shard as shard


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}; public names are {sorted(_HOMES)}")
    if not home:
        return importlib.import_module(f"lockstep.{name}")
    return getattr(importlib.import_module(f"lockstep.{home}"), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOMES])
