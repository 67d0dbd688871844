"""A sharded model or a method in; what an export holds, moves and must leave alone, out: counted below lockstep's own code."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler prints a line at every start and stop

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.profiler import ProfilerActivity, profile

import lockstep
from lockstep.sharding.base import ShardedModel
from lockstep.testing import tiny_llama
from lockstep.transport.base import tensor_line

BACKENDS: dict[str, dict[str, Any]] = {
    "fsdp2": dict(backend="fsdp2"),
    "fsdp1": dict(backend="fsdp1", use_orig_params=True),
    "fsdp1-flat": dict(backend="fsdp1", use_orig_params=False),
}
TARGETS = ("q_proj", "v_proj", "up_proj", "down_proj")
EXPORTS = {
    "adapter": lockstep.AdapterExport(),
    "merged": lockstep.MergedExport(),
    "full": lockstep.FullExport(),
}


def sharded_llama(
    backend: str, *, lora: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **options: Any
):
    """Collective. A small Llama with an adapter that changes something, the same on every number of ranks."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": list(TARGETS), **(lora or {})})
    torch.manual_seed(1)
    wrapped = get_peft_model(tiny_llama(**(model or {})), config)
    generator = torch.Generator().manual_seed(2)
    for name, param in wrapped.named_parameters():
        if "lora_B" in name:
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 says for each unit that frozen and trainable parameters share it
        return lockstep.shard(wrapped, **BACKENDS[backend], **options)


def shard_lines(sharded: ShardedModel) -> list[str]:
    """A digest of every local shard and buffer."""
    sharded.settle()
    held = [(tensor.name, sharded.local_flat(tensor.name)) for tensor in sharded.plan.parameters]
    held += [(tensor.name, sharded.buffer(tensor.name)) for tensor in sharded.plan.buffers]
    return [tensor_line(name, value) for name, value in held]


def peak_nbytes(method: Callable[[], object]) -> int:
    """Most bytes that torch's CPU allocator held, on any thread, above what it held at the start.

    The profiler sees every allocation, also those inside C++ and gloo; only its raw events are in order of time.
    """
    gc.collect()  # what is freed while it counts must have been taken while it counts
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        method()
    results = profiler.profiler.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
    held = peak = 0
    for event in sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def counted_unshards() -> Iterator[list[str]]:
    """Every time that FSDP gathers a unit, a line is added."""
    seen: list[str] = []

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(original.__qualname__)
            return original(*args, **kwargs)

        return call

    with (
        mock.patch.object(FSDPParamGroup, "unshard", noting(FSDPParamGroup.unshard)),
        mock.patch.object(FlatParamHandle, "unshard", noting(FlatParamHandle.unshard)),
    ):
        yield seen


@dataclass(slots=True)
class Wire:
    """What this rank handed to torch.distributed."""

    sent: int = 0
    received: int = 0
    calls: list[str] = field(default_factory=list)
    """Names of functions, in order; those on the control group start with `control `."""

    @property
    def data_calls(self) -> list[str]:
        return [call for call in self.calls if not call.startswith("control ")]

    @property
    def control_calls(self) -> list[str]:
        return [call for call in self.calls if call.startswith("control ")]


@contextmanager
def counted_wire(control: dist.ProcessGroup | None) -> Iterator[Wire]:
    """Every function of torch.distributed that could move bytes is counted or refused."""
    wire = Wire()
    others = (dist.get_world_size() if dist.is_initialized() else 1) - 1

    def count(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("group") is control and control is not None:
            wire.calls.append(f"control {name}")
            return
        wire.calls.append(name)
        if name == "isend":
            wire.sent += args[0].nbytes
        elif name == "irecv":
            wire.received += args[0].nbytes
        elif name in ("all_gather_into_tensor", "all_gather_single"):
            wire.sent += others * args[1].nbytes
            wire.received += others * args[1].nbytes
        elif name == "gather":
            is_receiver = args[1] is not None
            wire.sent += 0 if is_receiver else args[0].nbytes
            wire.received += others * args[0].nbytes if is_receiver else 0
        else:
            raise AssertionError(f"{name} is not counted")

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count(name, args, kwargs)
            return original(*args, **kwargs)

        return call

    # torch 2.13 renamed one of them, and calls the new one from the old.
    renamed = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    movers = [
        renamed,
        *("isend", "irecv", "send", "recv", "all_gather", "all_gather_object", "gather"),
        *("broadcast", "broadcast_object_list", "all_reduce", "reduce", "scatter", "reduce_scatter_tensor", "barrier"),
        *("all_to_all", "all_to_all_single", "batch_isend_irecv"),
    ]
    with mock.patch.multiple(dist, **{name: counting(name, getattr(dist, name)) for name in movers}):
        yield wire
