"""Who generates and who overwrites weights, kept apart: the lock between `VllmEngine.generate` and an in-place update."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.errors import EngineUnhealthy, StaleWeights


class Gate:
    """Open: anybody may generate. Closed: an update is overwriting the weights."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._closed: str | None = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """For the time of one `generate`. Raises `StaleWeights` where the gate is closed."""
        with self._changed:
            if self._closed is not None:
                raise StaleWeights(self._closed)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    def wait_open(self, limit_s: float) -> None:
        """For one that is inside and whose requests were aborted. Raises `EngineUnhealthy` after `limit_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed is None, limit_s):
                raise EngineUnhealthy(
                    f"the update that aborted this request is still open after {limit_s:g} s: {self._closed}"
                )

    def close(self, why: str, *, drain_s: float | None) -> None:
        """Let nobody in any more; wait until nobody is inside, `drain_s` seconds at most, unless that is None.

        Raises `EngineUnhealthy`, with the gate open again, where they do not leave in time.
        """
        with self._changed:
            self._closed = why
            started = time.monotonic()
            if drain_s is not None and not self._changed.wait_for(lambda: self._num_inside == 0, drain_s):
                self._closed = None
                self._changed.notify_all()
                raise EngineUnhealthy(
                    f"{self._num_inside} calls of generate did not end in {time.monotonic() - started:.0f} s, so the weights "
                    "cannot be replaced; raise engine.request_timeout_s, or set engine.on_update to pause"
                )

    def open(self) -> None:
        with self._changed:
            self._closed = None
            self._changed.notify_all()
