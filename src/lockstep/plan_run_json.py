"""A `RunUse` in, the plain values under `run` of `lockstep plan --json` out; docs/plan.md describes them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lockstep.plan_memory import ModelUse
from lockstep.plan_phases import RunUse


def run_json(use: RunUse) -> dict[str, Any]:
    """Plain values under fixed keys (docs/plan.md), sizes in bytes."""
    return {
        "rank": use.rank,
        "device": use.device,
        "models": [_model_json(each) for each in use.models],
        "activations": {role: asdict(each) for role, each in use.activations.items()},
        "logits": {
            "rows": use.logits.rows,
            "vocabulary": use.logits.vocabulary,
            "chunk_bytes": use.logits.chunk_bytes,
            "num_chunks": use.logits.num_live,
            "nbytes": use.logits.nbytes,
        },
        "has_many_micro_batches": use.has_many_micro_batches,
        "phases": [{"name": each.name, "nbytes": each.nbytes, "parts": dict(each.parts)} for each in use.phases],
        "resident": {"device": use.resident, "host": use.host},
        "largest_phase": use.largest_phase.name,
        "peak": use.peak,
        "not_counted": list(use.not_counted),
        "warnings": list(use.warnings),
    }


def _model_json(use: ModelUse) -> dict[str, Any]:
    gathered = use.gathered
    return {
        "role": use.role,
        "path": use.path,
        "backend": use.backend,
        "parameters": use.parameters,
        "reference": use.reference,
        "buffers": use.buffers,
        "gradients": {"reduced": use.gradients, "whole": use.whole_gradients},
        "optimizer": {"device": use.optimizer, "host": use.optimizer_host, "step": use.step},
        "gathered": {
            "root": gathered.root,
            "unit": gathered.unit,
            "unit_bytes": gathered.unit_bytes,
            "next_bytes": gathered.next_bytes,
            "nbytes": gathered.nbytes,
        },
    }
