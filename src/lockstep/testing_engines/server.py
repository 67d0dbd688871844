"""Routes with request schemas in; a server on loopback that refuses what they do not allow, and fails when told to, out.

Standard library's http.server in a thread, on a port of its own; every request is kept for the test to look at.
"""

from __future__ import annotations

import http.server
import json
import socket
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from lockstep.testing_engines.model import WAIT_LIMIT_S


class Body(BaseModel):
    """Base of request schemas: unknown fields and wrong types are refused, nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class Request:
    """One request that came, whether it was allowed or not."""

    method: str
    path: str
    query: Mapping[str, str]
    body: Any
    status: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a route says. A `str` goes out as plain text, anything else as JSON."""

    content: Any
    status: int = 200


@dataclass(frozen=True, slots=True)
class Route:
    """A method and path, the schema of its body (None: no body), and what it does: (body, query) -> Answer."""

    method: Literal["GET", "POST"]
    path: str
    schema: type[Body] | None
    act: Callable[[Any, Mapping[str, str]], Answer]
    is_open: bool = False
    """Answers without the token."""


@dataclass(slots=True)
class Faults:
    """What the server does to the next requests for a path, in the order given; a path with nothing left behaves."""

    waiting: dict[str, list[Callable[[_Handler], bool]]] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    """Late answers wait for it; closing the server sets it."""

    def error(self, path: str, status: int = 500, text: str = "internal error", *, after: bool = False) -> None:
        """Answer with this status, before or `after` doing what was asked."""
        self._add(path, lambda handler: handler.reply_error(status, text, act_first=after))

    def late(self, path: str, *, after: bool = False) -> None:
        """No answer until the server closes; what was asked is done at once if `after`, else never."""
        self._add(path, lambda handler: handler.reply_never(self.gate, act_first=after))

    def hang_up(self, path: str, *, after: bool = False) -> None:
        """Cut the connection before or `after` doing what was asked."""
        self._add(path, lambda handler: handler.reply_nothing(act_first=after))

    def call(self, path: str, hook: Callable[[], None]) -> None:
        """Run `hook` when the request comes, then answer as usual."""

        def run(handler: _Handler) -> bool:
            hook()
            return False

        self._add(path, run)

    def _add(self, path: str, fault: Callable[[_Handler], bool]) -> None:
        self.waiting.setdefault(path, []).append(fault)


class FakeServer:
    """A server on loopback; `port` 0 takes a free one. Use as a context manager."""

    def __init__(self, *, token: str | None = None, port: int = 0):
        self.token = token
        self.faults = Faults()
        self.requests: list[Request] = []
        """Every request in the order of its answer."""
        self.violations: list[str] = []
        """What was asked that the API does not have: unknown routes and fields, wrong types."""
        self.routes: dict[tuple[str, str], Route] = {}
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.fake = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and let every late answer go."""
        self.faults.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(WAIT_LIMIT_S)

    def add(self, *routes: Route) -> None:
        for route in routes:
            self.routes[route.method, route.path] = route

    def asked(self, path: str) -> list[Any]:
        """The bodies that came for a path and were answered with 200."""
        return [request.body for request in self.requests if request.path == path and request.status == 200]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    fake: FakeServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is part of the tests; what a route raises is answered with 500 before this."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._fake = self.server.fake  # pyright: ignore[reportAttributeAccessIssue]
        url = urllib.parse.urlsplit(self.path)
        self._raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._where = url.path
        self._query = dict(urllib.parse.parse_qsl(url.query))
        left = self._fake.faults.waiting.get(url.path)
        if left and left.pop(0)(self):
            return
        self._send(self._answer())

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet; the server keeps its requests itself."""

    def reply_error(self, status: int, text: str, *, act_first: bool) -> bool:
        if act_first:
            self._answer()
        self._send(Answer({"error": {"message": text}}, status))
        return True

    def reply_never(self, gate: threading.Event, *, act_first: bool) -> bool:
        if act_first:
            self._answer()
        gate.wait(WAIT_LIMIT_S)
        return self.reply_nothing(act_first=False)

    def reply_nothing(self, *, act_first: bool) -> bool:
        if act_first:
            self._answer()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
        return True

    def _answer(self) -> Answer:
        route = self._fake.routes.get((self.command, self._where))
        answer, body = self._judge(route)
        self._fake.requests.append(Request(self.command, self._where, self._query, body, answer.status))
        return answer

    def _judge(self, route: Route | None) -> tuple[Answer, Any]:
        token = None if route and route.is_open else self._fake.token
        if token and self.headers.get("Authorization") != f"Bearer {token}":
            return Answer({"error": "Unauthorized"}, 401), None
        if route is None:
            others = [method for method, path in self._fake.routes if path == self._where]
            self._fake.violations.append(f"{self.command} {self._where} is no route (methods: {others})")
            return Answer({"detail": "Method Not Allowed" if others else "Not Found"}, 405 if others else 404), None
        try:
            body = route.schema.model_validate_json(self._raw or b"{}") if route.schema else None
        except ValidationError as error:
            self._fake.violations.append(f"{self.command} {self._where}: {error}")
            return Answer({"detail": json.loads(error.json(include_url=False))}, 422), None
        try:
            return route.act(body, self._query), body
        except Exception as error:
            return Answer({"error": {"message": f"{type(error).__name__}: {error}"}}, 500), body

    def _send(self, answer: Answer) -> None:
        is_text = isinstance(answer.content, str)
        data = answer.content.encode() if is_text else json.dumps(answer.content).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
