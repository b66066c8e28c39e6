"""A request has one length, and a client of the server of tools holds no more than its share of the sessions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polyturn.serving.rules import RequestPolicy, ServerRules

pytest.importorskip("mcp")
from polyturn.serving.mcp import _Shares


def test_a_request_with_two_lengths_is_refused() -> None:
    gate = RequestPolicy(ServerRules())
    both = {"host": "127.0.0.1", "content-length": "5", "transfer-encoding": "chunked"}
    refused = gate.refusal("POST", "/", both, "127.0.0.1")
    assert refused is not None and refused.status == 400 and "one length" in refused.message
    for name in ("content-length", "transfer-encoding"):
        assert gate.refusal("POST", "/", {k: v for k, v in both.items() if k != name}, "127.0.0.1") is None


class Sessions:
    """Gives every request without a session a new one."""

    def __init__(self) -> None:
        self.num = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num += 1
        name = f"s{self.num}".encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"mcp-session-id", name)]})
        await send({"type": "http.response.body", "body": b""})


def ask(app: Any, client: str, *, method: str = "POST", session: str | None = None) -> tuple[int, str]:
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    headers = [] if session is None else [(b"mcp-session-id", session.encode())]
    asyncio.run(app({"type": "http", "method": method, "client": (client, 1), "headers": headers}, receive, send))
    return said[0]["status"], dict(said[0]["headers"]).get(b"mcp-session-id", b"").decode()


def test_a_client_that_has_its_share_waits_and_others_do_not() -> None:
    now = [0.0]
    app = _Shares(Sessions(), idle_s=60.0, max_of_one=2, clock=lambda: now[0])
    first = ask(app, "10.0.0.1")[1]
    assert ask(app, "10.0.0.1")[0] == 200
    assert ask(app, "10.0.0.1")[0] == 429
    assert ask(app, "10.0.0.2")[0] == 200
    assert ask(app, "10.0.0.1", session=first)[0] == 200  # a session that it has is answered
    assert ask(app, "10.0.0.1", method="DELETE", session=first)[0] == 200
    assert ask(app, "10.0.0.1")[0] == 200
    assert ask(app, "10.0.0.1")[0] == 429
    now[0] = 61.0  # all of them were silent, and are over
    assert ask(app, "10.0.0.1")[0] == 200
