"""Whole runs of PPO with a critic: what is measured, warm-up, resuming bit for bit, other worlds, the other FSDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers_loop import TIMES, make_model_folder, recipe
from lockstep.config import build_config
from lockstep.dist import World
from lockstep.loop import train_in
from lockstep.testing import run_ranks

KINDS: dict[str, dict[str, Any]] = {
    "model": {"kind": "model", "lora": {"rank": 3, "alpha": 6}, "lr": 1e-2, "epochs": 2},
    "head": {"kind": "head", "lr": 1e-2, "mini_batches": 2},
}
TRAIN = {"algorithm": "gae", "lr": 1e-2, "schedule": "constant", "warmup_steps": 0}
KL = {"kl_coef": 0.1, "kl_kind": "k1", "kl_in": "reward", "epochs": 2}


def run(world: World, model: str, out: Path, kind: str, steps: int, *, resume: bool = False, **sections: Any) -> None:
    critic = {**KINDS[kind], "warmup_steps": 1, "lam": 0.95}
    if kind == "model" and "lora" not in sections:  # where the policy's dropout is on
        critic["lora"] = {**critic["lora"], "dropout": 0.1}
    train = {**TRAIN, **sections.pop("train", {})}
    tree = recipe(
        model,
        out,
        train=train,
        critic=critic,
        rollout={"group_size": 1, "prompts_per_step": 8},
        eval={"before": False, "after": False},
        **sections,
    )
    train_in(world, build_config({**tree, "run": {**tree["run"], "num_steps": steps}}), resume=resume)


def check_runs(world: World, model: str, out: str) -> None:
    for kind in KINDS:
        run(world, model, Path(out) / f"{kind} whole", kind, 4, train=KL)
        run(world, model, Path(out) / f"{kind} resumed", kind, 2, train=KL)
        run(world, model, Path(out) / f"{kind} resumed", kind, 4, train=KL, resume=True)


def check_worlds(world: World, model: str, out: str) -> None:
    """Without dropout, which is drawn per rank. Three steps by this world; a fourth by whoever resumes."""
    for kind in KINDS:
        for backend in ("fsdp2", "fsdp1") if world.size > 1 else ("fsdp2",):
            options = {"lora": {"dropout": 0.0}, "sharding": {"backend": backend}}
            run(world, model, Path(out) / f"{kind} {world.size} {backend}", kind, 3, **options)


def check_taken_over(world: World, model: str, out: str) -> None:
    for kind in KINDS:
        for name in ("2 fsdp2", "2 fsdp1"):
            run(world, model, Path(out) / f"{kind} {name}", kind, 4, resume=True, lora={"dropout": 0.0})


def metrics(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """The policy's and the critic's, as saved."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    files = [*folder.glob("adapter/*.safetensors"), *folder.glob("critic/*.safetensors")]
    assert len(files) == 2
    return {f"{path.parent.name} {name}": value for path in files for name, value in load_file(path).items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    run_ranks(2, check_runs, model, str(out), timeout_s=180)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_resume_bit_for_bit(runs, kind):
    whole, resumed = runs / f"{kind} whole", runs / f"{kind} resumed"
    assert metrics(resumed) == metrics(whole)
    left, right = tensors(resumed, 4), tensors(whole, 4)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert any(value.abs().max() > 0 for name, value in left.items() if name.startswith("critic"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_critic_is_measured_and_warmed_up(runs, kind):
    first, *later = lines = metrics(runs / f"{kind} whole")
    for line in lines:
        assert line["critic/lr"] == 1e-2 and line["critic/grad_norm"] > 0 and line["critic/loss"] > 0
        assert line.keys() >= {"critic/explained_variance", "critic/values_mean", "critic/returns_mean", "kl_reward"}
        assert line["policy_version"] == line["step"]
    assert first["skipped"] == 1 and first["optimizer_steps"] == 0 and "pg_loss" not in first
    assert first["critic/values_mean"] != 0 or KINDS[kind].get("epochs", 1) == 1  # it has learned within its first step
    assert all(line["skipped"] == 0 and line["optimizer_steps"] == 2 for line in later)
    assert (
        later[0]["kl_reward"] == 0.0 and later[1]["kl_reward"] != 0.0
    )  # the policy moved in the second step, not the first
    whole = tensors(runs / f"{kind} whole", 4)
    assert any("lora_B" in name and value.abs().max() > 0 for name, value in whole.items() if "adapter" in name)


def test_one_rank_equals_two_and_takes_over_from_either_fsdp(model, tmp_path):
    run_ranks(1, check_worlds, model, str(tmp_path))
    run_ranks(2, check_worlds, model, str(tmp_path), timeout_s=180)
    run_ranks(1, check_taken_over, model, str(tmp_path), timeout_s=180)
    for kind in KINDS:
        alone = metrics(tmp_path / f"{kind} 1 fsdp2")
        for backend in ("fsdp2", "fsdp1"):
            two = metrics(tmp_path / f"{kind} 2 {backend}")
            assert len(two) == 4 and "critic/loss" in two[3]
            for name in ("reward", "critic/loss", "critic/grad_norm", "critic/values_mean", "grad_norm"):
                # Adam divides by the gradient's size: a rounding difference of a small gradient moves a weight by up to the rate.
                expected, came = [line.get(name) for line in alone], [line.get(name) for line in two[:3]]
                assert came == pytest.approx(expected, rel=2e-3, abs=2e-4), (kind, backend, name)
