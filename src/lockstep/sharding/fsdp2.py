"""A model and its plan in, the model sharded by PyTorch's `fully_shard` (DTensor, rows of dim 0) out.

The placements relied on: one mesh axis `dp_shard`, every parameter `Shard(0)`, rows dealt as `torch.chunk` deals them
(ceil(rows / ranks) to each, the last ones fewer or none). Anything else is refused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

import torch
from peft import PeftModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lockstep.dist import World, agree
from lockstep.model.lora import reference_policy
from lockstep.sharding.base import Ranges
from lockstep.sharding.plan import ShardingPlan


class FSDP2Model:
    """`ShardedModel` over `fully_shard`."""

    def __init__(self, module: nn.Module, plan: ShardingPlan, world: World):
        self.module = module
        self.plan = plan
        self.world = world
        self._shapes = {tensor.name: tensor.shape for tensor in plan.parameters}

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (tensor.name, self.module.get_parameter(tensor.name))
            for tensor in self.plan.parameters
            if tensor.is_trainable
        ]

    def set_gradient_sync(self, on: bool) -> None:
        cast(FSDPModule, self.module).set_requires_gradient_sync(on)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Collective."""
        norm = nn.utils.clip_grad_norm_([param for _, param in self.trainable()], max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def adapter_off(self) -> AbstractContextManager[None]:
        return reference_policy(cast(PeftModel, self.module))

    def settle(self) -> None:
        # After a forward without backward FSDP2 keeps the root gathered: its parameters are then plain tensors (pytorch#131965).
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def local_flat(self, name: str) -> torch.Tensor:
        return self._dtensor(name).to_local().detach().reshape(-1)

    def ranges(self, name: str) -> Ranges:
        shape = self._shapes[name]
        return row_ranges(shape[0] if shape else 1, _row_numel(shape), self.world.size)

    def _dtensor(self, name: str) -> DTensor:
        param = self.module.get_parameter(name)
        if not isinstance(param, DTensor) or tuple(param.placements) != (Shard(0),):
            found = f"DTensor {param.placements}" if isinstance(param, DTensor) else type(param).__name__
            raise RuntimeError(
                f"{name}: expected a DTensor with placements (Shard(0),), found {found}; call settle() first"
            )
        return param


def shard_fsdp2(module: nn.Module, plan: ShardingPlan, world: World, *, reshard_after_forward: bool) -> FSDP2Model:
    """Collective. Wrap each unit of the plan, the root last, after all ranks have agreed on the plan. Meta parameters stay meta."""
    agree(world, phase="sharding plan", fingerprint=plan.fingerprint(), describe=plan.lines)
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp_shard",))
    # Submodules before what contains them: fully_shard gives a module's parameters to the first call that covers them.
    for unit in sorted(plan.units, key=lambda unit: -unit.module.count(".") if unit.module else 1):
        target = module.get_submodule(unit.module) if unit.module else module
        fully_shard(target, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return FSDP2Model(module, plan, world)


def row_ranges(rows: int, row_numel: int, size: int) -> Ranges:
    """Elements of each rank when `rows` are dealt as `torch.chunk` deals them."""
    step = -(-rows // size)
    bounds = [min(rank * step, rows) for rank in range(size + 1)]
    return tuple((bounds[rank] * row_numel, bounds[rank + 1] * row_numel) for rank in range(size))


def _row_numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape[1:]:
        total *= size
    return total
