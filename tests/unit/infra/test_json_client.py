"""The HTTP client bounds answers, follows no redirect, shows no secret, and tells unsent requests from lost ones."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from polyturn.core.secrets import bearer
from polyturn.infra.http import BrokenOffError, JsonClient, LargeAnswerError, NotReachedError
from polyturn.infra.process import free_port
from polyturn.infra.retries import retried
from support.services import serving


async def answer(request: web.Request) -> web.StreamResponse:
    match request.path:
        case "/large":
            return web.Response(text="x" * 5000)
        case "/away":
            raise web.HTTPFound("http://127.0.0.1:1/elsewhere")
        case "/busy":
            return web.Response(status=503, text=f"busy {request.headers['Authorization']}", headers={"Retry-After": "1e9"})
        case "/off":
            request.transport.close()
    return web.json_response({"asked": await request.json()})


@pytest.fixture
async def server():
    async with serving(answer) as url:
        yield url


async def test_client_reads_answers_and_bounds_them(server: str) -> None:
    client = JsonClient(headers=bearer("s3cret-token"), timeout_s=60)
    try:
        assert (await client.send("POST", f"{server}/", {"a": 1})).json() == {"asked": {"a": 1}}
        assert (await client.send("POST", f"{server}/", json.dumps([2]).encode())).json() == {"asked": [2]}
        assert (await client.send("GET", f"{server}/away")).status == 302
        busy = await client.send("GET", f"{server}/busy")
        assert (busy.status, busy.retry_after_s) == (503, 60.0)
        assert "s3cret-token" not in busy.excerpt()
        with pytest.raises(LargeAnswerError, match=r"HTTP 200: .* larger than 100 bytes"):
            await client.send("GET", f"{server}/large", max_bytes=100)
        with pytest.raises(BrokenOffError):
            await client.send("POST", f"{server}/off", {})
    finally:
        await client.close()


async def test_refused_connection_is_retried_where_asked() -> None:
    client, num_tries = JsonClient(timeout_s=60), 0

    async def ask() -> None:
        nonlocal num_tries
        num_tries += 1
        await client.send("GET", f"http://127.0.0.1:{free_port()}/")

    with pytest.raises(NotReachedError):
        await retried(ask, again=lambda problem: isinstance(problem, NotReachedError), tries=3, wait_s=0.001)
    assert num_tries == 3
    with pytest.raises(NotReachedError):
        await retried(ask, again=lambda problem: False, tries=3, wait_s=0.001)
    assert num_tries == 4
    await client.close()


async def test_wait_of_zero_seconds_is_a_retry() -> None:
    failures = [OSError("busy"), OSError("busy")]

    async def ask() -> str:
        if failures:
            raise failures.pop()
        return "answer"

    assert await retried(ask, again=lambda problem: 0.0, tries=3, wait_s=0.0) == "answer"
