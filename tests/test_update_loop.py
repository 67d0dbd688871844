"""Whole runs whose recipes ask for more than the default: several optimizer steps, KL in the reward, corrections, entropy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers_loop import TIMES, make_model_folder, recipe
from lockstep.config import build_config
from lockstep.dist import World
from lockstep.loop import train_in
from lockstep.testing import run_ranks

MISMATCH = {
    "rollout_probs_diff_mean", "rollout_probs_diff_max", "rollout_probs_diff_std", "rollout_kl_k1", "rollout_kl_k3",
    "rollout_ratio_mean", "rollout_ratio_min", "rollout_ratio_max", "rollout_eff_sample_size", "token_mult_prob_error",
    "rollout_actor_probs_pearson_corr", "rollout_tokens_not_finite",
}  # fmt: skip
SEVERAL = {
    "algorithm": "reinforce_pp", "kl_coef": 0.1, "kl_kind": "k1", "kl_in": "reward", "entropy_coef": 0.01,
    "correction": "token_tis", "epochs": 2, "mini_batches": 2,
}  # fmt: skip
HALF = {"mini_batches": 2, "offload_optimizer": True, "offload_activations": True}
GSPO = {"algorithm": "grpo_batch_std", "loss": "gspo", "mini_batches": 3, "kl_coef": 0.01, "stop_kl": 1e-9}


def check_runs(world: World, model: str, out: str) -> None:
    """Each recipe in one go, and one of them stopped at its checkpoint after two steps and resumed."""
    for name, train, parts in (
        ("several", SEVERAL, [4]),
        ("resumed", SEVERAL, [2, 4]),
        ("gspo", GSPO, [2]),
        ("half", HALF, [2]),
        ("half resumed", HALF, [1, 2]),
    ):
        dtype = {"dtype": "float16"} if name.startswith("half") else {}
        tree: dict[str, Any] = recipe(
            model,
            f"{out}/{name}",
            train=train,
            model=dtype,
            lora={"dropout": 0.0},
            eval={"before": False, "after": False},
        )
        tree["train"]["schedule"] = "constant"
        for steps in parts:
            config = build_config({**tree, "run": {**tree["run"], "num_steps": steps}})
            train_in(world, config, resume=steps != parts[0])


def metrics(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, list[dict[str, float]]]:
    model, out = make_model_folder(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("runs")
    run_ranks(2, check_runs, model, str(out))
    return {path.name: metrics(path) for path in out.iterdir()}


def test_several_optimizer_steps_are_one_version_and_resume_bit_for_bit(runs):
    lines = runs["several"]
    assert [line["policy_version"] for line in lines] == [1, 2, 3, 4]
    assert [line["optimizer_steps"] for line in lines] == [4, 4, 4, 4]
    assert runs["resumed"] == lines
    assert all(line["approx_kl"] > 0 and line["grad_norm"] > 0 for line in lines)


def test_what_the_recipe_asks_for_is_measured(runs):
    first, *later = runs["several"]
    assert first["kl_reward"] == 0.0  # a new adapter is the reference
    assert all(line["kl_reward"] != 0 for line in later)
    for line in runs["several"]:
        assert line.keys() >= MISMATCH and line["rollout_probs_diff_max"] < 1e-5
        assert line["is_weight"] == pytest.approx(1, abs=1e-4) and line["is_above"] == 0
        assert "kl_ref" not in line and line["entropy"] > 0


def test_a_step_that_goes_too_far_ends_early(runs):
    for line in runs["gspo"]:
        assert line["optimizer_steps"] == 1
        assert line["kl_ref"] >= 0 and "clip_dual" not in line


def test_a_float16_run_scales_its_loss_and_resumes_bit_for_bit(runs):
    """With an engine in float16 too, and host memory asked for on a CPU, which does nothing."""
    lines = runs["half"]
    assert runs["half resumed"] == lines and len(lines) == 2
    for line in lines:
        assert (line["loss_scale"], line["grad_overflow"], line["optimizer_steps"]) == (2.0**16, 0.0, 2)
        # float16 has 11 bits, so a probability near 1 may move by 5e-4 with every rounding on the way.
        assert line["grad_norm"] > 0 and line["rollout_probs_diff_max"] < 1e-3
