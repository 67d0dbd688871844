"""A sharded model and other values for some of its parameters in; its forward with those values, the model untouched, out.

Nothing is written: while a module's forward runs, its slot shows another tensor than the one that FSDP gathered. That works alike
for FSDP1 and FSDP2 (both gather before a module's forward and put the slot right afterwards), and a failure leaves nothing behind.
Kept adapters are local shards; one layer's are gathered when its forward comes. Everything here must be entered on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.model.lora import ADAPTER, lora_layers
from lockstep.names import is_adapter_name
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.skeleton import walk

Change = Callable[[Tensor], Tensor]
"""The gathered tensor in, what the forward shall see instead out."""


@dataclass(frozen=True, slots=True)
class KeptAdapter:
    """This rank's elements of an adapter as it was: as many bytes as the adapter's shard."""

    version: int
    shards: Mapping[str, Tensor]
    """By live name of the active adapter's tensors."""


def keep_adapter(sharded: ShardedModel, version: int) -> KeptAdapter:
    """Not collective. A copy of the adapter that is trained; empty for a model without one."""
    names = [tensor.name for tensor in sharded.plan.parameters if tensor.is_trainable and is_adapter_name(tensor.name)]
    return KeptAdapter(version, {name: sharded.local_flat(name).clone() for name in names})


@contextmanager
def adapter_as(sharded: ShardedModel, kept: KeptAdapter) -> Iterator[None]:
    """Inside, the forward is the kept version's. Its forwards are collective beyond FSDP's own: a gather per adapter tensor."""

    def gathered(name: str) -> Change:
        return lambda _: whole(sharded, name, kept.shards[name])

    with parameters_as(sharded, {name: gathered(name) for name in kept.shards}):
        yield


@contextmanager
def base_rounded(sharded: ShardedModel, dtype: torch.dtype) -> Iterator[None]:
    """Inside, every matrix of the base is rounded to `dtype`, as in an engine that loaded the checkpoint in it."""
    names = [
        tensor.name
        for tensor in sharded.plan.parameters
        if not is_adapter_name(tensor.name) and len(tensor.shape) > 1 and tensor.dtype.is_floating_point
    ]
    with parameters_as(sharded, dict.fromkeys(names, _rounded_to(dtype))):
        yield


