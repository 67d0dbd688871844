"""A loop that calls share: what is bound to it lives on, and whatever they raise, block or stop is told in time."""

import asyncio
import threading
import time

import pytest

from lockstep.data.time_limit import CallFailed, CallLoop, CallTimedOut, call_all


@pytest.fixture
def loop():
    made = CallLoop()
    yield made
    made.close()
    assert not any(thread.name == "lockstep-call-loop" for thread in threading.enumerate())


async def where() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_calls_share_one_loop_that_also_runs_between_them(loop):
    passed = threading.Event()

    async def begin():
        async def later():
            passed.set()

        return asyncio.get_running_loop(), asyncio.create_task(later()), asyncio.Lock()

    ((first, task, lock),) = call_all([begin], 5.0, loop=loop)
    assert passed.wait(5.0)

    async def go_on():
        async with lock:
            await task
        return asyncio.get_running_loop()

    assert call_all([go_on, where], 5.0, loop=loop) == [first, first]
    assert call_all([where], 5.0) != [first]
    assert call_all([lambda: 3], 5.0, loop=loop) == [3]


def test_a_closed_loop_ends_what_runs_in_it_and_starts_anew(loop):
    ended = threading.Event()

    async def begin():
        async def wait():
            try:
                await asyncio.sleep(1000)
            finally:
                ended.set()

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        return asyncio.get_running_loop(), task

    ((first, _task),) = call_all([begin], 5.0, loop=loop)
    loop.close()
    assert ended.is_set() and first.is_closed()
    (second,) = call_all([where], 5.0, loop=loop)
    assert second is not first


def test_who_fails_is_told_at_once_and_the_others_are_ended(loop):
    ended = []

    async def waits():
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(True)

    async def fails():
        await asyncio.sleep(0)
        raise KeyError("judge")

    (before,) = call_all([where], 5.0, loop=loop)
    with pytest.raises(CallFailed) as caught:
        call_all([waits, fails, waits], 50.0, loop=loop)
    assert caught.value.index == 1 and isinstance(caught.value.__cause__, KeyError)
    assert call_all([where], 5.0, loop=loop) == [before] and ended == [True, True]


def test_a_call_that_waits_too_long_is_ended_and_one_that_blocks_is_left_behind(loop):
    async def waits():
        await asyncio.sleep(1000)

    (before,) = call_all([where], 5.0, loop=loop)
    with pytest.raises(CallTimedOut) as caught:
        call_all([where, waits], 0.2, loop=loop)
    assert caught.value.index == 1
    assert call_all([where], 5.0, loop=loop) == [before]
    (left,) = [thread for thread in threading.enumerate() if thread.name == "lockstep-call-loop"]
    release = threading.Event()

    async def blocks():
        release.wait(30)

    began = time.monotonic()
    with pytest.raises(CallTimedOut):
        call_all([blocks], 0.2, loop=loop)
    (after,) = call_all([where], 5.0, loop=loop)
    assert after is not before and time.monotonic() - began < 10
    release.set()
    left.join(10)
    assert not left.is_alive()  # it has ended as soon as it could


class Odd(BaseException):
    pass


async def cancels():
    raise asyncio.CancelledError


async def stops():
    asyncio.get_running_loop().stop()
    await asyncio.sleep(1000)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # the thread of a loop that was stopped
@pytest.mark.parametrize("own", [True, False])
def test_what_is_no_exception_is_a_failure_too(loop, own):
    def raises(error):
        raise error

    async def raises_async(error):
        raise error

    shared = loop if own else None
    for error in (Odd(), GeneratorExit(), SystemExit(0), asyncio.CancelledError()):
        with pytest.raises(CallFailed) as caught:
            call_all([lambda: 1, lambda error=error: raises(error)], 5.0, loop=shared)
        assert caught.value.index == 1 and caught.value.__cause__ is error
    for error in (Odd(), SystemExit(0), asyncio.CancelledError()):
        with pytest.raises(CallFailed) as caught:
            call_all([where, lambda error=error: raises_async(error)], 5.0, loop=shared)
        assert caught.value.index == 1 and caught.value.__cause__ is error
    with pytest.raises(CallFailed):
        call_all([stops], 5.0, loop=shared)
    assert len(call_all([where], 5.0, loop=shared)) == 1
