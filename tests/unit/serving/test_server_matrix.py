"""Every server, on a real socket, against all that a server must refuse. One row is one server.

    server x {no token, wrong token, right token, oversized, compressed, not JSON, nested, wrong method,
              a path that leads out, a page of another origin, another name for this machine, too often, too slowly}

A new server joins `SERVERS` with one request that it answers.
"""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from polyturn.serving.auth import ServerRules
from polyturn.serving.listen import bind, http_config
from polyturn.serving.rate_limit import ClientRateLimit
from support.cases import each

TOKEN = "a-token-that-nobody-guesses"
RULES = ServerRules(token=TOKEN, max_body_bytes=20_000)


def rollout(rules: ServerRules) -> Any:
    from polyturn.serving import RolloutService
    from polyturn.serving.app import create_app
    from support.scripted_scheduler import ScriptedScheduler, plan_context, random_plan

    plan = random_plan(0)
    return create_app(
        RolloutService(plan_context(plan, scheduler=ScriptedScheduler(plan))), model=torch.nn.Linear(1, 1), rules=rules
    )


def sandbox(rules: ServerRules) -> Any:
    from polyturn.sandbox.python.limits import SandboxLimits
    from polyturn.serving.sandbox import SandboxService, create_app

    def start() -> Any:
        raise AssertionError("nothing here runs a program")

    service = SandboxService(start, limits=SandboxLimits(timeout_s=5.0), max_concurrent=2, max_waiting=2, warm=0)
    return create_app(service, rules=rules)


def viewer(rules: ServerRules) -> Any:
    from polyturn.viewer.app import create_app
    from polyturn.viewer.run_view import RunView

    return create_app([RunView(Path(tempfile.mkdtemp()))], rules=rules)


def search(rules: ServerRules) -> Any:
    from polyturn.retrieval.index import SearchIndex, build_index
    from polyturn.retrieval.passages import Passage
    from polyturn.retrieval.searcher import Searcher
    from polyturn.serving.search import create_app

    folder = Path(tempfile.mkdtemp()) / "index"
    build_index([Passage(id="Oslo", contents="Oslo\nOslo is a city.")], folder)
    return create_app(Searcher(SearchIndex.open(folder)), rules=rules)


def desk(rules: ServerRules) -> Any:
    from polyturn.interactions.person import HumanQueue
    from polyturn.viewer.app import create_app

    return create_app([], desk=HumanQueue(Path(tempfile.mkdtemp())), rules=rules)


def tools(rules: ServerRules) -> Any:
    from polyturn.serving.auth import guarded
    from polyturn.serving.mcp import ToolServer
    from polyturn.tools.function import tool
    from polyturn.tools.options import ToolOptions
    from polyturn.tools.toolbox import Toolbox

    @tool
    def shout() -> str:
        """Say something loudly."""
        return "A"

    server = ToolServer(Toolbox([shout], ToolOptions(timeout_s=60.0, max_result_chars=None)))
    app = server.http_app(idle_s=5.0, max_sessions=1000, max_body_bytes=rules.max_body_bytes)
    guarded(app, rules)
    return app


