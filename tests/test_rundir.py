"""Run directories: new, resumed, held by another run, another recipe's, unwritable, full, killed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep import rundir
from lockstep.config import Config, build_config, load_config
from lockstep.errors import CheckpointError
from lockstep.files import FILE_LIST, describe_files
from lockstep.rundir import RunDir, newest_adapter, open_run_dir

NOBODY = 65534


def make_config(folder: Path, **sections: object) -> Config:
    tree = {
        "run": {"dir": str(folder)},
        "model": {"path": "/models/tiny"},
        "data": {"train": {"task": "sums"}},
        "reward": [{"name": "last_number"}],
    }
    return build_config({**tree, **sections})


def write_file_list(folder: Path) -> None:
    (folder / FILE_LIST).write_text(json.dumps({"files": describe_files(folder)}))


def with_run(folder: Path, **sections: object) -> RunDir:
    """A directory in which a step has been made."""
    run = open_run_dir(make_config(folder, **sections), resume=False)
    run.metrics.write_text('{"step": 1}\n')
    run.close()
    return run


def refusal(config: Config, *, resume: bool) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_run_dir(config, resume=resume)
    return str(caught.value)


def test_new_run_holds_a_config_that_loads_back_equal(tmp_path: Path):
    config = make_config(tmp_path / "deep" / "run")
    with open_run_dir(config, resume=False) as run:
        assert load_config(run.config) == config
        assert sorted(path.name for path in run.path.iterdir()) == [".lock", "checkpoints", "config.yaml", "samples"]


def test_other_ranks_touch_nothing(tmp_path: Path):
    run = open_run_dir(make_config(tmp_path / "run"), resume=False, is_main=False)
    assert run.lock is None
    assert not run.path.exists()
    run.close()


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path):
    with_run(tmp_path)
    said = refusal(make_config(tmp_path), resume=False)
    assert "already holds a run (metrics.jsonl)" in said
    assert "--resume" in said


def test_a_checkpoint_alone_is_a_run_too(tmp_path: Path):
    with open_run_dir(make_config(tmp_path), resume=False) as run:
        (run.checkpoints / "step-000001").mkdir()
    assert "already holds a run (checkpoints/step-000001)" in refusal(make_config(tmp_path), resume=False)


def test_a_start_that_failed_before_its_first_step_can_be_tried_again(tmp_path: Path):
    open_run_dir(make_config(tmp_path), resume=False).close()
    better = make_config(tmp_path, model={"path": "/models/other"})
    with open_run_dir(better, resume=False) as run:
        assert load_config(run.config) == better


def test_a_config_that_is_not_ours_is_not_written_over(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("someone: else\n")
    assert "is not a recipe of this lockstep version" in refusal(make_config(tmp_path), resume=False)
    assert (tmp_path / "config.yaml").read_text() == "someone: else\n"


def test_nothing_to_resume(tmp_path: Path):
    assert "nothing to resume" in refusal(make_config(tmp_path / "never"), resume=True)
    assert not (tmp_path / "never").exists()


def test_resume_takes_options_that_may_change_and_writes_them_down(tmp_path: Path):
    with_run(tmp_path)
    longer = make_config(
        tmp_path,
        run={"dir": str(tmp_path), "num_steps": 7, "max_train_seconds": 5},
        checkpoint={"keep": 9},
        observe={"samples_per_step": 1},
        eval={"before": False},
        dist={"timeout_s": 9},
    )
    with open_run_dir(longer, resume=True) as run:
        assert load_config(run.config) == longer


def test_resume_of_a_moved_directory(tmp_path: Path):
    with_run(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    open_run_dir(make_config(tmp_path / "new"), resume=True).close()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"lr": 0.5}}, "train.lr is 0.0001 there and 0.5 here"),
        ({"model": {"path": "b"}}, "model.path is '/models/tiny' there and 'b' here"),
        ({"reward": [{"name": "exact_match"}]}, "reward.0.name is 'last_number' there and 'exact_match' here"),
        ({"reward": [{"name": "last_number"}, {"name": "y"}]}, "reward.1.name is None there and 'y' here"),
        (
            {"data": {"train": {"task": "sums", "task_args": {"low": 1}}}},
            "data.train.task_args.low is None there and 1",
        ),
        ({"data": {"train": {"task": "sums"}, "eval": {"task": "sums"}}}, "data.eval"),
    ],
)
def test_another_recipe_s_run_is_refused_with_the_keys_that_differ(tmp_path: Path, sections: dict, said: str):
    with_run(tmp_path)
    before = (tmp_path / "config.yaml").read_bytes()
    message = refusal(make_config(tmp_path, **sections), resume=True)
    assert "holds another recipe's run" in message
    assert said in message
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_seed_may_not_change_on_resume(tmp_path: Path):
    with_run(tmp_path)
    other = make_config(tmp_path, run={"dir": str(tmp_path), "seed": 5})
    assert "run.seed is 0 there and 5 here" in refusal(other, resume=True)


def test_damaged_config_is_named(tmp_path: Path):
    with_run(tmp_path)
    (tmp_path / "config.yaml").write_text("model: [")
    assert f"{tmp_path}/config.yaml is not a recipe" in refusal(make_config(tmp_path), resume=True)


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path):
    run = with_run(tmp_path)
    (run.path / ".tmp-summary.json.1").write_text("half")
    (run.samples / ".tmp-step-000001.jsonl.1").write_text("half")
    (run.checkpoints / ".tmp-step-000001").mkdir()
    open_run_dir(make_config(tmp_path), resume=True).close()
    assert not list(tmp_path.rglob(".tmp-*"))


def test_path_is_a_file(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "Something on this path is a file" in refusal(make_config(path), resume=False)


@pytest.fixture
def no_privileges() -> Iterator[None]:
    """The superuser may write everywhere, so the test steps down for a moment."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(NOBODY)
    yield
    if was == 0:
        os.seteuid(was)


