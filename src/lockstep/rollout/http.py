"""A path and JSON in, JSON out, over a pool of connections that threads share; every failure is a named error in time.

urllib3 (which `requests`, and so `datasets`, brings along) rather than `requests`: its pools are documented as safe for
threads, and it takes no proxy from the environment, which would send loopback traffic elsewhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError
from urllib3.exceptions import TimeoutError as HTTPTimeout
from urllib3.response import BaseHTTPResponse
from urllib3.util import Timeout, parse_url

from lockstep.errors import EngineDied, EngineSilent, EngineUnhealthy

_CHUNK_BYTES = 1 << 16
_BODY_WORDS = 300
_PAUSE_S = 0.1
_DYING_S = 2.0
"""How long a process whose connection broke may take to be seen dead; a broken connection to a live one costs that much."""
_REFUSED_S = 0.1
"""The same where nobody listened: mostly an engine that is still starting."""


class EngineRefused(EngineUnhealthy):
    """The engine answered with a status below 500 that is not 2xx: what was asked is wrong, asking again is no use."""

    def __init__(self, message: str, *, status: int, body: str):
        super().__init__(message)
        self.status = status
        self.body = body


class HttpClient:
    """A client of one server. `died` tells whether the server's process is gone: (wait in seconds) -> its error or None."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 2,
        max_connections: int = 64,
        died: Callable[[float], EngineDied | None] | None = None,
    ):
        """`timeout_s`: limit of a whole call, first byte to last. `retries`: further tries of calls that may be repeated."""
        url = parse_url(base_url)
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"an engine's URL looks like http://127.0.0.1:8000; {base_url!r} came")
        self.base_url = base_url.rstrip("/")
        self.token = token
        self._prefix = (url.path or "").rstrip("/")
        self._headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._timeout_s = timeout_s
        self._retries = retries
        self._died = died
        self._pool = urllib3.connection_from_url(base_url, maxsize=max_connections, block=False, retries=False)

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """See `request`; a GET may be repeated."""
        return self.request("GET", path, timeout_s=timeout_s, repeatable=True)

    def post(self, path: str, body: Any = None, *, timeout_s: float | None = None, repeatable: bool = False) -> Any:
        """See `request`. `repeatable`: doing it twice is the same as doing it once."""
        return self.request("POST", path, body, timeout_s=timeout_s, repeatable=repeatable)

    def request(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None, repeatable: bool = False
    ) -> Any:
        """The answer: its JSON, or its text where the server does not call it JSON. Tries share one limit of `timeout_s`.

        Raises `EngineRefused` for a status below 500 but not 2xx, `EngineDied` if the process is gone, `EngineSilent` where no
        answer comes in time, and `EngineUnhealthy` for a status of 500 and more, a broken connection, or a body that is not JSON.
        A call is made again only if it never reached the server, or if it is `repeatable` and the connection broke.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        for left in reversed(range(self._retries + 1)):
            try:
                return self._once(method, path, body, started=started, limit_s=limit_s)
            except (HTTPError, OSError) as error:
                never_came = isinstance(error, NewConnectionError)  # which urllib3 counts among the timeouts
                if isinstance(error, HTTPTimeout) and not never_came:
                    raise self._late(method, path, started, limit_s) from error
                self._raise_if_dead(error, _REFUSED_S if never_came else _DYING_S)
                is_safe = repeatable or never_came
                if not left or not is_safe or time.monotonic() - started + _PAUSE_S > limit_s:
                    raise EngineUnhealthy(
                        f"{method} {self.base_url}{path}: the connection failed ({type(error).__name__}: {error}) after "
                        f"{time.monotonic() - started:.1f} s; is the engine running there?"
                    ) from error
                time.sleep(_PAUSE_S)
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        """Close the pool's idle connections."""
        self._pool.close()

    def _once(self, method: str, path: str, body: Any, *, started: float, limit_s: float) -> Any:
        left_s = limit_s - (time.monotonic() - started)
        if left_s <= 0:
            raise self._late(method, path, started, limit_s)
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({} if data is None else {"Content-Type": "application/json"})
        response = self._pool.urlopen(
            method,
            self._prefix + path,
            body=data,
            headers=headers,
            timeout=Timeout(connect=left_s, read=left_s),
            preload_content=False,
            redirect=False,
            retries=False,
        )
        try:
            text = self._read(response, method, path, started=started, limit_s=limit_s)
        except BaseException:
            response.close()  # a half-read connection must not go back to the pool
            raise
        response.release_conn()
        return self._judge(response, text, method, path, started)

    def _read(self, response: BaseHTTPResponse, method: str, path: str, *, started: float, limit_s: float) -> bytes:
        """The whole body. The socket's limit is for each read; a server that sends a byte now and then is late as well."""
        chunks: list[bytes] = []
        while chunk := response.read1(_CHUNK_BYTES):
            chunks.append(chunk)
            if time.monotonic() - started > limit_s:
                raise self._late(method, path, started, limit_s)
        return b"".join(chunks)

    def _judge(self, response: BaseHTTPResponse, data: bytes, method: str, path: str, started: float) -> Any:
        text = data.decode(errors="replace")
        status = response.status
        if not 200 <= status < 300:
            message = (
                f"{method} {self.base_url}{path} answered {status} after {time.monotonic() - started:.1f} s: "
                f"{_first_words(text)}"
            )
            if status < 500:
                raise EngineRefused(message, status=status, body=text)
            raise EngineUnhealthy(message)
        if "json" not in response.headers.get("Content-Type", ""):
            return text
        try:
            return json.loads(text)
        except ValueError as error:
            raise EngineUnhealthy(
                f"{method} {self.base_url}{path} answered {status} with what is not JSON: {_first_words(text)}"
            ) from error

    def _late(self, method: str, path: str, started: float, limit_s: float) -> EngineSilent:
        return EngineSilent(
            f"{method} {self.base_url}{path}: no complete answer after {time.monotonic() - started:.1f} s, the limit is "
            f"{limit_s:g} s; the engine hangs, or the limit (engine.request_timeout_s) is too low for this call"
        )

    def _raise_if_dead(self, error: Exception, within_s: float) -> None:
        death = None if self._died is None else self._died(within_s)
        if death is not None:
            raise death from error


def _first_words(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _BODY_WORDS else words[:_BODY_WORDS] + " ..."
