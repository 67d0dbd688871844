"""Calls of code that is not ours in, their results out, or who failed or hung, within a time limit.

On the main thread, ordinary functions run in place under SIGALRM: it also interrupts what holds the interpreter's lock
(a regular expression that backtracks, 9**9**9), which no waiting thread could, and functions that set alarms of their
own (math-verify) work. Coroutines, and every call from another thread, run on a daemon thread that is left behind when
it hangs. Out of reach remain C code that never looks for signals, and a function that catches `BaseException`.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

_FAILURES = (Exception, SystemExit)
"""A call that asks to end the process has failed: the run must not end without a word, and perhaps with exit code 0."""


class CallFailed(Exception):
    """Call number `index` raised; its exception is the `__cause__`."""

    def __init__(self, index: int):
        super().__init__(index)
        self.index = index


class CallTimedOut(Exception):
    """Call number `index` had begun and not ended when the time was up."""

    def __init__(self, index: int):
        super().__init__(index)
        self.index = index


def call_all(calls: Sequence[Callable[[], Any]], timeout_s: float) -> list[Any]:
    """The results of all calls, in order: one after the other, but awaitable results are awaited all at the same time.

    Raises `CallFailed` for the first call that raises, and `CallTimedOut` when all together take longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    if threading.current_thread() is threading.main_thread():
        results = _call_under_alarm(calls, deadline)
    else:
        results = _on_daemon_thread(lambda watch: _call_each(calls, watch), deadline)
    if any(inspect.isawaitable(result) for result in results):
        return _on_daemon_thread(lambda watch: asyncio.run(_await_all(results, watch)), deadline)
    return results


class _TimeUp(BaseException):
    """Raised by the alarm. Not an `Exception`, so that a function's own `except Exception` does not swallow it."""


def _call_under_alarm(calls: Sequence[Callable[[], Any]], deadline: float) -> list[Any]:
    results = []
    for index, call in enumerate(calls):
        try:
            results.append(_alarmed(call, deadline))
        except _TimeUp:
            raise CallTimedOut(index) from None
        except _FAILURES as error:
            raise CallFailed(index) from error
    return results


def _alarmed(call: Callable[[], Any], deadline: float) -> Any:
    """The alarm is set for each call anew: a function that uses SIGALRM itself leaves it switched off.

    It may strike between any two instructions, hence the nesting: whatever it interrupts, the old state comes back.
    """
    is_done = False

    def on_alarm(signum: int, frame: Any) -> None:
        if not is_done:
            raise _TimeUp

    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise _TimeUp
    old_timer = signal.getitimer(signal.ITIMER_REAL)
    old_handler = signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, remaining_s, 1.0)  # again each second, in case something swallows it
        try:
            result = call()
        finally:
            is_done = True
        return result
    finally:
        signal.setitimer(signal.ITIMER_REAL, *old_timer)
        signal.signal(signal.SIGALRM, old_handler or signal.SIG_DFL)


class _Watch:
    """What the waiting thread sees of the working one: which calls run now, and how it all ended."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.outcome: queue.SimpleQueue[list[Any] | BaseException] = queue.SimpleQueue()

    def fail(self, index: int, error: BaseException) -> None:
        """Say so at once: to end the other coroutines may take long."""
        failed = CallFailed(index)
        failed.__cause__ = error
        self.outcome.put(failed)


def _on_daemon_thread(work: Callable[[_Watch], list[Any]], deadline: float) -> list[Any]:
    watch = _Watch()

    def run() -> None:
        try:
            watch.outcome.put(work(watch))
        except BaseException as error:  # handed to the waiting thread, which raises it
            watch.outcome.put(error)

    threading.Thread(target=run, daemon=True, name="lockstep-reward").start()
    try:
        outcome = watch.outcome.get(timeout=max(deadline - time.monotonic(), 0.0))
    except queue.Empty:
        raise CallTimedOut(min(list(watch.running), default=0)) from None
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _call_each(calls: Sequence[Callable[[], Any]], watch: _Watch) -> list[Any]:
    results = []
    for index, call in enumerate(calls):
        watch.running = {index}
        try:
            results.append(call())
        except _FAILURES as error:
            raise CallFailed(index) from error
    return results


async def _await_all(values: Sequence[Any], watch: _Watch) -> list[Any]:
    watch.running = set(range(len(values)))

    async def wait_for(index: int, value: Awaitable[Any] | Any) -> Any:
        try:
            return await value if inspect.isawaitable(value) else value
        except _FAILURES as error:
            watch.fail(index, error)
            raise CallFailed(index) from None  # a SystemExit would leave the loop with the other coroutines unfinished
        finally:
            watch.running.discard(index)

    return list(await asyncio.gather(*(wait_for(index, value) for index, value in enumerate(values))))