def test_unwritable_directory(tmp_path: Path, request: pytest.FixtureRequest):
    tmp_path.chmod(0o555)
    request.getfixturevalue("no_privileges")
    for path in (tmp_path, tmp_path / "below"):
        assert "cannot be written: Permission denied" in refusal(make_config(path), resume=False)


def test_full_disk_shows_before_anything_else_is_done(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        message = refusal(make_config(tmp_path), resume=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "no space to write" in message
    assert not (tmp_path / "config.yaml").exists()
    open_run_dir(make_config(tmp_path), resume=False).close()  # the failed start has let the lock go


HOLD = """
import json, sys
from lockstep.config import build_config
from lockstep.rundir import open_run_dir
run = open_run_dir(build_config(json.loads(sys.argv[1])), resume=False)
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.timeout(40)
def test_a_live_run_keeps_others_out_and_a_killed_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rundir, "_LOCK_WAIT_S", 0.2)
    config = make_config(tmp_path)
    tree = json.dumps(config.model_dump(mode="json"))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tree], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        for resume in (False, True):
            assert f"is in use by process {other.pid} on " in refusal(config, resume=resume)
        monkeypatch.undo()
        other.kill()
    open_run_dir(config, resume=False).close()


def test_more_steps_than_planned_say_what_the_learning_rate_does(tmp_path: Path, caplog):
    with_run(tmp_path, train={"schedule": "cosine"})
    for steps, count in ((100, 0), (200, 1)):
        again = make_config(tmp_path, train={"schedule": "cosine"}, run={"dir": str(tmp_path), "num_steps": steps})
        open_run_dir(again, resume=True).close()
        assert caplog.text.count("the cosine schedule now ends there") == count
    assert "run.num_steps was 100 and is 200" in caplog.text
    with_run(tmp_path / "constant", train={"schedule": "constant"})
    caplog.clear()
    again = make_config(tmp_path / "constant", train={"schedule": "constant"})
    again = again.model_copy(update={"run": again.run.model_copy(update={"num_steps": 7})})
    open_run_dir(again, resume=True).close()
    assert "schedule" not in caplog.text


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with open_run_dir(make_config(Path("~/runs/one")), resume=False) as run:
        assert run.path == tmp_path / "runs" / "one"
        assert run.config.is_file()


def test_newest_adapter(tmp_path: Path, caplog):
    with pytest.raises(CheckpointError, match="holds no checkpoint yet"):
        newest_adapter(tmp_path)
    for name in ("step-9", "step-000010", ".tmp-step-000011", "step-x"):
        adapter = tmp_path / "checkpoints" / name / "adapter"
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").write_text("{}")
        write_file_list(adapter.parent)
    (tmp_path / "checkpoints" / "step-12" / "adapter").mkdir(parents=True)
    assert newest_adapter(tmp_path) == tmp_path / "checkpoints" / "step-000010" / "adapter"
    (tmp_path / "checkpoints" / "step-000010" / "adapter" / "adapter_config.json").write_text("{")
    assert newest_adapter(tmp_path) == tmp_path / "checkpoints" / "step-9" / "adapter"
    assert "step-000010: it is damaged: adapter/adapter_config.json has 1 bytes, 2 were written" in caplog.text
    (tmp_path / "checkpoints" / "step-9" / "files.json").write_text('{"files": []}')
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        newest_adapter(tmp_path)
