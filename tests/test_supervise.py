"""Ranks that finish, fail, die, hang and are stopped; the launcher's exit code and what it says of it.

The ranks are short snippets. They report over a named pipe, so that nothing here waits by the clock.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from lockstep import supervise as supervise_module
from lockstep.errors import LockstepError
from lockstep.failures import LAUNCH_DIR, Failure, deliver, describe
from lockstep.supervise import supervise

PRELUDE = """
import os, signal, sys, threading
from lockstep.errors import ConfigError, LockstepError, RankMissing, RewardError
from lockstep.failures import deliver, describe
from lockstep.signals import catch_stop_signals, release_signals, stop_requested
from lockstep.supervise import watch_parent
rank = int(os.environ["RANK"])
def report(text):
    with open(os.environ["PIPE"], "w") as pipe:
        pipe.write(f"{rank} {text}\\n")
def fail(error):
    failure = describe(error, rank)
    deliver(failure, os.environ)
    os._exit(failure.exit_code)
def hang():
    release_signals()
    threading.Event().wait()
watch_parent()
"""

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """Lines that ranks report. Opened for reading and writing, so that opening does not wait and reading never ends."""
    path = tmp_path / "reports"
    os.mkfifo(path)
    monkeypatch.setenv("PIPE", str(path))
    with os.fdopen(os.open(path, os.O_RDWR), "r") as pipe:
        yield pipe


@pytest.fixture(autouse=True)
def short_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also keeps the folder that a killed launcher cannot remove inside the test's own."""
    monkeypatch.setattr(supervise_module, "GRACE_S", 1.0)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def command(snippet: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE + snippet]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_ranks_get_what_they_need_and_all_ends_well(capfd: pytest.CaptureFixture[str], reports: TextIO):
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE OMP_NUM_THREADS"
    snippet = f"report(' '.join(os.environ[n] for n in '{names}'.split()) + ' ' + os.environ['LOCKSTEP_STORE'])"
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    assert supervise(command(snippet + "\nprint('out of', rank)"), 2, env=env) == 0
    lines = sorted(reports.readline().split() for _ in range(2))
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [line[1:6] for line in lines] == [[str(rank), "2", str(rank), "2", threads] for rank in range(2)]
    assert lines[0][6] == lines[1][6]
    assert not Path(lines[0][6]).parent.exists(), "the temporary folder outlives the run"
    printed = capfd.readouterr()
    assert printed.out == "out of 0\n"
    assert printed.err == "out of 1\n"


def test_threads_that_are_set_are_kept(reports: TextIO):
    assert (
        supervise(command("report(os.environ['OMP_NUM_THREADS'])"), 2, env={**os.environ, "OMP_NUM_THREADS": "7"}) == 0
    )
    assert sorted(reports.readline() for _ in range(2)) == ["0 7\n", "1 7\n"]


def test_a_killed_rank_ends_the_others_and_is_named(capfd: pytest.CaptureFixture[str], reports: TextIO):
    snippet = "report(os.getpid())\nos.kill(os.getpid(), signal.SIGKILL) if rank == 1 else hang()"
    began = time.monotonic()
    assert supervise(command(snippet), 3) == 1
    assert time.monotonic() - began < 20
    said = capfd.readouterr().err
    assert said.startswith("lockstep: error on rank 1: rank 1 was killed by SIGKILL")
    assert said.count("\n") == 1
    assert not any(is_alive(int(reports.readline().split()[1])) for _ in range(3))


def test_what_a_survivor_saw_is_added_in_one_line(capfd: pytest.CaptureFixture[str]):
    snippet = """
os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None
fail(RankMissing("rank 0 waited in 'reduce' for rank 1\\nmore"))
"""
    assert supervise(command(snippet), 2) == 1
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert "rank 1 was killed by SIGKILL" in said[0]
    assert said[1] == "  (rank 0 then ended with RankMissing: rank 0 waited in 'reduce' for rank 1)"


def test_an_error_on_every_rank_is_told_once(capfd: pytest.CaptureFixture[str]):
    assert supervise(command("fail(ConfigError('no such model'))"), 3) == 2
    assert capfd.readouterr().err == "lockstep: error: no such model\n"


def test_an_error_on_one_rank_is_told_with_the_rank(capfd: pytest.CaptureFixture[str]):
    assert supervise(command("fail(RewardError('it raised')) if rank == 1 else hang()"), 2) == 1
    assert capfd.readouterr().err == "lockstep: error on rank 1: it raised\n"


def test_the_cause_is_told_and_not_what_others_say_of_it(capfd: pytest.CaptureFixture[str]):
    snippet = """
if rank == 0:
    fail(LockstepError("rank 1 failed in rewards: RewardError: it raised"))
if rank == 2:
    fail(RankMissing("waited for rank 1"))
fail(RewardError("it raised"))
"""
    assert supervise(command(snippet), 3) == 1
    assert capfd.readouterr().err == "lockstep: error on rank 1: it raised\n"


def test_an_unexpected_error_keeps_its_traceback(capfd: pytest.CaptureFixture[str]):
    snippet = """
def deep():
    return {}["key"]
try:
    deep()
except KeyError as error:
    fail(error)
"""
    assert supervise(command(snippet), 2) == 1
    said = capfd.readouterr().err
    assert said.startswith("lockstep: error:\nTraceback (most recent call last):")
    assert said.count("KeyError: 'key'") == 1
    assert "in deep" in said


