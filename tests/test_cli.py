"""The command `lockstep` as a user types it. A stand-in for the loop shows what the ranks are asked to do.

The stand-in comes in by `sitecustomize`, which Python imports in every process that has it on its path: the command, its
ranks, and torchrun's ranks run unchanged around it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.config import describe_options, load_config
from lockstep.files import FILE_LIST, describe_files

pytestmark = pytest.mark.timeout(100)

RECIPE = """
model: {path: /models/tiny}
data: {train: {task: sums}}
reward: [{name: last_number}]
"""
STAND_IN = """
import os, sys, threading, types
loop = types.ModuleType("lockstep.loop")
def run_training(config, *, resume):
    from lockstep.errors import DataError
    from lockstep.signals import stop_requested
    rank = int(os.environ.get("RANK", "0"))
    what = os.environ.get("FAKE", "")
    report(f"{rank} of {os.environ.get('WORLD_SIZE', '1')} seed {config.run.seed} resume {resume}")
    if what == "data":
        raise DataError("no column 'answer'")
    if what == "one" and rank == 1:
        raise ZeroDivisionError("on one rank")
    tick = threading.Event()
    while what == "stop" and not stop_requested():
        tick.wait(0.01)
    while what == "one":
        tick.wait()
    return 0
def run_eval(config, *, adapter, templates):
    report(f"eval {adapter} {templates}")
    return 0
def report(line):
    handle = os.open(os.environ["REPORTS"], os.O_WRONLY | os.O_APPEND)
    os.write(handle, (line + "\\n").encode())
    os.close(handle)
loop.run_training, loop.run_eval = run_training, run_eval
sys.modules["lockstep.loop"] = loop
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    path = tmp_path / "reports"
    path.touch()
    return path


