"""Calls of code that is not ours in, their results out, or who failed or hung, within a time limit.

On the main thread, ordinary functions run in place under SIGALRM: it also interrupts what holds the interpreter's lock
(a regular expression that backtracks, 9**9**9), which no waiting thread could, and functions that set alarms of their
own (math-verify) work. Coroutines, and every call from another thread, run on a daemon thread that is left behind when
it hangs. Out of reach remain C code that never looks for signals, and a function that catches `BaseException`.

A call has failed whatever it raises, also what is no `Exception`: asked to end the process, it must not do so without a word
and perhaps with exit code 0, and a cancellation that nobody asked for is an error. Only `KeyboardInterrupt` is the user's.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

_PROBE_S = 1.0
"""How long a loop may take to answer that was given up waiting for; and, twice that, to end."""


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


class CallLoop:
    """An event loop on a thread of its own, from the first awaitable on: sessions, locks and tasks live from one `call_all` to
    the next. It also runs between them. A loop that something blocks is left behind, and another takes its place."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Event

    def run(self, work: Callable[[_Watch], Coroutine[Any, Any, list[Any]]], deadline: float) -> list[Any]:
        """Raises what the work raises, and `CallTimedOut`."""
        if self._thread is None or not self._thread.is_alive():
            self._start()
        watch = _Watch()
        future = asyncio.run_coroutine_threadsafe(_report(work, watch), self._loop)
        try:
            return watch.wait(deadline)
        except CallTimedOut:
            future.cancel()
            if not self._answers():
                self._leave()
            raise
        except CallFailed as failed:
            if isinstance(failed.__cause__, asyncio.CancelledError):  # the loop may be ending: nothing new may go there
                self.close()
            raise

    def close(self) -> None:
        """What still runs in it is cancelled. Not waited for any longer than a moment."""
        thread = self._leave()
        if thread is not None:
            thread.join(timeout=2 * _PROBE_S)

    def _start(self) -> None:
        started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()

        async def serve() -> None:
            ended = asyncio.Event()
            started.put((asyncio.get_running_loop(), ended))
            await ended.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True, name="lockstep-call-loop")
        self._thread.start()
        self._loop, self._ended = started.get()

    def _leave(self) -> threading.Thread | None:
        """It is to end as soon as it can."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._ended.set)
        return thread

    def _answers(self) -> bool:
        if self._thread is None or not self._thread.is_alive():
            return False
        answer = threading.Event()
        self._loop.call_soon_threadsafe(answer.set)
        return answer.wait(_PROBE_S)


def call_all(calls: Sequence[Callable[[], Any]], timeout_s: float, *, loop: CallLoop | None = None) -> list[Any]:
    """The results of all calls, in order: one after the other, but awaitable results are awaited all at the same time, in
    `loop` or in one that ends with them.

    Raises `CallFailed` for the first call that raises, and `CallTimedOut` when all together take longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    if threading.current_thread() is threading.main_thread():
        results = _call_under_alarm(calls, deadline)
    else:
        results = _on_daemon_thread(lambda watch: _call_each(calls, watch), deadline)
    if any(inspect.isawaitable(result) for result in results):
        if loop is not None:
            return loop.run(lambda watch: _await_all(results, watch), deadline)
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
        except KeyboardInterrupt:
            raise
        except BaseException as error:
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

    def wait(self, deadline: float) -> list[Any]:
        """How it ended. Raises that, and `CallTimedOut` where it has not by then."""
        try:
            outcome = self.outcome.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            raise CallTimedOut(min(list(self.running), default=0)) from None
        if isinstance(outcome, CallFailed):
            raise outcome
        if isinstance(outcome, BaseException):  # the loop's own: a call has stopped it, or a task in it
            raise CallFailed(min(list(self.running), default=0)) from outcome
        return outcome


def _on_daemon_thread(work: Callable[[_Watch], list[Any]], deadline: float) -> list[Any]:
    watch = _Watch()

    def run() -> None:
        try:
            watch.outcome.put(work(watch))
        except BaseException as error:  # handed to the waiting thread, which raises it
            watch.outcome.put(error)

    threading.Thread(target=run, daemon=True, name="lockstep-reward").start()
    return watch.wait(deadline)


async def _report(work: Callable[[_Watch], Coroutine[Any, Any, list[Any]]], watch: _Watch) -> None:
    try:
        watch.outcome.put(await work(watch))
    except BaseException as error:  # handed to the waiting thread, which raises it
        watch.outcome.put(error)


def _call_each(calls: Sequence[Callable[[], Any]], watch: _Watch) -> list[Any]:
    results = []
    for index, call in enumerate(calls):
        watch.running = {index}
        try:
            results.append(call())
        except BaseException as error:
            raise CallFailed(index) from error
    return results


async def _await_all(values: Sequence[Any], watch: _Watch) -> list[Any]:
    watch.running = set(range(len(values)))

    async def wait_for(index: int, value: Awaitable[Any] | Any) -> Any:
        try:
            return await value if inspect.isawaitable(value) else value
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, GeneratorExit) or (task is not None and task.cancelling()):
                raise  # it is being ended: another one has failed, or the time is up
            watch.fail(index, error)
            raise CallFailed(index) from None  # a SystemExit would leave the loop with the other coroutines unfinished
        finally:
            watch.running.discard(index)

    tasks = [asyncio.ensure_future(wait_for(index, value)) for index, value in enumerate(values)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