def test_an_exit_without_a_reason_is_named(capfd: pytest.CaptureFixture[str]):
    assert supervise(command("os._exit(7) if rank == 0 else hang()"), 2) == 1
    assert "rank 0 ended with exit code 7 and gave no reason" in capfd.readouterr().err


def test_an_exit_that_claims_success_inside_the_work_is_a_failure(capfd: pytest.CaptureFixture[str]):
    """A reward that calls os._exit(0): the run is not done, whatever the code says."""
    snippet = """
from lockstep.failures import at_work
with at_work(os.environ):
    os._exit(0)
"""
    assert supervise(command(snippet), 2) == 1
    assert "ended before its work was done" in capfd.readouterr().err
    assert supervise(command(snippet.replace("os._exit(0)", "pass")), 2) == 0


def test_what_a_rank_left_running_is_ended_too(reports: TextIO):
    snippet = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
report(child.pid)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert supervise(command(snippet), 1) == 1
    pid = int(reports.readline().split()[1])
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline


def test_a_command_that_is_not_there(tmp_path: Path):
    with pytest.raises(LockstepError, match="rank 0 cannot be started"):
        supervise([str(tmp_path / "absent")], 2)


LAUNCHER = """
import sys
from lockstep import supervise
supervise.SAME_REQUEST_S = float(sys.argv[2])
sys.exit(supervise.supervise([sys.executable, "-c", sys.argv[1]], 2))
"""
UNTIL_STOPPED = """
report(os.getpid())
catch_stop_signals()
tick = threading.Event()
while not stop_requested():
    tick.wait(0.01)
report("saved after " + stop_requested())
print("go on with --resume") if rank == 0 else None
"""


def start_launcher(snippet: str, *, same_request_s: float = 1.0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, PRELUDE + snippet, str(same_request_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_reaches_every_rank_once_and_ends_in_zero(reports: TextIO, number: signal.Signals):
    launcher = start_launcher(UNTIL_STOPPED)
    for _ in range(2):
        reports.readline()  # the ranks run, and have perhaps not yet installed their handlers: the signal waits for them
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 0, err
    assert sorted(reports.readline() for _ in range(2)) == [f"{rank} saved after {number.name}\n" for rank in range(2)]
    assert out == "go on with --resume\n"
    assert err == f"\n{number.name}: finishing this step and saving; once more to stop at once\n"


def test_ctrl_c_in_a_terminal_and_its_echo_are_one_request(reports: TextIO):
    launcher = start_launcher(UNTIL_STOPPED)
    for _ in range(2):
        reports.readline()
    for _ in range(3):
        launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 0, err


def test_a_second_signal_later_ends_ranks_that_do_not_stop(reports: TextIO):
    snippet = """
report(os.getpid())
signal.signal(signal.SIGINT, lambda *_: report("will not"))
hang()
"""
    launcher = start_launcher(snippet, same_request_s=0.0)
    pids = [int(reports.readline().split()[1]) for _ in range(2)]
    launcher.send_signal(signal.SIGINT)
    assert sorted(reports.readline() for _ in range(2)) == ["0 will not\n", "1 will not\n"]
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + signal.SIGINT
    assert not any(is_alive(pid) for pid in pids)


def test_ranks_that_a_stop_ends_early_are_no_failure(reports: TextIO):
    launcher = start_launcher("report(os.getpid())\nhang()")
    for _ in range(2):
        reports.readline()
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "error" not in err


def test_a_killed_launcher_takes_its_ranks_along(reports: TextIO):
    launcher = start_launcher("report(os.getpid())\nhang()")
    pids = [int(reports.readline().split()[1]) for _ in range(2)]
    assert all(is_alive(pid) for pid in pids)
    launcher.kill()
    launcher.communicate(timeout=30)  # the ranks hold its output open: this returns once they are gone too
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline


def make_failure(rank: int, message: str) -> Failure:
    return describe(LockstepError(message), rank)


def test_torchrun_ranks_tell_an_error_once_per_host(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    attempt = tmp_path / "attempt_0"
    for rank in (1, 0, 2):
        (attempt / str(rank)).mkdir(parents=True)
        deliver(make_failure(rank, "the same"), {"TORCHELASTIC_ERROR_FILE": str(attempt / str(rank) / "error.json")})
    assert capfd.readouterr().err == "lockstep: error on rank 1: the same\n"
    deliver(make_failure(2, "another"), {"TORCHELASTIC_ERROR_FILE": str(attempt / "2" / "error.json")})
    assert capfd.readouterr().err == "lockstep: error on rank 2: another\n"


def test_without_a_common_folder_rank_0_tells_all_and_others_a_line(capfd: pytest.CaptureFixture[str]):
    for env in ({}, {"TORCHELASTIC_ERROR_FILE": os.devnull}):
        deliver(make_failure(0, "one\ntwo"), env)
        deliver(make_failure(3, "one\ntwo"), env)
        assert capfd.readouterr().err == "lockstep: error: one\ntwo\nlockstep: error on rank 3: one\n"


def test_traceback_on_request(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCKSTEP_TRACEBACK", "1")
    try:
        raise LockstepError("expected")
    except LockstepError as error:
        deliver(describe(error, 0), {})
    said = capfd.readouterr().err
    assert "Traceback" in said
    assert said.endswith("lockstep.errors.LockstepError: expected\n")
    assert LAUNCH_DIR not in os.environ
