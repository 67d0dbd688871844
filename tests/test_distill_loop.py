"""Whole runs that learn from a teacher, or are held to the adapter that they start from; stopped and resumed, they are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from helpers_data import tiny_tokenizer
from helpers_loop import TIMES, make_model_folder, recipe
from helpers_train import adapt
from lockstep.config import build_config
from lockstep.dist import World
from lockstep.errors import LockstepError
from lockstep.loop import train_in
from lockstep.testing import run_ranks

DISTILL: dict[str, Any] = {"rollout": {"group_size": 1}, "train": {"algorithm": "distill", "lr": 2e-2}}
HELD: dict[str, Any] = {"train": {"kl_coef": 0.1, "mini_batches": 2}}


def run(world: World, model: str, out: str, steps: list[int], **sections: Any) -> None:
    """One run, stopped after each number of steps and resumed."""
    tree = recipe(model, out, **{"eval": {"before": False, "after": False}, **sections})
    tree["lora"] = {**tree["lora"], "dropout": 0.0}
    tree["train"]["schedule"] = "constant"
    for number in steps:
        config = build_config({**tree, "run": {**tree["run"], "num_steps": number}})
        train_in(world, config, resume=number != steps[0])


def check_runs(world: World, root: str) -> str:
    model, start = f"{root}/model", f"{root}/start"
    teacher = {"path": model, "adapter": start}
    for name, steps in (("whole", [4]), ("whole resumed", [2, 4])):
        run(world, model, f"{root}/{name}", steps, teacher=teacher, **DISTILL)
    run(world, model, f"{root}/top", [2], teacher={**teacher, "top_k": 8}, sharding={"backend": "fsdp1"}, **DISTILL)
    for name, steps in (("held", [4]), ("held resumed", [2, 4])):
        run(world, model, f"{root}/{name}", steps, lora={"init_from": start}, **HELD)
    try:
        run(world, model, f"{root}/other", [1], teacher={"path": f"{root}/other words"}, **DISTILL)
    except LockstepError as error:
        return str(error)
    return "no error"


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[dict[str, list[dict[str, float]]], list[str]]:
    root = tmp_path_factory.mktemp("runs")
    model = make_model_folder(root / "model")
    adapt(AutoModelForCausalLM.from_pretrained(model)).save_pretrained(root / "start")
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(root / "other words")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(root / "other words")
    said = run_ranks(2, check_runs, str(root))
    return {path.parent.name: metrics(path.parent) for path in root.glob("*/metrics.jsonl")}, said


def test_a_run_learns_from_its_teacher_alone_and_resumes_bit_for_bit(runs):
    lines = runs[0]["whole"]
    assert [line["policy_version"] for line in lines] == [1, 2, 3, 4]
    assert runs[0]["whole resumed"] == lines
    assert lines[-1]["distill/kl"] < 0.8 * lines[0]["distill/kl"]
    for line in lines:
        assert line["frac_reward_zero_std"] == 1.0  # groups of one: kept all the same
        assert line["loss_tokens"] == line["completion_tokens_total"] > 0
        assert line["loss"] == pytest.approx(line["distill/kl"], rel=1e-5)
        assert line["pg_loss"] == 0 and "distill/top_k_mass" not in line


def test_the_likeliest_tokens_are_enough_and_their_mass_is_told(runs):
    for line, whole in zip(runs[0]["top"], runs[0]["whole"], strict=False):
        assert line["distill/kl"] > 0
        assert 0 < line["distill/top_k_mass"] < 1
        assert line["distill/teacher_logprob"] < 0
        assert line["step"] == whole["step"]


def test_a_run_from_an_adapter_is_held_to_it(runs):
    lines = runs[0]["held"]
    assert runs[0]["held resumed"] == lines
    assert all(line["kl_ref"] > 0 for line in lines[1:])
    assert lines[0]["kl_ref"] < lines[-1]["kl_ref"]


def test_a_teacher_with_other_tokens_ends_every_rank_before_anything_is_loaded(runs):
    for said in runs[1]:
        assert "has another tokenizer than the policy" in said or "rank" in said
    assert any("is 'new' there and None here" in said for said in runs[1])
