"""A command in, an engine's process out: started, waited for, watched, restarted within limits, and never left behind.

The engine and all that it starts form one process group of their own, under a small sitter (`lockstep.rollout.sitter`)
that kills the group when this process is gone, however it went. What the engine prints goes to a log file; the end of it
is what every error quotes. Tokens belong into `env`: a command line is there for every user of the host to read.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from lockstep.errors import ConfigError, EngineDied, EngineUnhealthy
from lockstep.rollout import sitter
from lockstep.rollout.http import EngineRefused

POLL_S = 0.1
LAST_WORDS = 20
_LOG_TAIL_BYTES = 64 * 1024
_PORT_TRIES = 3
_KILL_LIMIT_S = 10.0
_ADDRESS_IN_USE = re.compile(r"address already in use|EADDRINUSE|Errno 98", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_OF_A_RANK = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|CROSS_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|LOCKSTEP)_.*"
)


class EngineProcess:
    """One engine. Calls may come from several threads. Use as a context manager, or call `stop`."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        max_restarts: int = 2,
    ):
        """`command`: the arguments for a given port. `env`: the whole environment; None is `engine_env()`."""
        self.host = host
        self.port = 0
        """Where the engine was told to listen; another one after each start."""
        self.log_path = log_path
        self.max_restarts = max_restarts
        self.num_restarts = 0
        self._command = command
        self._env = dict(engine_env() if env is None else env)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._is_stopped = False
        self._log_start = 0
        self._pipe_end: int | None = None

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Base URL to reach the engine at from this host; loopback where the engine listens on every address."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Id of the process group (and of the sitter that leads it); None before the first start."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the engine on a free port. Returns at once; a command that cannot be run shows in `wait_healthy`."""
        if self.is_alive():
            raise EngineUnhealthy(f"the engine (process group {self.pid}) runs already; stop it before another start")
        self.port = free_port(self.host)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        watched, held = os.pipe()
        try:
            with self.log_path.open("ab") as log:
                self._log_start = log.tell()
                argv = [
                    sys.executable,
                    "-I",
                    sitter.__file__,
                    str(watched),
                    str(os.getpid()),
                    *self._command(self.port),
                ]
                process = subprocess.Popen(
                    argv,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[watched],
                    process_group=0,
                )
        except BaseException:
            os.close(held)
            raise
        finally:
            os.close(watched)
        ended = threading.Event()
        self._process, self._ended, self._pipe_end, self._is_stopped = process, ended, held, False
        threading.Thread(target=self._reap, args=(process, ended, held), name="engine-reaper", daemon=True).start()

    def wait_healthy(self, check: Callable[[], object], timeout_s: float) -> None:
        """Until `check` returns: it raises `EngineUnhealthy` while the engine is not ready, and must have a limit of its own.

        Raises `EngineDied` as soon as the process ends, `EngineUnhealthy` after `timeout_s`; what `check` raises
        otherwise (a refused token: `EngineRefused`) ends the wait at once.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._raise_if_dead("while it started")
            try:
                check()
                return
            except EngineRefused:
                raise
            except EngineUnhealthy as error:
                if time.monotonic() > deadline:
                    raise EngineUnhealthy(
                        f"the engine was not ready {timeout_s:g} s after its start ({error}); raise "
                        f"engine.start_timeout_s, or see {self.log_path}, which ends with:\n{self.last_words()}"
                    ) from error
            self._ended.wait(POLL_S)

    def start_healthy(self, check: Callable[[], object], timeout_s: float) -> None:
        """`start` and `wait_healthy`; once more on another port where somebody else took the first. Stops what fails."""
        for left in reversed(range(_PORT_TRIES)):
            self.start()
            try:
                self.wait_healthy(check, timeout_s)
                return
            except EngineDied as error:
                if not left or not _ADDRESS_IN_USE.search(str(error)):
                    raise
            except BaseException:
                self.stop()
                raise

    def restart(self, check: Callable[[], object], timeout_s: float) -> None:
        """Stop what is left and start again. Raises `EngineDied` once this was done `max_restarts` times."""
        if self.num_restarts >= self.max_restarts:
            raise EngineDied(
                f"the engine was restarted {self.num_restarts} times, the limit (engine.max_restarts), and "
                f"{self._how_it_is()}; its last words ({self.log_path}):\n{self.last_words()}"
            )
        self.num_restarts += 1
        self.stop()
        self.start_healthy(check, timeout_s)

    def is_alive(self) -> bool:
        return self._process is not None and not self._ended.is_set()

    def died(self, within_s: float = 0.0) -> EngineDied | None:
        """The error that tells how the engine ended, or None if it still runs `within_s` from now.

        The wait is for callers whose connection just broke: a process that dies closes its sockets before it can be reaped.
        """
        if self._process is None or not self._ended.wait(within_s):
            return None
        return EngineDied(f"the engine {self._how_it_is()}; its last words ({self.log_path}):\n{self.last_words()}")

    def last_words(self, num_lines: int = LAST_WORDS) -> str:
        """The last lines that the engine printed since its start, indented, without colours."""
        try:
            with self.log_path.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - _LOG_TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            text = ""
        lines = [line.rstrip() for line in _COLOUR.sub("", text).splitlines() if line.strip()]
        return "\n".join(f"  {line}" for line in lines[-num_lines:]) or "  (it printed nothing)"

    def stop(self, timeout_s: float = 10.0) -> None:
        """SIGTERM to the engine; whatever of its group is there `timeout_s` later is killed. Nothing to do where none runs."""
        process = self._process
        if process is None:
            return
        self._is_stopped = True
        self._signal(lambda: process.send_signal(signal.SIGTERM))
        if not self._ended.wait(timeout_s):
            self._signal(lambda: os.killpg(process.pid, signal.SIGKILL))
            if not self._ended.wait(_KILL_LIMIT_S):
                raise EngineUnhealthy(f"process group {process.pid} does not end {_KILL_LIMIT_S:g} s after SIGKILL")

    def _signal(self, send: Callable[[], None]) -> None:
        with self._lock:  # the reaper frees the id under this lock: it cannot be somebody else's by now
            if not self._ended.is_set():
                send()

    def _reap(self, process: subprocess.Popen[bytes], ended: threading.Event, held: int) -> None:
        """Thread: when the engine ends, end what it left running. Its id stays taken until the last line of the block."""
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(held)
            ended.set()

    def _raise_if_dead(self, when: str) -> None:
        if self._process is None:
            raise EngineDied("the engine was not started; call start first")
        if self._ended.is_set():
            raise EngineDied(
                f"the engine {self._how_it_is()} {when}; its last words ({self.log_path}):\n{self.last_words()}"
            )

    def _how_it_is(self) -> str:
        code = None if self._process is None else self._process.returncode
        if self.is_alive() or code is None:
            return "runs"
        if self._is_stopped:
            return "was stopped"
        if code == sitter.EXIT_CANNOT_START:
            return "could not be run (exit status 127)"
        return f"ended with exit status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def engine_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what makes it a rank (an engine has ranks of its own), and `extra`."""
    inherited = {name: value for name, value in os.environ.items() if not _OF_A_RANK.fullmatch(name)}
    return {**inherited, **(extra or {})}


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now. Somebody may take it before the engine does: `start_healthy` then tries another."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def is_loopback(host: str) -> bool:
    """Whether only this host can connect there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, token: str | None) -> None:
    """Raises `ConfigError` for an engine that others could reach, and command, without a token."""
    if not is_loopback(host) and not token:
        raise ConfigError(
            f"engine.host is {host!r}, which other machines can reach, and no token is set: whoever connects could "
            "replace the weights; name the environment variable that holds a token in engine.token_env, or use 127.0.0.1"
        )
