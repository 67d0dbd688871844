"""SIGINT and SIGTERM in; a request to stop, which the training loop reads between two steps, out.

A stop is asked for, never forced: whoever trains finishes or drops its step, saves, and ends with exit code 0. What the
same signal says again within a moment is the same request (a terminal, a launcher and a scheduler may all send it); a
signal after that means "at once" and raises `KeyboardInterrupt`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_REQUEST_S = 1.0
"""Signals this close to the first are the same request."""


@dataclass(slots=True)
class _Request:
    signal: signal.Signals | None = None
    at: float = 0.0
    say: str = ""


_request = _Request()


def catch_stop_signals(*, say: str = "") -> None:
    """From now on the first SIGINT or SIGTERM only makes `stop_requested()` true; `say` is then written to stderr.

    Main thread only. Lets signals through that were held back since this process started (`held_back`).
    """
    _request.signal, _request.say = None, say
    for number in STOP_SIGNALS:
        signal.signal(number, _on_signal)
    release_signals()


def release_signals() -> None:
    """Let through what `held_back` in the parent kept from reaching this process before it was ready."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def stop_requested() -> str | None:
    """Name of the signal that asked this process to stop, or None. Ranks may differ: agree before acting on it."""
    return _request.signal.name if _request.signal is not None else None


@contextmanager
def held_back() -> Iterator[None]:
    """Processes started in the block have SIGINT and SIGTERM wait until they call `catch_stop_signals`.

    Without it a signal in the seconds in which a rank imports its libraries would end it half-started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _on_signal(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if _request.signal is None:
        _request.signal, _request.at = signal.Signals(number), now
        if _request.say:
            # os.write: the interrupted code may be in the middle of a print, and holds its lock then.
            os.write(sys.stderr.fileno(), f"\n{_request.signal.name}: {_request.say}\n".encode())
    elif now - _request.at > SAME_REQUEST_S:
        raise KeyboardInterrupt