@contextmanager
def adapter_rounded(sharded: ShardedModel, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the adapter's tensors are rounded to `dtype`."""
    names = [tensor.name for tensor in sharded.plan.parameters if tensor.is_trainable and is_adapter_name(tensor.name)]
    with parameters_as(sharded, dict.fromkeys(names, _rounded_to(dtype))):
        yield


def _rounded_to(dtype: torch.dtype) -> Change:
    return lambda value: value.to(dtype).to(value.dtype)


@contextmanager
def tied_to(sharded: ShardedModel, layer: str, other: nn.Module) -> Iterator[None]:
    """Inside, the module `other` has the weight that the adapted `layer` (clean name), with which it shares one, comes to."""
    live = dict(walk(sharded.module))[layer]
    names = {tensor.name for tensor in sharded.plan.parameters if tensor.is_trainable}
    a, b = (
        next(name for name in names if name.startswith(f"{layer}.lora_") and f"{kind}.{ADAPTER}" in name)
        for kind in "AB"
    )

    def merged(weight: Tensor) -> Tensor:
        factor_a, factor_b = (whole(sharded, name, sharded.local_flat(name)) for name in (a, b))
        delta = (factor_b.float() @ factor_a.float()) * cast(Any, live).scaling[ADAPTER]
        return (weight.float() + (delta.T if "embedding" in a else delta)).to(weight.dtype)

    with _forward_with(other, [(other, "weight", merged)]):
        yield


@contextmanager
def scaling_as(sharded: ShardedModel, scale: Callable[[str, Any], float]) -> Iterator[None]:
    """Inside, every adapted layer scales its update by `scale(clean module name, layer)`; PEFT's own numbers come back after."""
    layers = list(adapted_layers(sharded))
    before = [layer.scaling[ADAPTER] for _, layer in layers]
    other = [scale(name, layer) for name, layer in layers]
    try:
        for (_, layer), value in zip(layers, other, strict=True):
            layer.scaling[ADAPTER] = value
        yield
    finally:
        for (_, layer), value in zip(layers, before, strict=True):
            layer.scaling[ADAPTER] = value


def adapted_layers(sharded: ShardedModel) -> Iterator[tuple[str, Any]]:
    """(clean name, live LoRA layer), in the model's order."""
    adapted = {id(layer) for _, layer in lora_layers(sharded.module)}
    for name, module in walk(sharded.module):
        if id(module) in adapted:
            yield name, module


@contextmanager
def parameters_as(sharded: ShardedModel, changes: Mapping[str, Change]) -> Iterator[None]:
    """Inside, forwards see `changes[name](gathered)` in place of these parameters (names of the plan; ties follow)."""
    live = dict(walk(sharded.module))
    by_caller: dict[int, tuple[nn.Module, list[tuple[nn.Module, str, Change]]]] = {}
    for tensor in sharded.plan.parameters:
        if tensor.name not in changes:
            continue
        for alias in (tensor.name, *tensor.aliases):
            path, _, attr = alias.rpartition(".")
            for caller in _callers(path, live):
                slots = by_caller.setdefault(id(caller), (caller, []))[1]
                slots.append((live[path], attr, changes[tensor.name]))
    with ExitStack() as stack:
        for caller, slots in by_caller.values():
            stack.enter_context(_forward_with(caller, slots))
        yield


def whole(sharded: ShardedModel, name: str, local: Tensor) -> Tensor:
    """Collective. The whole of a parameter from every rank's elements of it, in the parameter's shape."""
    shape = next(tensor.shape for tensor in sharded.plan.parameters if tensor.name == name)
    dim, ranges = sharded.shard_dim(name), sharded.ranges(name)
    moved = (shape[dim], *shape[:dim], *shape[dim + 1 :]) if shape else shape
    flat = local
    if sharded.world.size > 1:
        sizes = [stop - start for start, stop in ranges]
        padded = local.new_zeros(max(sizes))
        padded[: local.numel()] = local
        parts = [torch.empty_like(padded, device=sharded.world.device) for _ in sizes]
        dist.all_gather(parts, padded.to(sharded.world.device), group=sharded.world.data)
        flat = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    out = flat.reshape(moved)
    return out.movedim(0, dim) if dim else out


def _callers(path: str, live: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Whose forward looks at a parameter of this module: its own, or that of the layer around PEFT's containers.

    PEFT calls `lora_A.default` for linear layers, and reads its weight from outside for experts and embeddings.
    """
    parts = path.split(".")
    at = next((index for index, part in enumerate(parts) if part.startswith("lora_")), None)
    if at is None:
        return [live[path]]
    layer = live[".".join(parts[:at])]
    is_called = at < len(parts) - 1 and type(layer).__name__ != "ParamWrapper"
    return [live[path] if is_called else layer]


@contextmanager
def _forward_with(caller: nn.Module, slots: list[tuple[nn.Module, str, Change]]) -> Iterator[None]:
    before, original = caller.__dict__.get("forward"), cast(Callable[..., Any], caller.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for module, attr, change in slots:
                stack.enter_context(_slot_as(module, attr, change))
            return original(*args, **kwargs)

    caller.forward = forward
    try:
        yield
    finally:
        if before is None:
            del caller.forward
        else:
            caller.forward = before


@contextmanager
def _slot_as(module: nn.Module, attr: str, change: Change) -> Iterator[None]:
    """The tensor that hangs there replaced for a while. What FSDP1 gathered also hangs beside `_parameters`, and is seen first."""
    home: dict[str, Any] = module.__dict__ if attr in module.__dict__ else module._parameters
    before = home[attr]
    home[attr] = change(before)
    try:
        yield
    finally:
        home[attr] = before