@pytest.fixture
def start(tmp_path: Path, reports: Path) -> Start:
    """Start a command in the test's folder with the stand-in on its path."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(STAND_IN)

    def start(command: list[str], **env: str) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "WORLD"))}
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**clean, "PYTHONPATH": str(site), "REPORTS": str(reports), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def lockstep(*words: str) -> list[str]:
    return [sys.executable, "-m", "lockstep", *words]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_print_config_is_a_recipe_that_loads_back_equal(recipe: Path, capsys: pytest.CaptureFixture[str]):
    words = ["train", str(recipe), "train.lr=1e-5", "--print-config", "data.prompt.template=on {prompt}"]
    assert cli.run(words) == 0
    resolved = recipe.with_name("resolved.yaml")
    resolved.write_text(capsys.readouterr().out)
    assert load_config(resolved) == load_config(recipe, [words[2], words[4]])


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["eval", "--help"], []])
def test_help_has_every_option_with_type_default_and_meaning(words: list[str], capsys: pytest.CaptureFixture[str]):
    if words[1:]:
        with pytest.raises(SystemExit) as ended:
            cli.run(words)
        assert ended.value.code == 0
    else:
        assert cli.run(words) == (0 if words else 2)
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    flat = re.sub(r"\s+", " ", text)
    for option in describe_options():
        default = "required" if option.default == "required" else f"default {option.default}"
        assert f" {option.key.replace('[]', '.N')} ({option.type}; {default}) {option.meaning}" in flat, option
    assert "--nproc" in text
    assert "--print-config" in text


def test_help_does_not_import_torch():
    code = "import sys; from lockstep import cli; cli.run(['--help']); sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60, check=False).returncode == 0
    )


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["train", "RECIPE", "--print-config"]])
def test_a_reader_that_has_seen_enough_is_no_error(recipe: Path, start: Start, words: list[str]):
    read, write = os.pipe()
    os.close(read)
    command = lockstep(*[str(recipe) if word == "RECIPE" else word for word in words])
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("command", "said"), [("train", "at once; --resume goes on from the last"), ("eval", "at once\n")]
)
def test_only_what_can_be_resumed_is_said_to_be(command: str, said: str, monkeypatch, capsys):
    def interrupt(words) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupt)
    assert cli.run([command, "recipe.yaml"]) == 130
    assert f"stopped {said}" in capsys.readouterr().err


def test_version_and_unknown_command(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["--version"]) == 0
    assert cli.run(["trian"]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("lockstep ")
    assert "unknown command 'trian'; it is one of train, eval" in printed.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "nowhere.yaml"], "recipe 'nowhere.yaml' does not exist"),
        (["train", "RECIPE", "trian.lr=1"], "unknown key 'trian'; did you mean 'train'?"),
        (["train", "RECIPE", "train.lr=fast", "--nproc", "2"], "train.lr: expected a number; 'fast' came"),
        (["eval", "RECIPE", "--adapter", "/nowhere"], "--adapter /nowhere holds no adapter_config.json"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    recipe: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.run([str(recipe) if word == "RECIPE" else word for word in words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lockstep: error: ")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc", "0"], "expected a whole number of at least 1, '0' came"),
        (["--nproc", "two"], "expected a whole number of at least 1, 'two' came"),
        (["--reusme"], "unrecognized arguments: --reusme"),
    ],
)
def test_bad_flags(recipe: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.run(["train", str(recipe), *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_eval_without_a_checkpoint_says_what_to_give(recipe: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["eval", str(recipe), f"run.dir={recipe.parent / 'run'}"]) == 1
    assert "holds no checkpoint yet; train first, or give --adapter DIR, or --base" in capsys.readouterr().err


def test_eval_passes_adapter_and_templates_on(recipe: Path, start: Start, reports: Path):
    adapter = recipe.parent / "run" / "checkpoints" / "step-000004" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter.parent / FILE_LIST).write_text(json.dumps({"files": describe_files(adapter.parent)}))
    base = ["eval", str(recipe), "run.dir=run", "--template", "{prompt}", "--template", "Q: {prompt}"]
    for words in (base, [*base, "--base"], ["eval", str(recipe), "--adapter", str(adapter)]):
        assert finish(start(lockstep(*words)))[0] == 0
    templates = ("{prompt}", "Q: {prompt}")
    newest = Path("run") / "checkpoints" / "step-000004" / "adapter"
    assert reports.read_text().splitlines() == [
        f"eval {newest} {templates}",
        f"eval None {templates}",
        f"eval {adapter} ()",
    ]


def test_one_rank_runs_in_this_process(recipe: Path, start: Start, reports: Path):
    assert finish(start(lockstep("train", str(recipe), "--resume", "run.seed=3"))) == (0, "", "")
    assert reports.read_text() == "0 of 1 seed 3 resume True\n"


def test_two_ranks_get_the_same_words(recipe: Path, start: Start, reports: Path):
    code, out, err = finish(start(lockstep("train", str(recipe), "--nproc", "2", "run.seed=3")))
    assert (code, out, err) == (0, "", "")
    assert sorted(reports.read_text().splitlines()) == ["0 of 2 seed 3 resume False", "1 of 2 seed 3 resume False"]


def test_an_error_of_all_ranks_is_told_once(recipe: Path, start: Start):
    assert finish(start(lockstep("train", str(recipe), "--nproc", "2"), FAKE="data")) == (
        2,
        "",
        "lockstep: error: no column 'answer'\n",
    )


def test_a_failing_rank_ends_the_other_and_keeps_its_traceback(recipe: Path, start: Start):
    code, _, err = finish(start(lockstep("train", str(recipe), "--nproc", "2"), FAKE="one"))
    assert code == 1
    assert err.startswith("lockstep: error on rank 1:\nTraceback")
    assert err.count("ZeroDivisionError: on one rank") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_stopped_run_ends_in_zero_with_one_line_on_how_to_go_on(
    recipe: Path, start: Start, reports: Path, number: signal.Signals, nproc: str
):
    words = ["train", str(recipe), "run.dir=a b", "--nproc", nproc]
    process = start(lockstep(*words), FAKE="stop")
    while len(reports.read_text().splitlines()) < int(nproc):
        assert process.poll() is None
    process.send_signal(number)
    code, out, err = finish(process)
    assert code == 0, err
    told = f"stopped by {number.name}; go on with: lockstep train {recipe} 'run.dir=a b' --nproc {nproc} --resume\n"
    assert out == told
    assert err.strip() == f"{number.name}: finishing this step and saving; once more to stop at once"


def test_torchrun_ranks(recipe: Path, start: Start, reports: Path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "lockstep", "train", str(recipe)]
    code, out, err = finish(start([*torchrun, *words]))
    assert (code, out) == (0, ""), err
    assert sorted(reports.read_text().splitlines()) == ["0 of 2 seed 0 resume False", "1 of 2 seed 0 resume False"]
    code, _, err = finish(start([*torchrun, *words], FAKE="data"))
    assert code != 0
    assert err.count("no column 'answer'") == 1


def test_slurm_tasks_are_ranks(recipe: Path, start: Start, reports: Path):
    env = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "localhost"}
    tasks = [
        start(lockstep("train", str(recipe)), **env, SLURM_PROCID=str(task), SLURM_LOCALID=str(task))
        for task in range(2)
    ]
    assert [finish(task)[0] for task in tasks] == [0, 0]
    assert sorted(reports.read_text().splitlines()) == ["0 of 2 seed 0 resume False", "1 of 2 seed 0 resume False"]


def test_nproc_under_torchrun_is_refused(recipe: Path, start: Start):
    code, _, err = finish(start(lockstep("train", str(recipe), "--nproc", "2"), RANK="0", WORLD_SIZE="4"))
    assert code == 2
    assert "4 ranks are already started" in err
