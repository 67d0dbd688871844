"""Sample files: whole, readable, limited, and gone when their step is made again."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from lockstep.observe.samples import SampleWriter
from lockstep.rundir import RunDir
from lockstep.types import Episode, Prompt, Sample, ScoredSample


def make_scored(index: int, *, logprob: float = -0.5) -> ScoredSample:
    prompt = Prompt(uid="train-9", ids=(1, 2), text="Q: 3 + 4?\n", answer="7")
    sample = Sample(prompt, 4, index, (5, 6), (logprob, -1.0), "größer 7", "stop", 12)
    return ScoredSample(sample, 0.5, {"exact": 0.0, "format": 1.0})


def test_everything_known_of_a_sample_is_written(tmp_path: Path):
    SampleWriter(RunDir(tmp_path), limit=8).write(12, [make_scored(0), make_scored(1)])
    path = tmp_path / "samples" / "step-000012.jsonl"
    assert "größer" in path.read_text(encoding="utf-8")
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first == {
        "uid": "train-9",
        "slot": 4,
        "index": 0,
        "prompt": "Q: 3 + 4?\n",
        "answer": "7",
        "completion": "größer 7",
        "finish": "stop",
        "reward": 0.5,
        "rewards": {"exact": 0.0, "format": 1.0},
        "policy_version": 12,
        "ids": [5, 6],
        "logprobs": [-0.5, -1.0],
    }
    assert second["index"] == 1


def test_the_limit_and_no_samples_at_all(tmp_path: Path):
    SampleWriter(RunDir(tmp_path), limit=2).write(1, [make_scored(index) for index in range(5)])
    assert len((tmp_path / "samples" / "step-000001.jsonl").read_text().splitlines()) == 2
    SampleWriter(RunDir(tmp_path), limit=0, resume_step=1).write(2, [make_scored(0)])
    SampleWriter(RunDir(tmp_path), limit=2, resume_step=1).write(3, [])
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-000001.jsonl"]


def test_a_logprob_of_minus_infinity_is_null(tmp_path: Path):
    SampleWriter(RunDir(tmp_path), limit=1).write(1, [make_scored(0, logprob=-math.inf)])
    entry = json.loads((tmp_path / "samples" / "step-000001.jsonl").read_text())
    assert entry["logprobs"] == [None, -1.0]


def test_what_an_environment_notes_is_written_whatever_it_is(tmp_path: Path):
    ring: dict[str, object] = {}
    ring["self"] = ring
    info = {"keys": {(1, 2): 3}, "ring": ring, "nan": math.nan, "set": {1}, 5: [None, True]}
    episode = Episode(({"role": "tool", "content": "x", "call": {(1,): 2}},), (0.0,), "done", (info,))
    scored = make_scored(0)
    scored = replace(scored, sample=replace(scored.sample, episode=episode))
    SampleWriter(RunDir(tmp_path), limit=1).write(1, [scored])
    entry = json.loads((tmp_path / "samples" / "step-000001.jsonl").read_text(), parse_constant=int)
    assert entry["info"] == [
        {"keys": "{(1, 2): 3}", "ring": "{'self': {...}}", "nan": "nan", "set": "{1}", "5": [None, True]}
    ]
    assert entry["turns"] == [{"role": "tool", "content": "x", "call": "{(1,): 2}"}]


def test_resume_removes_later_steps(tmp_path: Path):
    writer = SampleWriter(RunDir(tmp_path), limit=1)
    for step in (9, 10, 11):
        writer.write(step, [make_scored(0)])
    (tmp_path / "samples" / "step-notes.jsonl").write_text("the user's own")
    SampleWriter(RunDir(tmp_path), limit=1, resume_step=10)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        "step-000009.jsonl",
        "step-000010.jsonl",
        "step-notes.jsonl",
    ]


class Unshown:
    def __repr__(self) -> str:
        raise OSError("no words")


def test_what_can_be_neither_shown_nor_encoded_does_not_end_the_run(tmp_path: Path):
    episode = Episode(
        (), (0.0,), "done", ({"half": "a \ud83d", "\ud83d": 1, "odd": [Unshown()], "odd too": {(1,): Unshown()}},)
    )
    scored = make_scored(0)
    scored = replace(scored, sample=replace(scored.sample, episode=episode))
    SampleWriter(RunDir(tmp_path), limit=1).write(1, [scored])
    entry = json.loads((tmp_path / "samples" / "step-000001.jsonl").read_text(encoding="utf-8"))
    said = "a Unshown that cannot be shown (OSError)"
    assert entry["info"] == [
        {"half": "a \ud83d", "\ud83d": 1, "odd": [said], "odd too": "a dict that cannot be shown (OSError)"}
    ]
