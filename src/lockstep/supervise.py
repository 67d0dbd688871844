"""A command and a number of ranks in; the ranks run on this host, and their one exit code, out.

Why not torch.distributed.elastic's `elastic_launch` (torch 2.13): a signal to its agent always ends in `SignalException`,
also when every rank has saved and ended with 0; one `shutdown_timeout` (30 s) bounds both the step that a stopped rank
may finish and the time a broken run lingers; its ranks live in sessions of their own and outlive an agent that is
killed; it needs a TCP port; and it costs an `import torch` before the first rank starts. What is wanted is less:

- one signal to the launcher is one signal to each rank, held back until the rank is ready for it, with no time limit;
- a rank that dies ends the others within seconds; its own error is told, once;
- ranks meet in a `FileStore` in a temporary folder: no ports;
- rank 0 keeps the terminal; the other ranks' output goes to stderr;
- a launcher that is killed takes its ranks along (they watch a pipe that it holds).
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from lockstep.errors import LockstepError
from lockstep.failures import EXIT_FAILED, EXIT_INTERRUPTED, LAUNCH_DIR, Failure, collect, left_at_work, tell
from lockstep.signals import SAME_REQUEST_S, held_back

PARENT_FD = "LOCKSTEP_PARENT_FD"
GRACE_S = 3.0
"""How long the other ranks may go on once one has failed: long enough to report the same error, or where they stood."""
STOPPING = "finishing this step and saving; once more to stop at once"
_HINTS = {
    "SIGKILL": " (often the kernel, out of memory: see dmesg)",
    "SIGSEGV": " (a crash in native code)",
    "SIGABRT": " (native code gave up; see its output above)",
    "SIGBUS": " (often a full /dev/shm)",
}
_SHOW_CURSOR = "\x1b[?25h"  # a killed rank 0 cannot put back the cursor that its progress display hid


def supervise(command: Sequence[str], nproc: int, *, env: Mapping[str, str] | None = None) -> int:
    """Run `command` as ranks 0 .. nproc-1 and return the exit code: 0 only if every rank ended with 0.

    SIGINT and SIGTERM are passed on to the ranks; a second one kills them. Main thread only. Raises `LockstepError` if the
    ranks cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        ranks = _Ranks(Path(folder))
        previous = {number: signal.signal(number, ranks.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            ranks.start(command, nproc, dict(os.environ if env is None else env))
            return ranks.wait()
        finally:
            ranks.kill()
            ranks.close()
            for number, handler in previous.items():
                signal.signal(number, handler)


def watch_parent() -> None:
    """In a rank: die as soon as the launcher is gone. Does nothing in a process that lockstep's launcher did not start."""
    handle = os.environ.pop(PARENT_FD, None)
    if handle is not None:
        os.set_inheritable(int(handle), False)
        threading.Thread(target=_die_with_parent, args=(int(handle),), name="watch-parent", daemon=True).start()


def _die_with_parent(handle: int) -> None:
    os.read(handle, 1)  # nothing is ever written: this returns when the other end closes
    os.killpg(os.getpgrp(), signal.SIGKILL)


@dataclass(slots=True)
class _Ranks:
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ended: queue.SimpleQueue[tuple[int, int]] = field(default_factory=queue.SimpleQueue)
    """(rank, exit code), as they end."""
    codes: dict[int, int] = field(default_factory=dict)
    seen_at: dict[int, float] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    """Ranks that this launcher killed; how they ended says nothing."""
    stopped_by: signal.Signals | None = None
    stopped_at: float = 0.0
    pipe: tuple[int, int] = field(default_factory=os.pipe)
    """Ranks hold the first end; the second closes when this process ends, however it ends."""

    def start(self, command: Sequence[str], nproc: int, env: dict[str, str]) -> None:
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
        env |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), PARENT_FD: str(self.pipe[0])}
        env |= {"LOCKSTEP_STORE": str(self.folder / "store"), LAUNCH_DIR: str(self.folder)}
        with held_back():
            for rank in range(nproc):
                self._start_one(command, rank, env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})

    def _start_one(self, command: Sequence[str], rank: int, env: dict[str, str]) -> None:
        output = None if rank == 0 else sys.stderr.fileno()
        try:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output, pass_fds=[self.pipe[0]], process_group=0
            )
        except OSError as error:
            raise LockstepError(f"rank {rank} cannot be started ({command[0]}): {error}") from error
        self.processes.append(process)
        threading.Thread(target=lambda: self.ended.put((rank, process.wait())), daemon=True).start()

    def wait(self) -> int:
        """Until every rank has ended; what is left `GRACE_S` after the first failure is killed."""
        self._reap(limit_s=None)
        self._reap(limit_s=GRACE_S)
        self.kill()
        self._reap(limit_s=GRACE_S)
        return self._conclude()

    def _reap(self, *, limit_s: float | None) -> None:
        """Take in ranks that end: for `limit_s`, or until one fails. Returns at once when all have ended."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while len(self.codes) < len(self.processes):
            try:
                rank, code = self.ended.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            self.codes[rank], self.seen_at[rank] = code, time.monotonic()
            if code and deadline is None:
                return

    def kill(self) -> None:
        """End what still runs, and what ranks that have ended left running in their process groups."""
        for rank, process in enumerate(self.processes):
            if process.poll() is None:
                self.killed.add(rank)
            with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
                os.killpg(process.pid, signal.SIGKILL)
        if self.killed and sys.stdout.isatty():
            print(_SHOW_CURSOR, end="", flush=True)

    def close(self) -> None:
        for handle in self.pipe:
            os.close(handle)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.stopped_by is None:
            self.stopped_by, self.stopped_at = signal.Signals(number), now
            os.write(sys.stderr.fileno(), f"\n{self.stopped_by.name}: {STOPPING}\n".encode())
            for process in self.processes:
                process.send_signal(number)
        elif now - self.stopped_at > SAME_REQUEST_S:
            self.kill()

    def _conclude(self) -> int:
        """Say what went wrong, if anything did, and give the exit code."""
        failures = collect(self.folder)
        known = self.killed | {failure.rank for failure in failures}
        wrong = [rank for rank, code in self.codes.items() if code or left_at_work(self.folder, rank)]
        failures += [self._unexplained(rank) for rank in wrong if rank not in known]
        if self.stopped_by is not None and all(self._ended_by_stop(failure.rank) for failure in failures):
            return 128 + self.stopped_by if failures or self.killed else 0
        if not failures:
            return EXIT_FAILED if self.killed else 0
        return tell(failures).exit_code

    def _ended_by_stop(self, rank: int) -> bool:
        assert self.stopped_by is not None
        return self.codes.get(rank) in (-self.stopped_by, EXIT_INTERRUPTED)

    def _unexplained(self, rank: int) -> Failure:
        code = self.codes[rank]
        if code == 0:
            kind, message = (
                "exit",
                f"rank {rank} ended before its work was done: something in it, a reward perhaps, called os._exit",
            )
        elif code > 0:
            kind, message = "exit", f"rank {rank} ended with exit code {code} and gave no reason; see its output above"
        else:
            kind = signal.Signals(-code).name
            hint = _HINTS.get(kind, "")
            message = f"rank {rank} was killed by {kind}{hint}; --resume goes on from the last checkpoint"
        return Failure(rank, kind, message, "", True, EXIT_FAILED, self.seen_at[rank])
