"""A sharded model and what to export in, an `ExportPlan` out: which tensors travel, under which names, in which buckets.

Pure: no communication, no memory. Everything that an export cannot do is refused here, by name, before any collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from peft import PeftModel

from lockstep.errors import IncompleteExport
from lockstep.export.merge import LoraFactors, factors_of
from lockstep.model.lora import ADAPTER, adapter_config_json, adapter_file_names, lora_layers
from lockstep.names import checkpoint_name, is_adapter_name
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.plan import PlannedTensor
from lockstep.types import Manifest, TensorSpec, WeightKind


@dataclass(frozen=True, slots=True)
class AdapterExport:
    """The adapter's own tensors, under PEFT's file names."""

    adapter: str = ADAPTER


@dataclass(frozen=True, slots=True)
class MergedExport:
    """Every base weight with the adapter folded in, under the hub checkpoint's names."""

    adapter: str = ADAPTER


Export = AdapterExport | MergedExport


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """One tensor that travels."""

    spec: TensorSpec
    """Name, whole shape and dtype on the wire."""
    source: str
    """Live name it is read from."""
    is_buffer: bool = False
    """Buffers are replicated: rank 0's values travel."""
    factors: LoraFactors | None = None
    """What is merged into it on the way; None: it travels as it is."""

    def line(self) -> str:
        scale = f" + {self.factors.scaling} * B @ A" if self.factors else ""
        return f"{self.spec.name} {self.spec.dtype} {list(self.spec.shape)} from {self.source}{scale}"


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What one export carries, in order."""

    kind: WeightKind
    buckets: tuple[tuple[ExportTensor, ...], ...]
    bucket_bytes: int
    adapter_config: dict[str, object] | None = field(default=None)

    @property
    def tensors(self) -> Iterable[ExportTensor]:
        return (tensor for bucket in self.buckets for tensor in bucket)

    def lines(self) -> list[str]:
        head = f"export {self.kind}, buckets of {self.bucket_bytes} bytes"
        return [
            head,
            *(f"bucket {index}: {tensor.line()}" for index, bucket in enumerate(self.buckets) for tensor in bucket),
        ]

    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def manifest(self, version: int) -> Manifest:
        return Manifest(version, self.kind, tuple(tensor.spec for tensor in self.tensors), self.adapter_config)


def plan_export(
    sharded: ShardedModel, what: Export, *, bucket_bytes: int, dtype: torch.dtype | None = None
) -> ExportPlan:
    """Name every tensor of an export and put it into a bucket. Raises `IncompleteExport` for what cannot be exported.

    `dtype` is what floats travel in; None keeps each tensor's own. A tensor larger than a bucket has one to itself.
    """
    model = cast(PeftModel, sharded.module)
    if what.adapter not in model.peft_config:
        raise IncompleteExport(f"adapter {what.adapter!r} does not exist; the model has {sorted(model.peft_config)}")
    match what:
        case AdapterExport(adapter):
            tensors = _adapter_tensors(sharded, model, adapter, dtype)
            return ExportPlan(
                "adapter", _fill_buckets(tensors, bucket_bytes), bucket_bytes, adapter_config_json(model, adapter)
            )
        case MergedExport(adapter):
            tensors = _merged_tensors(sharded, model, adapter, dtype)
            return ExportPlan("merged", _fill_buckets(tensors, bucket_bytes), bucket_bytes)


def _adapter_tensors(
    sharded: ShardedModel, model: PeftModel, adapter: str, dtype: torch.dtype | None
) -> list[ExportTensor]:
    planned = {tensor.name: tensor for tensor in sharded.plan.parameters}
    names = adapter_file_names(model, adapter)
    odd = [live for live in names if live not in planned or not is_adapter_name(live)]
    if odd:
        raise IncompleteExport(
            f"adapter {adapter!r} holds {odd[0]!r}, which is not a plain LoRA tensor; it cannot be exported yet"
        )
    return [ExportTensor(_spec(planned[live], name, dtype), live) for live, name in names.items()]


def _merged_tensors(
    sharded: ShardedModel, model: PeftModel, adapter: str, dtype: torch.dtype | None
) -> list[ExportTensor]:
    layers = dict(lora_layers(model, adapter))
    factors = {f"{name}.base_layer.weight": factors_of(name, layer, adapter) for name, layer in layers.items()}
    out = []
    for tensor in sharded.plan.parameters:
        if is_adapter_name(tensor.name):
            continue
        names = (tensor.name, *tensor.aliases)
        merged = [name for name in names if name in factors]
        if merged and tensor.aliases:
            others = [checkpoint_name(name) for name in names if name != merged[0]]
            raise IncompleteExport(
                f"{checkpoint_name(merged[0])!r} carries LoRA and is tied to {others}: merged, the two would differ. "
                "Export the adapter, take the layer out of lora.targets, or untie the model"
            )
        out.append(
            ExportTensor(
                _spec(tensor, _canonical(tensor), dtype), tensor.name, factors=factors[merged[0]] if merged else None
            )
        )
    persistent = set(model.state_dict())
    buffers = [tensor for tensor in sharded.plan.buffers if tensor.name in persistent]
    return out + [
        ExportTensor(_spec(tensor, _canonical(tensor), dtype), tensor.name, is_buffer=True) for tensor in buffers
    ]


def _canonical(tensor: PlannedTensor) -> str:
    """Checkpoints store tied weights once, under the first name (the embedding's)."""
    return checkpoint_name(tensor.name)


def _spec(tensor: PlannedTensor, name: str, dtype: torch.dtype | None) -> TensorSpec:
    return TensorSpec(
        name, tensor.shape, dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    )


def _fill_buckets(tensors: Sequence[ExportTensor], bucket_bytes: int) -> tuple[tuple[ExportTensor, ...], ...]:
    buckets: list[list[ExportTensor]] = []
    room = 0
    for tensor in tensors:
        if not buckets or tensor.spec.nbytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(tensor)
        room -= tensor.spec.nbytes
    return tuple(tuple(bucket) for bucket in buckets)
