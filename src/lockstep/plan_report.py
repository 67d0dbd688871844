"""A configuration, recipe or folder and a layout of ranks in, a `PlanReport` out: what each rank would hold, and what exports cost.

No weights, no ranks: models are built on meta, and every figure comes from their `ShardingPlan`s. Of a recipe's run all models are
planned (`plan_run`, `plan_phases`), of anything else the one. The schema of `as_json` is described in docs/plan.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.config import Config, LoraSection, build_config, load_config
from lockstep.engines import DTYPES
from lockstep.errors import ConfigError, ModelError
from lockstep.export.cost import ExportCost, export_costs
from lockstep.model.dtype import DtypeFinding, DtypePlan, Rule
from lockstep.model.lora import inject_empty_lora
from lockstep.model.outline import build_outline, read_model_config
from lockstep.model.strip import StripReport, strip
from lockstep.names import is_adapter_name
from lockstep.plan_phases import RunUse, run_use
from lockstep.plan_run import Planned, build_run, plan_model
from lockstep.plan_run_json import run_json
from lockstep.shard_model import Sharding
from lockstep.sharding.plan import PlannedTensor, ShardingPlan, ShardUnit
from lockstep.sharding.policy import LayerClasses, ModuleTree, Policy, missing_classes
from lockstep.sharding.sizes import Backend, shard_bytes, unit_shard_bytes

SCHEMA = 1
BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is planned, and for which ranks. None stands for what the recipe or the configuration says."""

    source: str
    """Folder with config.json, a file like it, or a recipe (.yaml, .yml)."""
    world_size: int = 1
    backend: Backend | None = None
    """Without a recipe: fsdp2."""
    policy: Policy | None = None
    lora: Mapping[str, Any] | None = None
    """Fields of a recipe's `lora` section that are given here; None: no LoRA, unless a recipe has it."""
    target_parameters: tuple[str, ...] = ()
    strip: tuple[str, ...] | None = None
    dtype: str | None = None
    adapter_dtype: str | None = None
    """None: float32."""
    dtype_rule: Rule | None = None
    bucket_bytes: int | None = None
    """Without a recipe: 64 MiB."""
    wire_dtype: str | None = None
    overrides: tuple[str, ...] = ()
    """`key.sub=value` on top of a recipe."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The model as it would be sharded, and what follows from that."""

    request: PlanRequest
    """With the backend and the bucket's size filled in."""
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
    run: RunUse | None = None
    """Of a recipe: everything that its run holds on a rank."""

    @property
    def largest_tensor(self) -> PlannedTensor:
        return max(self.plan.parameters, key=lambda tensor: tensor.nbytes)

    @property
    def largest_unit(self) -> ShardUnit:
        return max(self.plan.units, key=lambda unit: unit.nbytes)

    def shard_bytes(self, rank: int) -> int:
        return shard_bytes(self.plan, rank, self.request.world_size, backend_of(self.request))


def backend_of(request: PlanRequest) -> Backend:
    return request.backend or "fsdp2"


def make_report(request: PlanRequest) -> PlanReport:
    """Build on meta, strip, inject, plan, and count. Raises `ConfigError` or `ModelError` for what was given wrongly, and for what the
    run of a recipe would refuse."""
    is_recipe = Path(request.source).suffix in (".yaml", ".yml")
    return _report_of_run(request) if is_recipe else _report_of_model(request)


def _report_of_model(request: PlanRequest) -> PlanReport:
    if request.overrides:
        raise ConfigError(
            f"{request.overrides[0]!r} is an option of a recipe, and {request.source!r} is none (.yaml, .yml)"
        )
    request = replace(request, backend=backend_of(request), bucket_bytes=request.bucket_bytes or BUCKET_BYTES)
    path = Path(request.source).expanduser()
    config = read_model_config(path)
    own = str(config.get_text_config().dtype or config.dtype or "float32").removeprefix("torch.")
    dtype = request.dtype or own
    if dtype not in DTYPES:
        raise ModelError(f"{path} is stored as {dtype!r}; expected one of {', '.join(DTYPES)}: give --dtype")
    model: Any = build_outline(config, dtype=DTYPES[dtype])
    model_class = type(model).__name__
    stripped = strip(model, request.strip)
    if request.lora is not None or request.target_parameters:
        lora = LoraSection.model_validate(request.lora or {})
        model = inject_empty_lora(model, lora, target_parameters=request.target_parameters)
        for name, param in model.named_parameters():
            if is_adapter_name(name):
                param.data = param.data.to(DTYPES[request.adapter_dtype or "float32"])
    how = Sharding(backend_of(request), request.policy or LayerClasses(), request.dtype_rule, True)
    missing = _missing_classes(model, how.policy)
    made = plan_model(model, how)
    costs = _costs(model, made, request)
    return PlanReport(request, model_class, made.plan, made.findings, made.decisions, stripped, tuple(missing), costs)


def _report_of_run(request: PlanRequest) -> PlanReport:
    config = _recipe(request)
    run = build_run(config, request.world_size)
    policy = run.sharded[0]
    how = policy.sharding
    how = replace(how, policy=request.policy or how.policy, mixed_dtypes=request.dtype_rule or how.mixed_dtypes)
    run = replace(run, sharded=(replace(policy, sharding=how), *run.sharded[1:]))
    bucket_bytes = request.bucket_bytes or int(config.sync.bucket_mb * 2**20)
    request = replace(request, backend=how.backend, bucket_bytes=bucket_bytes)
    missing = _missing_classes(policy.model, how.policy)
    made = [plan_model(each.model, each.sharding) for each in run.sharded]
    costs = _costs(policy.model, made[0], request)
    return PlanReport(
        request,
        type(policy.model.get_base_model()).__name__,
        made[0].plan,
        made[0].findings,
        made[0].decisions,
        StripReport((), (), 0, 0),
        tuple(missing),
        costs,
        run_use(run, [each.plan for each in made], request.world_size, exports=costs),
    )


def _costs(model: Any, made: Planned, request: PlanRequest) -> tuple[ExportCost, ...]:
    return export_costs(
        model,
        made.plan,
        world_size=request.world_size,
        backend=backend_of(request),
        bucket_bytes=request.bucket_bytes or BUCKET_BYTES,
        wire_dtype=DTYPES[request.wire_dtype] if request.wire_dtype else None,
    )


def _recipe(request: PlanRequest) -> Config:
    """With what is given here instead. Raises `ConfigError` for what no recipe has."""
    others = {
        "strip": request.strip,
        "target-parameters": request.target_parameters,
        "adapter-dtype": request.adapter_dtype,
    }
    odd = next((name for name, value in others.items() if value), None)
    if odd is not None:
        raise ConfigError(f"--{odd} goes with a model's configuration: a recipe's run has no such option; leave it out")
    path = Path(request.source).expanduser()
    config = load_config(path, request.overrides)
    tree = config.model_dump(mode="json")
    tree["lora"] |= dict(request.lora or {})
    tree["sharding"] |= {"backend": request.backend} if request.backend else {}
    tree["model"] |= {"dtype": request.dtype} if request.dtype else {}
    return build_config(tree, source=str(path))


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
        "run": None if report.run is None else run_json(report.run),
    }


def _unit_json(unit: ShardUnit, request: PlanRequest) -> dict[str, Any]:
    return {
        "name": unit.module or "(root)",
        "num_tensors": len(unit.parameters),
        "num_params": sum(tensor.numel for tensor in unit.parameters),
        "nbytes": unit.nbytes,
        "shard_bytes": unit_shard_bytes(unit, 0, request.world_size, backend_of(request)),
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
