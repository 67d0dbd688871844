"""A configuration, recipe or folder and a layout of ranks in, a `PlanReport` out: what each rank would hold, and what exports cost.

No weights, no ranks: the model is built on meta, and every figure comes from its `ShardingPlan`. The schema of `as_json` is
described in docs/plan.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from lockstep.config import LoraSection, load_config
from lockstep.errors import ModelError
from lockstep.export.cost import ExportCost, export_costs
from lockstep.model.dtype import (
    DtypeFinding,
    DtypePlan,
    Rule,
    apply_dtypes,
    find_mixed_dtypes,
    keep_in_fp32,
    plan_dtypes,
)
from lockstep.model.load import find_model
from lockstep.model.lora import inject_empty_lora
from lockstep.model.outline import build_outline, read_model_config
from lockstep.model.strip import StripReport, strip
from lockstep.names import is_adapter_name
from lockstep.sharding.plan import PlannedTensor, ShardingPlan, ShardUnit, plan_sharding, split_units
from lockstep.sharding.policy import LayerClasses, ModuleTree, Policy, missing_classes
from lockstep.sharding.sizes import Backend, shard_bytes, unit_shard_bytes

SCHEMA = 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is planned, and for which ranks. None stands for what the recipe or the configuration says."""

    source: str
    """Folder with config.json, a file like it, or a recipe (.yaml, .yml)."""
    world_size: int
    backend: Backend = "fsdp2"
    policy: Policy | None = None
    lora: Mapping[str, Any] | None = None
    """Fields of a recipe's `lora` section that are given here; None: no LoRA, unless a recipe has it."""
    target_parameters: tuple[str, ...] = ()
    strip: tuple[str, ...] | None = None
    dtype: str | None = None
    adapter_dtype: str = "float32"
    dtype_rule: Rule | None = None
    bucket_bytes: int = 64 << 20
    wire_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The model as it would be sharded, and what follows from that."""

    request: PlanRequest
    model_class: str
    plan: ShardingPlan
    findings: tuple[DtypeFinding, ...]
    """Mixed dtypes as the model came."""
    decisions: DtypePlan
    """What is done about them; the plan is the one after it."""
    stripped: StripReport
    missing: tuple[str, ...]
    """Layer classes that were asked for, or that the model lists, and that it does not contain."""
    exports: tuple[ExportCost, ...]

    @property
    def largest_tensor(self) -> PlannedTensor:
        return max(self.plan.parameters, key=lambda tensor: tensor.nbytes)

    @property
    def largest_unit(self) -> ShardUnit:
        return max(self.plan.units, key=lambda unit: unit.nbytes)

    def shard_bytes(self, rank: int) -> int:
        return shard_bytes(self.plan, rank, self.request.world_size, self.request.backend)


def make_report(request: PlanRequest) -> PlanReport:
    """Build on meta, strip, inject, plan, and count. Raises `ConfigError` or `ModelError` for what was given wrongly."""
    config, base_dtype, lora, recipe_policy = _read_source(request)
    model: Any = build_outline(config, dtype=base_dtype)
    model_class = type(model).__name__
    stripped = strip(model, request.strip)
    if lora is not None:
        model = inject_empty_lora(model, lora, target_parameters=request.target_parameters)
        for name, param in model.named_parameters():
            if is_adapter_name(name):
                param.data = param.data.to(DTYPES[request.adapter_dtype])
    policy = request.policy or recipe_policy
    missing = _missing_classes(model, policy)
    plan = plan_sharding(model, policy)
    findings = find_mixed_dtypes(plan)
    decisions = plan_dtypes(plan, backend=request.backend, rule=request.dtype_rule, keep=keep_in_fp32(model))
    if decisions.casts:
        apply_dtypes(model, decisions)
        plan = plan_sharding(model, policy)
    plan = split_units(plan, decisions.units)
    costs = export_costs(
        model,
        plan,
        world_size=request.world_size,
        backend=request.backend,
        bucket_bytes=request.bucket_bytes,
        wire_dtype=DTYPES[request.wire_dtype] if request.wire_dtype else None,
    )
    return PlanReport(request, model_class, plan, findings, decisions, stripped, tuple(missing), costs)


def _read_source(request: PlanRequest) -> tuple[PreTrainedConfig, torch.dtype, LoraSection | None, Policy]:
    path = Path(request.source).expanduser()
    given = dict(request.lora or {})
    if path.suffix in (".yaml", ".yml"):
        recipe = load_config(path)
        where = recipe.model.path
        config = (
            find_model(where).config if where.startswith("package:") else read_model_config(Path(where).expanduser())
        )
        dtype = request.dtype or recipe.model.dtype
        lora = LoraSection.model_validate({**recipe.lora.model_dump(), **given})
        return config, DTYPES[dtype], lora, LayerClasses(recipe.sharding.layer_classes)
    config = read_model_config(path)
    own = str(config.get_text_config().dtype or config.dtype or "float32").removeprefix("torch.")
    dtype = request.dtype or own
    if dtype not in DTYPES:
        raise ModelError(f"{path} is stored as {dtype!r}; expected one of {', '.join(DTYPES)}: give --dtype")
    wants_lora = request.lora is not None or request.target_parameters
    return config, DTYPES[dtype], LoraSection.model_validate(given) if wants_lora else None, LayerClasses()


def _missing_classes(model: nn.Module, policy: Policy) -> list[str]:
    """Classes of the model's own list that it has not; one that was asked for by name is an error here."""
    if not isinstance(policy, LayerClasses):
        return []
    tree = ModuleTree(model)
    missing = missing_classes(tree, policy.names)
    if missing and policy.names:
        present = sorted({cls for node in tree.nodes.values() for cls in node.classes})
        near = difflib.get_close_matches(missing[0], present, n=4, cutoff=0.4) or present[:8]
        raise ModelError(f"layer class {missing[0]!r} is not in the model; near it there are {near}")
    return missing


