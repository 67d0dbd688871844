"""Numbers of steps: whole lines, no step twice, damaged and unfinished lines, NaN, full disks, TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import resource
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.errors import CheckpointError
from lockstep.observe.metrics import MetricsWriter, read_metrics, reward_stats
from lockstep.rundir import RunDir
from lockstep.types import Prompt, Sample, ScoredSample, Stat


def make_scored(reward: float, *, ids: tuple[int, ...] = (5, 6), text: str = "7", finish: str = "stop") -> ScoredSample:
    prompt = Prompt(uid="train-1", ids=(1, 2), text="3 + 4?", answer="7")
    sample = Sample(prompt, 0, 0, ids, (-0.5,) * len(ids), text, "length" if finish == "length" else "stop", 3)
    return ScoredSample(sample, reward, {"last_number": reward, "format": 1.0})


def test_one_whole_line_per_step_in_the_order_given(tmp_path: Path):
    with MetricsWriter(RunDir(tmp_path), tensorboard=False) as writer:
        writer.write(1, {"reward": 0.5, "loss": 1})
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward": 0.5, "loss": 1.0}\n'
        writer.write(2, {"reward": 0.6, "loss": -1e-9})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward": 0.5, "loss": 1.0},
        {"step": 2, "reward": 0.6, "loss": -1e-9},
    ]


def test_resume_drops_later_steps_and_an_unfinished_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\nnot json\n{"step": 3}\n{"step": 4, "rew')
    with MetricsWriter(RunDir(tmp_path), tensorboard=False, resume_step=2) as writer:
        writer.write(3, {"reward": 1.0})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "reward": 1.0}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_starts_empty(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    MetricsWriter(RunDir(tmp_path), tensorboard=False).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_damaged_lines_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n[1]\n{"reward": 1}\n\xff\xfe\n{"step": 2}\n')
    assert [entry["step"] for entry in read_metrics(path)] == [1, 2]
    assert "passed over 3 damaged lines" in caplog.text
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_what_is_not_finite_is_null_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING), MetricsWriter(RunDir(tmp_path), tensorboard=False) as writer:
        writer.write(1, {"loss": math.nan, "kl": math.inf, "reward": 1.0})
        writer.write(2, {"loss": math.nan, "kl": 0.0, "reward": -math.inf})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": None, "kl": None, "reward": 1.0},
        {"step": 2, "loss": None, "kl": 0.0, "reward": None},
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "step 1: not finite, written as null: loss = nan, kl = inf",
        "step 2: not finite, written as null: reward = -inf",
    ]


def test_a_full_disk_takes_the_line_back_and_names_the_file(tmp_path: Path):
    writer = MetricsWriter(RunDir(tmp_path), tensorboard=False)
    writer.write(1, {"reward": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, hard))
    try:
        with pytest.raises(CheckpointError, match=r"no space to write .*metrics\.jsonl"):
            writer.write(2, {f"metric_{i}": 1.0 for i in range(10)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward": 1.0}\n'


def test_path_that_is_a_folder(tmp_path: Path):
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(CheckpointError, match=r"tensorboard"):
        MetricsWriter(RunDir(tmp_path), tensorboard=True)


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_has_the_same_numbers_and_forgets_dropped_steps(tmp_path: Path):
    run = RunDir(tmp_path)
    with MetricsWriter(run, tensorboard=True) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"seconds.generate": step, "loss": math.nan})
    with MetricsWriter(run, tensorboard=True, resume_step=1) as writer:
        writer.write(2, {"seconds.generate": 20})
    assert scalars(tmp_path, "seconds/generate") == [(1, 1.0), (2, 20.0)]
    assert [step for step, _ in scalars(tmp_path, "loss")] == [1]


def test_reward_stats():
    scored = [make_scored(1.0), make_scored(0.0, ids=(5,), text=" ", finish="length")]
    assert reward_stats(scored, ["last_number", "format"]) == {
        "reward": Stat(1.0, 2),
        "reward.last_number": Stat(1.0, 2),
        "reward.format": Stat(2.0, 2),
        "completion_tokens": Stat(3.0, 2),
        "truncated": Stat(1.0, 2),
        "empty": Stat(1.0, 2),
    }


def test_reward_stats_of_a_rank_without_samples_have_the_same_keys():
    labels = ["last_number", "format"]
    empty = reward_stats([], labels)
    assert list(empty) == list(reward_stats([make_scored(1.0)], labels))
    assert set(empty.values()) == {Stat(0.0, 0)}
