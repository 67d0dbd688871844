"""Engines are small scripts here: what is tested is who starts, watches, ends and outlives whom."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.errors import ConfigError, EngineDied, EngineUnhealthy
from lockstep.rollout.http import EngineRefused
from lockstep.rollout.process import EngineProcess, check_exposure, engine_env, free_port, is_loopback

LIMIT_S = 20.0
# Each opens the FIFO for writing, which returns once the test reads it; the FIFO's end is seen when all writers are gone.
HOLD = "import os, signal, sys; held = os.open(sys.argv[1], os.O_WRONLY); os.write(held, b'up\\n')\n"
WITH_CHILD = (
    HOLD
    + "import subprocess; subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], pass_fds=[held])\n"
)
PAUSE = "signal.pause()\n"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


class Fifo:
    """Says when every process that holds it open for writing has ended."""

    def __init__(self, path: Path):
        os.mkfifo(path)
        self.path = str(path)
        self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_up(self) -> None:
        assert self._read() == b"up\n"

    def wait_gone(self) -> None:
        assert self._read() == b""

    def _read(self) -> bytes:
        assert select.select([self._handle], [], [], LIMIT_S)[0], "nothing happened within the limit"
        return os.read(self._handle, 3)

    def close(self) -> None:
        os.close(self._handle)


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    made = Fifo(tmp_path / "fifo")
    yield made
    made.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    made: list[EngineProcess] = []

    def make(*scripts: str, arg: str = "", **more) -> EngineProcess:
        left = list(scripts)

        def command(port: int) -> list[str]:
            return [sys.executable, "-c", left.pop(0) if len(left) > 1 else left[0], arg, str(port)]

        made.append(EngineProcess(command, log_path=tmp_path / "engine.log", **more))
        return made[-1]

    yield make
    for process in made:
        process.stop(timeout_s=1)


def not_yet() -> None:
    raise EngineUnhealthy("nobody listens yet")


def ready() -> None:
    pass


def test_stop_ends_the_engine_and_what_it_started(engine, fifo):
    process = engine(WITH_CHILD + PAUSE, arg=fifo.path)
    process.start()
    fifo.wait_up()
    assert process.is_alive() and process.died() is None and process.pid is not None
    process.stop()
    fifo.wait_gone()
    assert not process.is_alive()
    assert os.getpgrp() != process.pid
    process.stop()  # once more is nothing


def test_an_engine_deaf_to_sigterm_is_killed_after_the_limit(engine, fifo):
    process = engine(DEAF + WITH_CHILD + PAUSE, arg=fifo.path)
    process.start()
    fifo.wait_up()
    started = time.monotonic()
    process.stop(timeout_s=0.5)
    assert 0.5 <= time.monotonic() - started < 10
    fifo.wait_gone()


def test_a_crash_takes_along_what_the_engine_left_running(engine, fifo):
    process = engine(WITH_CHILD + "sys.exit(3)", arg=fifo.path)
    process.start()
    fifo.wait_up()
    fifo.wait_gone()
    error = process.died(LIMIT_S)
    assert error is not None and "exit status 3" in str(error)


def test_death_during_start_is_told_at_once_with_the_last_words(engine):
    script = "import sys; print('\\x1b[31mloading\\x1b[0m shard 1', flush=True); sys.exit('CUDA out of memory')"
    process = engine(script)
    process.start()
    started = time.monotonic()
    with pytest.raises(
        EngineDied, match=r"(?s)exit status 1 while it started.*  loading shard 1\n  CUDA out of memory"
    ):
        process.wait_healthy(not_yet, timeout_s=60)
    assert time.monotonic() - started < LIMIT_S


def test_only_the_words_of_this_start_are_quoted(engine):
    process = engine("raise SystemExit('first words')", "raise SystemExit('second words')")
    for words in ("first words", "second words"):
        process.start()
        assert words in str(process.died(LIMIT_S))
    assert "first words" not in process.last_words()
    assert "first words" in process.log_path.read_text()
    assert len(process.last_words(1).splitlines()) == 1


def test_a_signal_is_named(engine):
    process = engine("import os; os.abort()")
    process.start()
    assert "was killed by SIGABRT" in str(process.died(LIMIT_S))


def test_a_command_that_does_not_exist(tmp_path):
    process = EngineProcess(lambda port: ["/no/such/python"], log_path=tmp_path / "log")
    with pytest.raises(EngineDied, match=r"(?s)could not be run.*/no/such/python.*No such file"):
        process.start_healthy(not_yet, timeout_s=60)


def test_not_ready_in_time_says_so_and_stops_it(engine, fifo):
    process = engine(HOLD + "print('still compiling', flush=True)\n" + PAUSE, arg=fifo.path)
    with pytest.raises(
        EngineUnhealthy, match=r"(?s)not ready 1 s after.*nobody listens yet.*start_timeout_s.*still compiling"
    ):
        process.start_healthy(not_yet, timeout_s=1)
    fifo.wait_up()
    fifo.wait_gone()


def test_a_refused_token_is_not_waited_out(engine):
    def refused() -> None:
        raise EngineRefused("401", status=401, body="")

    process = engine("import signal; signal.pause()")
    started = time.monotonic()
    with pytest.raises(EngineRefused):
        process.start_healthy(refused, timeout_s=60)
    assert time.monotonic() - started < LIMIT_S and not process.is_alive()


def test_a_port_that_was_taken_meanwhile_is_tried_again_on_another(engine):
    process = engine("raise SystemExit('[Errno 98] Address already in use')", "import signal; signal.pause()")
    ports = []

    def check() -> None:
        ports.append(process.port)
        if len(set(ports)) < 2:
            not_yet()

    process.start_healthy(check, timeout_s=60)
    assert process.is_alive() and len(set(ports)) == 2
    assert process.num_restarts == 0


def test_another_death_is_not_taken_for_a_port(engine):
    process = engine("raise SystemExit('no such model')")
    with pytest.raises(EngineDied, match="no such model"):
        process.start_healthy(not_yet, timeout_s=60)


def test_restarts_are_counted_and_limited(engine):
    process = engine("import signal; signal.pause()", max_restarts=2)
    process.start_healthy(ready, timeout_s=LIMIT_S)
    for count in (1, 2):
        pid = process.pid
        os.killpg(pid, signal.SIGKILL)
        assert "killed by SIGKILL" in str(process.died(LIMIT_S))
        process.restart(ready, timeout_s=LIMIT_S)
        assert process.num_restarts == count and process.is_alive() and process.pid != pid
    with pytest.raises(EngineDied, match=r"restarted 2 times, the limit \(engine.max_restarts\)"):
        process.restart(ready, timeout_s=LIMIT_S)


def test_two_starts_are_refused(engine):
    process = engine("import signal; signal.pause()")
    process.start()
    with pytest.raises(EngineUnhealthy, match="runs already"):
        process.start()


PARENT = """
import os, signal, sys
from pathlib import Path
from lockstep.rollout.process import EngineProcess

