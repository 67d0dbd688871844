"""A server that does what each test tells it to; the client must give the answer or a named error in time."""

import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.errors import EngineDied, EngineUnhealthy
from lockstep.rollout.http import EngineRefused, HttpClient

LIMIT_S = 15.0
Handler = http.server.BaseHTTPRequestHandler


class Server(http.server.ThreadingHTTPServer):
    """Answers with `act(handler)`; counts the requests; `gate` holds a late answer back until the test is over."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.act: Callable[[Handler], None] = lambda handler: answer(handler, 200, b"{}")
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.gate = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address) -> None:
        """Clients that give up are part of the tests."""


class _Forward(Handler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.command, self.path, dict(self.headers), body))
        self.server.act(self)

    do_POST = do_GET

    def log_message(self, format: str, *args) -> None:
        pass


def answer(handler: Handler, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def hang_up(handler: Handler) -> None:
    """The connection ends without an answer, as it does when a server dies."""
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.gate.set()
    made.shutdown()
    thread.join()
    made.server_close()


def test_json_text_token_and_prefix(server):
    client = HttpClient(server.url + "/prefix/", token="secret")
    server.act = lambda handler: answer(handler, 200, b'{"a": [1]}')
    assert client.post("/v1/x?mode=keep", {"prompt": [1, 2]}) == {"a": [1]}
    method, path, headers, body = server.seen[0]
    assert (method, path, json.loads(body)) == ("POST", "/prefix/v1/x?mode=keep", {"prompt": [1, 2]})
    assert headers["Authorization"] == "Bearer secret" and headers["Content-Type"] == "application/json"
    server.act = lambda handler: answer(handler, 200, b"Success: adapter added", kind="text/plain")
    assert client.post("/v1/load") == "Success: adapter added"
    server.act = lambda handler: answer(handler, 200, b"", kind="text/plain")
    assert client.get("/health") == ""
    client.close()


def test_refusals_name_path_status_and_first_words(server):
    client = HttpClient(server.url, token="secret")
    server.act = lambda handler: answer(handler, 403, b"dev mode\nis off " + b"x" * 4000, kind="text/plain")
    with pytest.raises(
        EngineRefused, match=r"POST .*/collective_rpc answered 403 after 0\.\d s: dev mode is off x+ \.\.\.$"
    ) as caught:
        client.post("/collective_rpc", {"method": "x"}, repeatable=True)
    assert caught.value.status == 403 and len(caught.value.body) > 4000
    assert len(str(caught.value)) < 500 and "secret" not in str(caught.value)
    assert len(server.seen) == 1, "a refusal is not asked again"


def test_a_500_is_not_asked_again(server):
    server.act = lambda handler: answer(handler, 500, b'{"error": "scheduler died"}')
    with pytest.raises(EngineUnhealthy, match=r"GET .*/x answered 500 .*scheduler died") as caught:
        HttpClient(server.url).get("/x")
    assert not isinstance(caught.value, EngineRefused) and len(server.seen) == 1


def test_redirects_are_refused_so_that_the_token_stays_here(server):
    server.act = lambda handler: answer(handler, 307, b"", Location=server.url + "/elsewhere")
    with pytest.raises(EngineRefused, match="answered 307"):
        HttpClient(server.url, token="secret").get("/x")
    assert len(server.seen) == 1


def test_a_late_answer_ends_in_time(server):
    server.act = lambda handler: server.gate.wait(LIMIT_S)
    started = time.monotonic()
    with pytest.raises(EngineUnhealthy, match=r"no complete answer after 0\.\d s, the limit is 0\.5 s"):
        HttpClient(server.url).post("/x", timeout_s=0.5, repeatable=True)
    assert time.monotonic() - started < 5 and len(server.seen) == 1


def test_an_answer_that_drips_ends_in_time(server):
    def drip(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(1000):
            if server.gate.wait(0.05):
                return
            handler.wfile.write(b"x")
            handler.wfile.flush()

    server.act = drip
    started = time.monotonic()
    with pytest.raises(EngineUnhealthy, match="no complete answer"):
        HttpClient(server.url).get("/x", timeout_s=0.5)
    assert time.monotonic() - started < 5


def test_an_answer_that_is_cut_off_is_an_error(server):
    def cut(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"a": 1}')
        hang_up(handler)

    server.act = cut
    with pytest.raises(EngineUnhealthy, match="connection failed"):
        HttpClient(server.url, retries=0).get("/x")


def test_what_is_not_json_is_an_error(server):
    server.act = lambda handler: answer(handler, 200, b"<html>proxy</html>")
    with pytest.raises(EngineUnhealthy, match="what is not JSON: <html>"):
        HttpClient(server.url).get("/x")


@pytest.mark.parametrize(
    ("call", "tries"),
    [
        (lambda client: client.get("/x"), 3),
        (lambda client: client.post("/x", {}, repeatable=True), 3),
        (lambda client: client.post("/x", {}), 1),
    ],
)
def test_only_what_may_be_repeated_is(server, call, tries):
    server.act = hang_up
    with pytest.raises(EngineUnhealthy, match="connection failed"):
        call(HttpClient(server.url, retries=2))
    assert len(server.seen) == tries


def test_the_second_try_counts(server):
    def flaky(handler: Handler) -> None:
        answer(handler, 200, b"[7]") if len(server.seen) > 1 else hang_up(handler)

    server.act = flaky
    assert HttpClient(server.url).get("/x") == [7]


def test_nobody_listens():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"  # bound, not listening: refuses
        started = time.monotonic()
        with pytest.raises(EngineUnhealthy, match="is the engine running there"):
            HttpClient(url).post("/x", {})
        assert time.monotonic() - started < 5


def test_a_dead_process_is_told_instead_of_its_connection(server):
    server.act = hang_up
    waits = []

    def died(within_s: float) -> EngineDied:
        waits.append(within_s)
        return EngineDied("killed by SIGSEGV; last words: ...")

    with pytest.raises(EngineDied, match="SIGSEGV"):
        HttpClient(server.url, died=died).get("/x")
    assert len(server.seen) == 1 and waits[0] > 0


def test_threads_share_one_client(server):
    barrier = threading.Barrier(8, timeout=LIMIT_S)

    def together(handler: Handler) -> None:
        barrier.wait()  # only if eight requests are here at once
        answer(handler, 200, json.dumps(handler.path).encode())

    server.act = together
    client = HttpClient(server.url)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(client.get, [f"/{i}" for i in range(8)])) == [f"/{i}" for i in range(8)]


def test_no_proxy_from_the_environment(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert HttpClient(server.url).get("/x") == {}


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_what_is_no_url(url):
    with pytest.raises(ValueError, match="looks like http"):
        HttpClient(url)
