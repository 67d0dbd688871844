"""What the two ends of every remote transport share: a `Receiver` that makes calls of a `Control`, an `Inlet` that undoes it.

*outlet*: the trainer's end. *inlet*: the engine's end. *update id*: names one attempt, so that what is left of an earlier one
(a late or repeated call) is never taken for the present one. A transport adds how bytes travel, nothing else.

Buckets travel one behind the other, each acknowledged once the engine's receiver has taken it. While one travels and is
taken, the next is packed: there are `NUM_SLOTS` buffers, and `receive` returns when the bucket is packed. An error of
bucket n is therefore raised by the call for n + 1, or by `commit`.
"""

from __future__ import annotations

import logging
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lockstep.errors import LockstepError, TransportError
from lockstep.transport.base import ABORT_S, Control, Receiver
from lockstep.transport.packet import manifest_from_json, manifest_to_json
from lockstep.types import Bucket, Manifest

log = logging.getLogger(__name__)

NUM_SLOTS = 2
SLOT_BYTES = 64 << 20
"""Default size of one buffer. A tensor that is larger makes both buffers of an update as large as itself."""


class Outlet(ABC):
    """The trainer's end: implements `Receiver`. One update at a time; use from one thread."""

    def __init__(self, control: Control):
        self.control = control
        self._update: str | None = None
        self._manifest: Manifest | None = None
        self._num_sent = 0
        self._in_flight: Future[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lockstep-outlet")

    def begin(self, manifest: Manifest) -> None:
        """See `Receiver.begin`. Raises `TransportError` while another update is open."""
        if self._update is not None:
            raise TransportError(
                f"version {manifest.version} cannot begin: another update is open; commit or abort that one first"
            )
        payload = {"update": uuid.uuid4().hex, "manifest": manifest_to_json(manifest)}
        self._update, self._manifest, self._num_sent = payload["update"], manifest, 0
        try:
            self._open(manifest, payload)
        except BaseException as error:
            self.abort(f"begin: {type(error).__name__}: {error}", raise_errors=False)
            raise

    def receive(self, bucket: Bucket) -> None:
        """See `Receiver.receive`. Returns when the bucket is copied; the sender may then change its own tensors."""
        if self._update is None:
            raise TransportError("a bucket came without a begin: no update is open; call begin with its manifest first")
        self._send(bucket)

    def commit(self, digest: str) -> None:
        """See `Receiver.commit`. A failed commit ends the update on both sides."""
        if self._update is None or self._manifest is None:
            raise TransportError("commit came without a begin: no update is open")
        version, num_tensors = self._manifest.version, len(self._manifest.specs)
        try:
            self._wait()
            answer = self.control.call(
                "commit",
                {"update": self._update, "num_packets": self._num_sent, "digest": digest, **self._seal(digest)},
            )
            expected = {"version": version, "digest": digest, "num_tensors": num_tensors}
            if {key: answer.get(key) for key in expected} != expected:
                raise TransportError(
                    f"the engine's side answered the commit with {answer}, not with {expected}: it does not say that it "
                    "serves this update; what answers there is not a lockstep inlet, or one of another version"
                )
        except BaseException as error:
            self.abort(f"commit: {type(error).__name__}: {error}", raise_errors=False)
            raise
        self._end(is_committed=True)

    def abort(self, reason: str, *, raise_errors: bool = True) -> None:
        """See `Receiver.abort`. Nothing to do where no update is open. This end lets go of its memory in any case.

        `raise_errors=False` is for where another error is already on its way: what the abort meets is then logged.
        """
        if self._update is None:
            return
        update = self._update
        try:
            self._drain()
            self.control.call("abort", {"update": update, "reason": reason, "limit_s": ABORT_S})
        except LockstepError as error:
            if raise_errors:
                raise
            log.warning("the engine's side could not be told of the abort (%s): %s", reason, error)
        finally:
            self._end(is_committed=False)

    def close(self) -> None:
        """End an open update and the thread. The control is the caller's."""
        self.abort("the trainer's end is closed", raise_errors=False)
        self._thread.shutdown(wait=True)

    @abstractmethod
    def _open(self, manifest: Manifest, payload: dict[str, Any]) -> None:
        """Prepare memory, then call "begin" with `payload` and what the transport adds to it."""

    @abstractmethod
    def _send(self, bucket: Bucket) -> None:
        """Pack the bucket and `_start` its call(s). Returns when nothing of the bucket is needed any more."""

    def _seal(self, digest: str) -> dict[str, Any]:
        """What the transport adds to the commit's payload."""
        return {}

    def _free(self, *, is_committed: bool) -> None:
        """Let go of the update's memory. Called once per update, however it ends; nothing is in flight."""
        return

    def _next_seq(self) -> int:
        """Number of the next packet of this update, from 0."""
        self._num_sent += 1
        return self._num_sent - 1

    def _start(self, work: Callable[[], None]) -> None:
        """Wait for the call in flight, raise its error, then begin this one."""
        self._wait()
        self._in_flight = self._thread.submit(work)

    def _wait(self) -> None:
        if self._in_flight is not None:
            flight, self._in_flight = self._in_flight, None
            flight.result()

    def _drain(self) -> None:
        """Wait for the call in flight. An update that is being aborted has an error already: this one's is only logged."""
        try:
            self._wait()
        except LockstepError as error:
            log.warning("the last bucket of an aborted update: %s", error)

    def _end(self, *, is_committed: bool) -> None:
        self._update = self._manifest = None
        self._free(is_committed=is_committed)


class ReceiverInlet(ABC):
    """The engine's end: implements `Inlet`. Refuses calls of any update but the open one.

    A begin while an update is open aborts that one first: its trainer is gone, or could not say that it gave up. `close`
    does the same; call it where the connection to the trainer ends.
    """

    def __init__(self, receiver: Receiver):
        self.receiver = receiver
        self._lock = threading.Lock()
        self._update: str | None = None
        self._manifest: Manifest | None = None
        self._seen: set[int] = set()
        self._num_tensors = 0

    def handle(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        """See `Inlet.handle`. One call at a time. An error of a packet or the commit leaves the update open until the abort."""
        with self._lock:
            return self._handle(method, payload)

    def _handle(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        if method == "begin":
            return self._begin(payload)
        if method == "abort":
            return self._abort(payload)
        if self._update is None or payload.get("update") != self._update:
            raise TransportError(
                f"{method} came for update {payload.get('update')!r}, but {self._update or 'none'} is open: it is late, "
                "or its begin was refused"
            )
        if method == "commit":
            return self._commit(payload)
        return self._other(method, payload)

    def close(self) -> None:
        """Abort what is open and let go of its memory."""
        if self._update is not None:
            self._give_up("the trainer's end is gone")

    def _begin(self, payload: dict[str, Any]) -> dict[str, Any]:
        manifest = manifest_from_json(payload["manifest"])
        if self._update is not None:
            self._give_up(f"version {manifest.version} begins")
        self.receiver.begin(manifest)
        self._update, self._manifest, self._seen, self._num_tensors = payload["update"], manifest, set(), 0
        try:
            return self._open(manifest, payload)
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")
            raise

    def _commit(self, payload: dict[str, Any]) -> dict[str, Any]:
        assert self._manifest is not None
        self._before_commit(payload)
        lost = sorted(set(range(payload["num_packets"])) - self._seen)
        if lost:
            raise TransportError(
                f"version {self._manifest.version}: {len(lost)} of {payload['num_packets']} packets were lost on the way, "
                f"first {lost[:3]}; send the update again"
            )
        self.receiver.commit(payload["digest"])
        answer = {"version": self._manifest.version, "digest": payload["digest"], "num_tensors": self._num_tensors}
        self._end(is_committed=True)
        return answer

    def _abort(self, payload: dict[str, Any]) -> dict[str, Any]:
        """An abort of an update that is not open has nothing to do: its begin was refused, or it was superseded."""
        if self._update is not None and payload["update"] == self._update:
            self._give_up(payload["reason"])
        return {}

    def _give_up(self, reason: str) -> None:
        try:
            self.receiver.abort(reason)
        finally:
            self._end(is_committed=False)

    def _end(self, *, is_committed: bool) -> None:
        self._update = self._manifest = None
        self._free(is_committed=is_committed)

    def _expect(self, seq: int) -> None:
        """Raises `TransportError` for a packet that has been delivered already."""
        if seq in self._seen:
            raise TransportError(
                f"packet {seq} came twice; a control must not repeat calls that the engine has answered"
            )

    def _deliver(self, seq: int, bucket: Bucket) -> None:
        """Hand a packet's tensors to the receiver, once. Order does not matter."""
        self._expect(seq)
        self.receiver.receive(bucket)
        self._seen.add(seq)
        self._num_tensors += len(bucket.tensors)

    @abstractmethod
    def _open(self, manifest: Manifest, payload: dict[str, Any]) -> dict[str, Any]:
        """Prepare for packets. What is returned is the answer to the begin."""

    def _other(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        """The transport's own methods, "receive" among them."""
        raise TransportError(f"{type(self).__name__} has no method {method!r}")

    def _before_commit(self, payload: dict[str, Any]) -> None:
        """What is left to do before completeness is checked."""
        return

    def _free(self, *, is_committed: bool) -> None:
        """Let go of the update's memory."""
        return