def as_json(report: PlanReport) -> dict[str, Any]:
    """Plain values under fixed keys, sizes in bytes; names are clean names, the root's is "(root)"."""
    request, plan = report.request, report.plan
    shards = [report.shard_bytes(rank) for rank in range(request.world_size)]
    return {
        "schema": SCHEMA,
        "source": request.source,
        "model_class": report.model_class,
        "backend": request.backend,
        "world_size": request.world_size,
        "num_params": sum(tensor.numel for tensor in plan.parameters),
        "num_trainable": sum(tensor.numel for tensor in plan.parameters if tensor.is_trainable),
        "nbytes": sum(tensor.nbytes for tensor in plan.parameters),
        "buffer_bytes": sum(tensor.nbytes for tensor in plan.buffers),
        "shard_bytes": {"max": max(shards), "min": min(shards), "total": sum(shards)},
        "units": [_unit_json(unit, request) for unit in plan.units],
        "largest_unit": {"name": report.largest_unit.module or "(root)", "nbytes": report.largest_unit.nbytes},
        "largest_tensor": _tensor_json(report.largest_tensor),
        "exports": [asdict(cost) for cost in report.exports],
        "tied": [list(names) for names in plan.tied],
        "mixed_dtypes": [_finding_json(finding) for finding in report.findings],
        "dtype_decisions": {
            "casts": [
                {"name": cast.name, "before": _short(cast.before), "after": _short(cast.after)}
                for cast in report.decisions.casts
            ],
            "units": list(report.decisions.units),
            "ignored": list(report.decisions.ignored),
        },
        "missing_classes": list(report.missing),
        "stripped": {
            "removed": list(report.stripped.removed),
            "num_params": report.stripped.num_params,
            "nbytes": report.stripped.nbytes,
            "kept": list(report.stripped.kept),
        },
    }


def _unit_json(unit: ShardUnit, request: PlanRequest) -> dict[str, Any]:
    return {
        "name": unit.module or "(root)",
        "num_tensors": len(unit.parameters),
        "num_params": sum(tensor.numel for tensor in unit.parameters),
        "nbytes": unit.nbytes,
        "shard_bytes": unit_shard_bytes(unit, 0, request.world_size, request.backend),
        "dtypes": sorted({_short(tensor.dtype) for tensor in unit.parameters}),
    }


def _tensor_json(tensor: PlannedTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": _short(tensor.dtype),
        "nbytes": tensor.nbytes,
    }


def _finding_json(finding: DtypeFinding) -> dict[str, Any]:
    odd = [{"name": each.name, "dtype": _short(each.dtype), "is_trainable": each.is_trainable} for each in finding.odd]
    return {"unit": finding.unit or "(root)", "majority": _short(finding.majority), "odd": odd}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
