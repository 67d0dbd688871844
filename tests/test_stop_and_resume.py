"""The command itself, with real ranks and real signals: a run that is stopped, then killed, equals one that never was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from helpers_loop import TIMES, make_model_folder, recipe

pytestmark = pytest.mark.timeout(300)  # four starts of two ranks, each importing torch and transformers

NUM_STEPS = 60  # of about 0.1 s: time for a signal to strike


def start(path: Path, run: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lockstep", "train", str(path), f"run.dir={run}", "--nproc", "2", *words]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate()
    return process.returncode, said


def steps(run: Path) -> list[dict[str, float]]:
    """What was written of each step, without what the clock says; a line that is being written is not there yet."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{name: value for name, value in entry.items() if not name.startswith(TIMES)} for entry in entries]


def strike(process: subprocess.Popen[str], *, after: int, number: signal.Signals) -> tuple[int, str]:
    """Send the launcher a signal once it has told of step `after`; how it ended. Its ranks go with it."""
    assert process.stdout is not None
    said = ""
    try:
        for line in process.stdout:
            said += line
            words = line.split()
            if words[:1] == ["step"] and int(words[1].partition("/")[0]) >= after:
                process.send_signal(number)
                code, rest = finish(process)
                return code, said + rest
        raise AssertionError(f"it ended before step {after}: {said}")
    finally:
        process.kill()


def test_a_run_that_is_stopped_then_killed_equals_one_that_never_was(tmp_path: Path):
    tree = recipe(make_model_folder(tmp_path / "model"), tmp_path / "unused", eval={"before": False, "after": False})
    tree["run"]["num_steps"] = NUM_STEPS
    tree["checkpoint"] = {"every_steps": 5, "keep": 2}
    path, whole, broken = tmp_path / "recipe.yaml", tmp_path / "whole", tmp_path / "broken"
    path.write_text(yaml.safe_dump(tree))
    code, said = finish(start(path, whole))
    assert code == 0, said

    code, said = strike(start(path, broken), after=7, number=signal.SIGTERM)
    assert code == 0, said
    assert f"run.dir={broken} --nproc 2 --resume\n" in said
    stopped_at = len(steps(broken))
    assert 7 <= stopped_at < NUM_STEPS
    assert (broken / "checkpoints" / f"step-{stopped_at:06d}" / "files.json").is_file()

    code, said = strike(start(path, broken, "--resume"), after=stopped_at + 13, number=signal.SIGKILL)
    assert code == -signal.SIGKILL, said
    assert len(steps(broken)) < NUM_STEPS

    code, said = finish(start(path, broken, "--resume"))
    assert code == 0, said
    assert steps(broken) == steps(whole)
    name = Path("checkpoints") / f"step-{NUM_STEPS:06d}" / "adapter" / "adapter_model.safetensors"
    left, right = load_file(broken / name), load_file(whole / name)
    assert left.keys() == right.keys()
    assert all(left[key].equal(right[key]) for key in left)
