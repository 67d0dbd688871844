"""Every option reaches what it is for: whole tiny runs, or their parts, in which a lost wire shows."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers_loop import make_model_folder, recipe
from lockstep import dist, evaluate, serving
from lockstep.assemble import assemble
from lockstep.config import build_config
from lockstep.errors import CanaryFailed, StaleWeights
from lockstep.evaluate import EvalResult, score_held_out
from lockstep.loop import run_training
from lockstep.rollout.hf import HFEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def train(model: str, run_dir: Path, /, *, steps: int = 2, **sections) -> Path:
    tree = recipe(
        model, run_dir, **{"lora": {"rank": 2, "dropout": 0.0}, "eval": {"before": False, "after": False}} | sections
    )
    tree["run"] = {**tree["run"], "num_steps": steps, **sections.get("run", {})}
    run_training(build_config(tree), resume=False)
    return run_dir


def lines(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_sections_reach_the_parts(model, tmp_path):
    tree = recipe(
        model,
        tmp_path,
        rollout={
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "stop_token_ids": [9, 11],
            "batch_tokens": 40,
            "max_new_tokens": 6,
        },
        sharding={"layer_classes": ["LlamaMLP"], "reshard_after_forward": False},
        model={"gradient_checkpointing": True, "attention": "eager"},
    )
    tree["data"]["shuffle"] = False
    config = build_config(tree)
    world = dist.start("cpu", config.dist)
    try:
        parts = assemble(config, world)
    finally:
        dist.stop(world)
    sampling = parts.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.7, 0.9, 5, 6)
    assert {9, 11} <= set(sampling.eos_ids) and set(sampling.eos_ids) == set(parts.serving.engine.eos_ids)
    assert [unit.module.rpartition(".")[2] for unit in parts.sharded.plan.units] == ["mlp", "mlp", ""]
    base = parts.sharded.module.get_submodule("base_model.model")
    assert base.config._attn_implementation == "eager"
    assert any(getattr(module, "gradient_checkpointing", False) for module in base.modules())
    assert parts.data.order.take(0, 4) == [0, 1, 2, 3]


def test_what_is_written_and_how_often(model, tmp_path):
    run = train(
        model,
        tmp_path / "run",
        steps=5,
        eval={"before": True, "after": True, "every_steps": 2, "max_new_tokens": 4},
        checkpoint={"every_steps": 1, "keep": 2},
        observe={"tensorboard": False, "samples_per_step": 3},
    )
    assert [(line["name"], line["step"]) for line in lines(run / "eval.jsonl")] == [
        ("before", 0),
        ("step 2", 2),
        ("step 4", 4),
        ("after", 5),
    ]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000004", "step-000005"]
    assert not (run / "tensorboard").exists()
    assert len(lines(run / "samples" / "step-000005.jsonl")) == 3
    assert all(len(line["ids"]) <= 6 for line in lines(run / "samples" / "step-000005.jsonl"))


def test_the_time_limit_ends_a_run_cleanly(model, tmp_path):
    run = train(model, tmp_path / "run", steps=50, run={"max_train_seconds": 1e-6})
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1]
    assert (run / "checkpoints" / "step-000001" / "files.json").is_file()
    assert json.loads((run / "summary.json").read_text())["num_steps"] == 1


def test_the_bucket_size_reaches_the_export(model, tmp_path, monkeypatch):
    real, seen = serving.export_weights, []

    def export(*args, bucket_bytes, **kwargs):
        seen.append(bucket_bytes)
        return real(*args, bucket_bytes=bucket_bytes, **kwargs)

    monkeypatch.setattr(serving, "export_weights", export)
    train(model, tmp_path / "run", steps=1, sync={"bucket_mb": 0.5})
    assert seen == [2**19, 2**19]  # before the first rollout, and after the step


def test_samples_of_another_version_are_refused(model, tmp_path, monkeypatch):
    real = HFEngine.generate
    monkeypatch.setattr(
        HFEngine, "generate", lambda *args, **how: [replace(sample, policy_version=7) for sample in real(*args, **how)]
    )
    with pytest.raises(StaleWeights, match=r"sampled with version 7 where 0 is due"):
        train(model, tmp_path / "run", steps=1, canary={"enabled": False})
    with pytest.raises(CanaryFailed, match="sampled with version 7"):
        train(model, tmp_path / "other", steps=1)


def test_the_best_way_to_ask_counts_before_training(monkeypatch):
    held_out = {"plain": ("p",), "kind": ("k",), "odd": ("o",)}
    data = SimpleNamespace(held_out=held_out, correct=None, format=None)
    rates = {"plain": 0.2, "kind": 0.6, "odd": 0.1}
    monkeypatch.setattr(
        evaluate,
        "evaluate",
        lambda generate, prompts, *, template, **how: EvalResult(rates[template], None, 1, template),
    )
    best = score_held_out(None, data, all_templates=True)  # type: ignore[arg-type]
    assert best is not None and (best.template, best.accuracy) == ("kind", 0.6)
    only = score_held_out(None, data, all_templates=False)  # type: ignore[arg-type]
    assert only is not None and only.template == "plain"


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo"])
def test_learning_rate_and_algorithm_reach_the_update(model, tmp_path, algorithm):
    settings = {"algorithm": algorithm, "lr": 4e-3, "schedule": "linear", "warmup_steps": 0, "max_grad_norm": 1e-3}
    run = train(model, tmp_path / algorithm, steps=2, train=settings)
    assert [line["lr"] for line in lines(run / "metrics.jsonl")] == pytest.approx([4e-3, 2e-3])
    assert torch.isfinite(torch.tensor([line["loss"] for line in lines(run / "metrics.jsonl")])).all()
