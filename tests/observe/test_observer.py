"""The loop's view of observing: what one run, its resume, its other ranks and its stop leave on disk and on the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lockstep.config import Config, build_config
from lockstep.dist import World
from lockstep.errors import CheckpointError
from lockstep.evaluate import EvalResult
from lockstep.observe import observer as observer_module
from lockstep.observe.metrics import read_metrics
from lockstep.observe.observer import Observer
from lockstep.observe.report import Carried
from lockstep.rundir import RunDir
from lockstep.types import Prompt, Sample, ScoredSample

BEFORE, AFTER = EvalResult(0.25, 0.5, 8, "{prompt} ="), EvalResult(0.75, None, 8, "{prompt}")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tree = {
        "run": {"dir": str(tmp_path), "num_steps": 4},
        "model": {"path": "/models/x"},
        "data": {"train": {"task": "sums"}},
        "reward": [{"name": "last_number"}],
        "observe": {"tensorboard": False},
    }
    return build_config(tree)


def make_scored() -> list[ScoredSample]:
    sample = Sample(Prompt("u", (1,), "p", "7"), 0, 0, (2,), (-0.1,), "7", "stop", 0)
    return [ScoredSample(sample, 1.0, {"last_number": 1.0})]


def make_steps(observer: Observer, steps: range) -> None:
    for step in steps:
        with observer.phase("generate") as phase:
            phase.tokens = 10
        metrics = {"reward": step / 10, "loss": 0.5, "completion_tokens_total": 30.0, "step_seconds": 2.0}
        observer.step(step, metrics, make_scored())


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_whole_run(tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]):
    with Observer(config, RunDir(tmp_path), World(), resume_step=0) as observer:
        with observer.phase("eval before"):
            observer.score("before", BEFORE)
        observer.start_training()
        make_steps(observer, range(1, 5))
        observer.score("after", AFTER)
        observer.finish(Carried(8.0, 0.1, 0.4, BEFORE), after=AFTER, steps=4)
    out = capsys.readouterr().out
    assert "eval before: accuracy 25.0 %, format rate 50.0 % on 8 held-out problems, asked with '{prompt} ='\n" in out
    assert "eval after: accuracy 75.0 % on 8 held-out problems, asked with '{prompt}'\n" in out
    assert "step 4/4  reward 0.400  loss 0.5000  15 tokens/s" in out
    assert "+50.0 pts" in out
    assert "What to do next:" in out
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert [entry["step"] for entry in metrics] == [1, 2, 3, 4]
    assert "seconds.generate" in metrics[0]
    assert "seconds.eval before" not in metrics[0]
    assert [(entry["step"], entry["name"], entry["accuracy"]) for entry in lines(tmp_path / "eval.jsonl")] == [
        (0, "before", 0.25),
        (4, "after", 0.75),
    ]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["eval"]["after"]["accuracy"] == 0.75
    assert set(summary["seconds"]) == {"eval before", "generate"}
    assert len(list((tmp_path / "samples").iterdir())) == 4


def test_a_resumed_run_has_every_step_once(tmp_path: Path, config: Config):
    with Observer(config, RunDir(tmp_path), World(), resume_step=0) as observer:
        observer.score("before", BEFORE)
        make_steps(observer, range(1, 4))
        observer.score("step 3", AFTER)
    with Observer(config, RunDir(tmp_path), World(), resume_step=2) as observer:
        make_steps(observer, range(3, 5))
    assert [entry["step"] for entry in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [entry["step"] for entry in lines(tmp_path / "eval.jsonl")] == [0]


def test_other_ranks_write_and_print_nothing(tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]):
    world = World(rank=1, size=2, local_rank=1, device=torch.device("cpu"))
    with Observer(config, RunDir(tmp_path), world, resume_step=0) as observer:
        observer.score("before", BEFORE)
        make_steps(observer, range(1, 3))
        observer.note("x")
        observer.finish(Carried(1.0), after=None, steps=2)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_a_stopped_run_has_a_summary_and_no_table(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(observer_module, "stop_requested", lambda: "SIGINT")
    with Observer(config, RunDir(tmp_path), World(), resume_step=0) as observer:
        make_steps(observer, range(1, 2))
        observer.finish(Carried(2.0, 0.1, 0.1), after=None, steps=1)
    assert json.loads((tmp_path / "summary.json").read_text())["num_steps"] == 1
    assert "What to do next" not in capsys.readouterr().out


def test_a_disk_that_refuses_while_files_are_opened_leaves_nothing_open(tmp_path: Path, config: Config):
    (tmp_path / "eval.jsonl").mkdir()
    observer = Observer(config, RunDir(tmp_path), World(), resume_step=0)
    with pytest.raises(CheckpointError, match=r"eval\.jsonl"), observer:
        pass
    assert observer._progress._live is None


def test_steps_without_a_gradient_are_shown_and_then_complained_about(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    with Observer(config, RunDir(tmp_path), World(), resume_step=0) as observer:
        for step in range(1, observer_module.IDLE_STEPS + 3):
            assert ("in a row taught nothing" in caplog.text) == (step > observer_module.IDLE_STEPS)
            observer.step(step, {"reward": 0.5, "completion_tokens_total": 1.0, "step_seconds": 1.0}, make_scored())
    assert "reward 0.500  no gradient" in capsys.readouterr().out
    assert caplog.text.count("in a row taught nothing") == 1
