"""Every server, on a real socket, against one request for each rule that it must keep. One row is one server.

A new server joins `SERVERS` with one request that it answers. The rules in full are in `test_server_rules.py`.
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
    post: str
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
    """Return whether an answer names the mistake, and tells nothing about this machine."""
    said = json.loads(body)
    text = said["detail"] if "detail" in said else said["error"]["message"]
    return len(text) > 10 and "Traceback" not in text and TOKEN not in text and "site-packages" not in text


Request = tuple[str, str, Any, dict[str, Any]]
"""Method, path, body, and the token and headers."""
BROKEN: tuple[tuple[str, Callable[[Server], Request], set[int]], ...] = (
    ("no token", lambda s: (*s.ask, {"token": None}), {401}),
    ("wrong token", lambda s: (*s.ask, {"token": TOKEN + "x"}), {401}),
    ("oversized body", lambda s: ("POST", s.post, b"x" * 20_001, {}), {413}),
    ("oversized pieces", lambda s: ("POST", s.post, iter([b"x" * 5000] * 5), {"Transfer_Encoding": "chunked"}), {413}),
    ("compressed body", lambda s: ("POST", s.post, gzip.compress(b" " * 9000), {"Content_Encoding": "gzip"}), {415}),
    ("no JSON", lambda s: ("POST", s.post, b"{", {}), {400, 422}),
    ("no object", lambda s: ("POST", s.post, b"[]", {}), {400, 422}),
    ("deep JSON", lambda s: ("POST", s.post, b"[" * 9000, {}), {400, 422}),
    ("lone surrogate", lambda s: ("POST", s.post, b'{"messages": "\\ud800"}', {}), {400, 422}),
    ("unknown method", lambda s: ("PATCH", s.ask[1], None, {}), {404, 405}),
    ("page of another origin", lambda s: (*s.ask, {"Origin": "http://evil.example"}), {403}),
    ("another host name", lambda s: (*s.ask, {"Host": "evil.example"}), {421}),
)


@pytest.mark.parametrize(("request_of", "statuses"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_request_against_a_rule_is_refused(
    served: tuple[Server, int], request_of: Callable[[Server], Request], statuses: set[int]
):
    server, port = served
    *request, options = request_of(server)
    status, body, headers = ask(port, *request, **options)
    assert status in statuses and has_sentence(body), (status, body)
    assert "access-control-allow-origin" not in headers


def test_request_that_keeps_the_rules_is_answered(served: tuple[Server, int]):
    server, port = served
    assert ask(port, *server.ask)[0] == 200
    assert ask(port, *server.ask, token=None, x_api_key=TOKEN)[0] == 200
    assert ask(port, *server.ask, Host=f"localhost:{port}")[0] == 200
    own = ask(port, *server.ask, Origin=f"http://127.0.0.1:{port}")[0]
    assert own == (200 if server.name in ("viewer", "desk") else 403)
    method, path, body = server.ask
    assert ask(port, method, f"{path}?token={TOKEN}", body, token=None)[0] in (401, 303), "but a page's"


def test_path_leads_nowhere_else(served: tuple[Server, int]):
    _, port = served
    for path in (
        "/../../../../etc/passwd", "/static/../../../../../../etc/passwd", "/static/..%2f..%2f..%2f..%2f..%2fetc%2fpasswd",
        "/static//etc/passwd", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/static/app.js%00.css",
        "/episodes/../../etc/passwd/v1", "/api/runs/../../../etc/passwd/config", "/api/runs/-1/config",
        "/api/runs/0/../../config", "/" + "a" * 5000, "/%ff%fe",
    ):  # fmt: skip
        status, body, _ = ask(port, "GET", path)
        assert 400 <= status < 500 and b"root:" not in body, (path, status, body[:100])


def test_server_says_little_about_itself(served: tuple[Server, int]):
    server, port = served
    for path in ("/docs", "/openapi.json", "/redoc", "/.git/config", "/metrics"):
        assert ask(port, "GET", path)[0] == 404
    assert ask(port, *server.ask)[2].get("server", "").lower() not in ("uvicorn",)


def raw(port: int, head: bytes) -> bytes:
    """Send bytes, and return the bytes that come back until the connection is closed."""
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
