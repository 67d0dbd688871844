"""A command in; runs it, ends as it ends, and takes it along when whoever started this process is gone.

Run by path with `python -I` (`lockstep.rollout.process` does), standard library only: it must start in milliseconds.
Why a process between: a trainer with threads can neither use `preexec_fn` safely nor `PR_SET_PDEATHSIG` (which fires
when the starting *thread* ends), and an engine of somebody else's code watches no pipe of ours. Two watches, since each
has a hole: the pipe stays open in a forked child of the trainer, and the parent's id alone is seen only once a second.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from types import FrameType

POLL_S = 1.0
EXIT_CANNOT_START = 127
_PR_SET_PDEATHSIG = 1


def main(handle: int, parent: int, command: list[str]) -> int:
    """Run `command` until it ends. `handle`: read end of a pipe that `parent` holds open; nothing is ever written."""
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not children:
            os._exit(128 + number)  # a child that is just being made dies with this process
        children[0].send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    try:
        children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_sitter))
    except OSError as error:
        print(f"{command[0]!r} cannot be started: {error}", file=sys.stderr, flush=True)
        return EXIT_CANNOT_START
    threading.Thread(target=_watch, args=(handle, parent), daemon=True).start()
    return _end_as(children[0].wait())


def _die_with_sitter() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(handle: int, parent: int) -> None:
    while os.getppid() == parent:
        if select.select([handle], [], [], POLL_S)[0]:
            break
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _end_as(code: int) -> int:
    """The child's exit code; a child that a signal ended is followed by the same signal, without a second core file."""
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
