"""Calls in, answers of another Python process on this host or network out: a `Control` over an authenticated connection.

The trainer opens a `Door` (a socket in a private folder, or a free port of one address) and the engine's process knocks
with the address and the key. Messages are JSON, never pickles: a peer can at worst answer nonsense. Both ends prove that
they have the key before anything else is read (`multiprocessing.connection`: HMAC challenges both ways).

Nothing is encrypted. On an address other than loopback, give a key of one's own and use a network that is trusted.
"""

from __future__ import annotations

import json
import logging
import multiprocessing as mp
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from lockstep.errors import EngineDied, EngineSilent, EngineUnhealthy, TransportError
from lockstep.transport.base import Inlet
from lockstep.transport.ends import ReceiverInlet
from lockstep.transport.hosts import check_secret, listen

log = logging.getLogger(__name__)

_GONE = (EOFError, OSError)
_LOOK_S = 0.2
"""How often a wait looks whether the other side is still alive."""

Address = str | tuple[str, int]
"""Path of a socket, or host and port."""


class ConnectionControl:
    """A `Control` over a connection whose other end runs `serve`. One call at a time, from any thread.

    `is_alive` (optional) says whether the other process lives; `last_words` what it said last, for the error.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        timeout_s: float,
        is_alive: Callable[[], bool] = lambda: True,
        last_words: Callable[[], str] = lambda: "",
    ):
        self._connection = connection
        self._timeout_s = timeout_s
        self._is_alive = is_alive
        self._last_words = last_words
        self._lock = threading.Lock()
        self._num_calls = 0

    def call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        """See `Control.call`. After a call that timed out the next ones work: its late answer is dropped."""
        limit_s = min(self._timeout_s, payload.get("limit_s", self._timeout_s))
        with self._lock:
            self._num_calls += 1
            message = {"id": self._num_calls, "method": method, "payload": payload}
            try:
                self._connection.send_bytes(json.dumps(message).encode())
                answer = self._answer(method, limit_s)
            except _GONE as error:
                raise EngineDied(
                    f"the engine's side closed the connection during {method} ({type(error).__name__}). {self._last_words()}"
                ) from error
        if "error" in answer:
            raise TransportError(f"the engine's side refused {method}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """The other end's `serve` returns."""
        self._connection.close()

    def _answer(self, method: str, limit_s: float) -> dict[str, Any]:
        ends = time.monotonic() + limit_s
        while True:
            left = ends - time.monotonic()
            if self._connection.poll(max(0.0, min(left, _LOOK_S))):
                answer = json.loads(self._connection.recv_bytes())
                if answer["id"] == self._num_calls:
                    return answer
                log.warning("an answer came after its call had timed out, and is dropped")
            elif not self._is_alive():
                raise EngineDied(f"the engine's process ended during {method}. {self._last_words()}")
            elif left <= 0:
                raise EngineSilent(
                    f"the engine's side did not answer {method} within {limit_s:g} s; it may be stalled or its host "
                    "overloaded: look at its log, or raise the time limit"
                )


def serve(inlet: Inlet, connection: Connection) -> None:
    """Answer calls until the other end closes; then end what it left open. Errors of the inlet go into the answers."""
    try:
        while True:
            message = json.loads(connection.recv_bytes())
            answer: dict[str, Any] = {"id": message["id"]}
            try:
                answer["result"] = inlet.handle(message["method"], message["payload"])
            except Exception as error:  # whatever it is, the caller is told, and decides
                answer["error"] = f"{type(error).__name__}: {error}"
            connection.send_bytes(json.dumps(answer).encode())
    except _GONE:
        log.info("the trainer's end closed the connection")
    finally:
        if isinstance(inlet, ReceiverInlet):
            inlet.close()
        connection.close()


class Door:
    """Where an engine's process connects. Close it, or use it in a `with`, once everybody is in."""

    def __init__(self, host: str | None = None, *, key: bytes | None = None):
        """`host` None: a socket in a private folder; a host: a free TCP port of that address.

        Raises `ValueError` for an address that is not loopback without a key of 16 bytes: who has it can be the engine.
        """
        if host is not None:
            check_secret(host, key)
        self.key = key or secrets.token_bytes(32)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if host is not None:
            self._socket = listen(host)
            return
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(Path(self._folder.name) / "door"))
        self._socket.listen()

    @property
    def address(self) -> Address:
        """For `knock`, in the engine's process."""
        name = self._socket.getsockname()
        return name if isinstance(name, str) else (name[0], name[1])

    def admit(self, timeout_s: float, is_alive: Callable[[], bool] = lambda: True) -> Connection:
        """The next connection that proves to have the key.

        Raises `EngineUnhealthy` where none does within `timeout_s`, `EngineDied` when `is_alive` says no first.
        """
        ends = time.monotonic() + timeout_s
        while True:
            self._socket.settimeout(max(0.001, min(_LOOK_S, ends - time.monotonic())))
            try:
                peer, _ = self._socket.accept()
            except TimeoutError as error:
                if not is_alive():
                    raise EngineDied(f"the engine's process ended before it connected to {self.address}") from error
                if time.monotonic() >= ends:
                    raise EngineUnhealthy(f"no engine connected to {self.address} within {timeout_s:g} s") from error
                continue
            connection = self._authenticate(peer, max(0.001, ends - time.monotonic()))
            if connection is not None:
                return connection

    def _authenticate(self, peer: socket.socket, limit_s: float) -> Connection | None:
        peer.settimeout(None)
        _limit_reads(peer, limit_s)
        connection = Connection(peer.detach())
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
        except (mp.AuthenticationError, BlockingIOError, EOFError, OSError) as error:
            log.warning("a connection to %s was refused: %s: %s", self.address, type(error).__name__, error)
            connection.close()
            return None
        with socket.socket(fileno=connection.fileno()) as again:
            _limit_reads(again, 0.0)
            again.detach()  # the connection's descriptor: not to be closed here
        return connection

    def close(self) -> None:
        self._socket.close()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def knock(address: Address, key: bytes) -> Connection:
    """The engine's end: connect to a `Door`. Raises what the operating system says where there is none."""
    return Client(address, authkey=key)


def _limit_reads(peer: socket.socket, seconds: float) -> None:
    """A read that waits longer fails; 0: no limit. Set on the socket, as `Connection` reads the descriptor itself."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