def endpoint(rules: ServerRules) -> Any:
    from polyturn.serving.openai.endpoint import EndpointOptions
    from polyturn.serving.openai.hosted_episodes import OpenAIService
    from polyturn.testing.episodes import scripted_context

    return OpenAIService(scripted_context(["four"]), EndpointOptions(rules=rules))


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One row of the table."""

    name: str
    make: Callable[[ServerRules], Any]
    ask: tuple[str, str, Any]
    """A request that is answered: method, path, body."""
    post: str | None
    """A path that reads a JSON body."""


HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}},
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}]}
SERVERS = (
    Server(name="rollout", make=rollout, ask=("GET", "/health/", None), post="/infer/"),
    Server(name="sandbox", make=sandbox, ask=("GET", "/v1/ping", None), post="/run_code"),
    Server(name="viewer", make=viewer, ask=("GET", "/api/runs", None), post="/api/runs/0/label"),
    Server(name="search", make=search, ask=("POST", "/retrieve", {"queries": ["Oslo"]}), post="/retrieve"),
    Server(name="desk", make=desk, ask=("GET", "/api/waiting", None), post="/api/answer"),
    Server(name="tools", make=tools, ask=("POST", "/mcp", HELLO), post="/mcp"),
    Server(name="endpoint", make=endpoint, ask=("POST", "/v1/chat/completions", CHAT), post="/v1/chat/completions"),
    Server(name="messages", make=endpoint, ask=("POST", "/v1/messages", {**CHAT, "max_tokens": 9}), post="/v1/messages"),
)


@contextmanager
def serving(server: Server, rules: ServerRules) -> Iterator[int]:
    """Serve in a thread; gives the port."""
    bound, made, ready = bind("127.0.0.1", 0), server.make(rules), threading.Event()
    stop: list[Callable[[], Any]] = []

    async def run() -> None:
        until, loop = asyncio.Event(), asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(until.set))
        if server.make is endpoint:
            ready.set()
            await made.serve(bound, until, grace_s=0.1)
            return
        running = uvicorn.Server(http_config(made, rules, lifespan="on", timeout_graceful_shutdown=0))
        task = asyncio.create_task(running.serve(sockets=[bound]))
        ready.set()
        await until.wait()
        running.should_exit = True
        await task

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield bound.getsockname()[1]
    finally:
        stop[0]()
        thread.join()


@pytest.fixture(scope="module", params=SERVERS, ids=lambda s: s.name)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Server, int]]:
    with serving(request.param, RULES) as port:
        yield request.param, port


def ask(
    port: int, method: str, path: str, body: Any = None, *, token: str | None = TOKEN, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    """Ask, and return the status, the body and the headers."""
    data = body if isinstance(body, bytes | Iterator) or body is None else json.dumps(body).encode()
    given = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    if token is not None:
        given["Authorization"] = f"Bearer {token}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=50)
    try:
        connection.request(method, path, data, given, encode_chunked=isinstance(data, Iterator))
        reply = connection.getresponse()
        return reply.status, reply.read(), {k.lower(): v for k, v in reply.getheaders()}
    finally:
        connection.close()


def has_sentence(body: bytes) -> bool:
    """Return whether an answer says what is wrong, and nothing of this machine."""
    said = json.loads(body)
    text = said["detail"] if "detail" in said else said["error"]["message"]
    return len(text) > 10 and "Traceback" not in text and TOKEN not in text and "site-packages" not in text


def test_right_token_is_answered_and_no_other(served: tuple[Server, int]):
    server, port = served
    assert ask(port, *server.ask)[0] == 200
    for token in (None, "", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper()):
        status, body, _ = ask(port, *server.ask, token=token)
        assert status == 401 and has_sentence(body), token
    assert ask(port, *server.ask, token=None, x_api_key=TOKEN)[0] == 200
    path = server.ask[1]
    assert ask(port, server.ask[0], f"{path}?token={TOKEN}", server.ask[2], token=None)[0] in (401, 303), "but a page's"


def test_oversized_body_is_refused(served: tuple[Server, int]):
    server, port = served
    path = server.post or server.ask[1]
    status, body, _ = ask(port, "POST", path, b"x" * 20_001)
    assert status == 413 and has_sentence(body)
    if server.post is not None:
        status, body, _ = ask(port, "POST", path, iter([b"x" * 5000] * 5), Transfer_Encoding="chunked")
        assert status == 413 and has_sentence(body)


def test_compressed_body_is_refused(served: tuple[Server, int]):
    server, port = served
    status, body, _ = ask(port, "POST", server.post or "/", gzip.compress(b" " * 1_000_000), Content_Encoding="gzip")
    assert status == 415 and has_sentence(body)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"null", b"[]", b"NaN", b"[" * 9000, b'{"a":' * 60 + b"[" * 60 + b"]" * 60 + b"}" * 60,
     b'{"messages": "\\ud800"}', b'{"model": "m", "messages": [{"role": "user", "content": "\\udfff"}]}', b'{"n": 1e999}'],
)  # fmt: skip
def test_body_that_is_no_json_object_is_refused(served: tuple[Server, int], body: bytes):
    server, port = served
    if server.post is None:
        pytest.skip("it reads no body")
    status, said, _ = ask(port, "POST", server.post, body)
    assert status in (400, 422) and has_sentence(said), (status, said)


def test_unknown_method_is_refused(served: tuple[Server, int]):
    server, port = served
    for method in ("DELETE", "PUT", "PATCH", "OPTIONS", "TRACE"):
        status, body, _ = ask(port, method, server.ask[1])
        ends_a_session = (server.name, method, status) == ("tools", "DELETE", 400)  # which there is not
        assert (status in (404, 405) or ends_a_session) and has_sentence(body), (method, status)


@pytest.mark.parametrize(
    "path",
    ["/../../../../etc/passwd", "/static/../../../../../../etc/passwd", "/static/..%2f..%2f..%2f..%2f..%2fetc%2fpasswd",
     "/static//etc/passwd", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/static/app.js%00.css",
     "/episodes/../../etc/passwd/v1",
     "/api/runs/../../../etc/passwd/config", "/api/runs/-1/config", "/api/runs/0/../../config", "/" + "a" * 5000, "/%ff%fe"],
)  # fmt: skip
def test_path_leads_nowhere_else(served: tuple[Server, int], path: str):
    _, port = served
    status, body, _ = ask(port, "GET", path)
    assert 400 <= status < 500 and b"root:" not in body, (status, body[:100])


def test_page_of_another_origin_is_refused(served: tuple[Server, int]):
    server, port = served
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}):
        status, body, reply = ask(port, *server.ask, **headers)
        assert status == 403 and has_sentence(body), headers
        assert "access-control-allow-origin" not in reply
    own = ask(port, *server.ask, Origin=f"http://127.0.0.1:{port}")[0]
    assert own == (200 if server.name in ("viewer", "desk") else 403)


def test_another_host_name_is_refused(served: tuple[Server, int]):
    server, port = served
    for host in ("evil.example", "evil.example:80", f"127.0.0.1.evil.example:{port}", "0.0.0.0", ""):
        status, body, _ = ask(port, *server.ask, Host=host)
        assert status in (400, 421) and (status == 400 or has_sentence(body)), host
    assert ask(port, *server.ask, Host=f"localhost:{port}")[0] == 200


def test_server_says_little_about_itself(served: tuple[Server, int]):
    server, port = served
    for path in ("/docs", "/openapi.json", "/redoc", "/.git/config", "/metrics"):
        assert ask(port, "GET", path)[0] == 404
    assert ask(port, *server.ask)[2].get("server", "").lower() not in ("uvicorn",)


def raw(port: int, head: bytes) -> bytes:
    """Send bytes, and return what came back until the connection was closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(head)
        found = b""
        while piece := connection.recv(65536):
            found += piece
        return found


@pytest.mark.parametrize("server", each(2, SERVERS), ids=lambda s: s.name)
def test_body_that_arrives_too_slowly_is_refused(server: Server):
    with serving(server, replace(RULES, body_s=0.1)) as port:
        head = f"POST {server.post} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        answer = raw(port, f"{head}Content-Length: 100\r\n\r\n{{".encode())
    assert b" 408 " in answer.split(b"\r\n")[0], answer


@pytest.mark.parametrize("server", each(2, SERVERS), ids=lambda s: s.name)
def test_client_that_asks_too_often_waits(server: Server):
    with serving(server, replace(RULES, rate=ClientRateLimit.parse("1/min:3"))) as port:
        replies = [ask(port, *server.ask) for _ in range(8)]
    assert replies[0][0] == 200
    status, body, headers = next(reply for reply in replies if reply[0] != 200)
    assert status == 429
    assert has_sentence(body)
    assert 1 <= int(headers["retry-after"]) <= 60