process = EngineProcess(lambda port: [sys.executable, "-c", sys.argv[2], sys.argv[1]], log_path=Path(sys.argv[3]))
process.start()
print(process.pid, flush=True)
if sys.argv[4] == "fork" and os.fork() == 0:  # this child keeps a copy of the pipe that the sitter watches
    signal.alarm(60)
    signal.pause()
signal.pause()
"""


@pytest.mark.parametrize("how", ["plain", "fork"])
def test_no_engine_outlives_a_parent_that_is_killed(fifo, tmp_path, how):
    argv = [sys.executable, "-c", PARENT, fifo.path, WITH_CHILD + PAUSE, str(tmp_path / "log"), how]
    parent = subprocess.Popen(argv, process_group=0)
    try:
        fifo.wait_up()
        parent.kill()
        fifo.wait_gone()
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def test_no_engine_outlives_its_sitter_while_nobody_else_can_act(fifo, tmp_path):
    argv = [sys.executable, "-c", PARENT, fifo.path, HOLD + PAUSE, str(tmp_path / "log"), "plain"]
    parent = subprocess.Popen(argv, process_group=0, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        sitter = int(parent.stdout.readline())
        fifo.wait_up()
        os.kill(parent.pid, signal.SIGSTOP)
        os.kill(sitter, signal.SIGKILL)
        fifo.wait_gone()
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()


def test_the_engine_is_no_rank(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "LOCKSTEP_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "kept")
    env = engine_env({"VLLM_API_KEY": "secret"})
    assert env["RANKING"] == "kept" and env["VLLM_API_KEY"] == "secret" and "PATH" in env
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "LOCKSTEP_STORE"} & set(env)


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.0.0.2", False),
    ],
)
def test_which_hosts_need_a_token(host, answer):
    assert is_loopback(host) is answer
    check_exposure(host, "token")
    if answer:
        check_exposure(host, None)
    else:
        with pytest.raises(ConfigError, match=r"engine\.token_env"):
            check_exposure(host, None)


def test_ports_and_urls(tmp_path):
    process = EngineProcess(lambda port: [], log_path=tmp_path / "log", host="0.0.0.0")
    process.port = free_port()
    assert process.url == f"http://127.0.0.1:{process.port}"
    assert free_port() > 0
