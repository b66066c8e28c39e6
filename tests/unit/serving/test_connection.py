"""One connection of a server: heads that are too long, too slow or ambiguous, and how answers are sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from polyturn.serving.auth import ServerRules, guarded
from polyturn.serving.body import while_wanted
from polyturn.serving.listen import MAX_HEAD_BYTES, bind, origin_of, serving

HOST = b"Host: localhost\r\n"


async def echo(request: Request) -> Response:
    names = [name for name in request.headers if name.startswith("x-")]
    return JSONResponse({"body": (await request.body()).decode(), "names": names})


async def count(request: Request) -> Response:
    async def numbers() -> AsyncIterator[bytes]:
        yield b"one"
        await request.app.state.go.wait()
        yield b"two"

    return StreamingResponse(numbers())


class Socket:
    def getsockname(self) -> tuple[Any, ...]:
        return ("::1", 8000, 0, 0)


@pytest.mark.parametrize(("host", "origin"), [(None, "http://[::1]:8000"), ("trainer", "http://trainer:8000")])
def test_origin_of_an_ipv6_address_has_brackets(host: str | None, origin: str):
    assert origin_of(Socket(), host=host) == origin


async def talk(*pieces: bytes, rules: ServerRules | None = None) -> bytes:
    """Send pieces one after the other, and return the answers until the server closes."""
    app, bound = Starlette(routes=[Route("/", echo, methods=["GET", "POST"])]), bind("127.0.0.1", 0)
    guarded(app, rules or ServerRules())
    async with serving(app, rules or ServerRules(), bound, log_level="critical"):
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        answer = asyncio.create_task(heard(reader))
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.01)
        try:
            return await asyncio.wait_for(answer, 30)
        finally:
            writer.close()


async def heard(reader: asyncio.StreamReader) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):  # it closes while more is sent
        while piece := await reader.read(1 << 16):
            found += piece
    return found


def post(*headers: bytes, body: bytes = b"") -> bytes:
    return b"POST / HTTP/1.1\r\n" + HOST + b"".join(h + b"\r\n" for h in (*headers, b"Connection: close")) + b"\r\n" + body


@pytest.mark.parametrize(
    "head",
    [
        post(b"Content-Length: 3", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
        post(b"Content-Length: 3", b"Content-Length: 4", body=b"abcd"),
        post(b"Content-Length: -3", body=b"abc"),
        post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
        post(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n"),
        post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
        post(b"X-A: b\0c"),
        post(b"X-A: b\r\n folded"),
        b"\x16\x03\x01 no HTTP",
    ],
)
async def test_ambiguous_head_is_refused(head: bytes):
    answer = await talk(head)
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "head", [post(b"Host: evil.example"), b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", b"GET /\r\n\r\n"]
)
async def test_request_without_one_host_is_refused(head: bytes):
    answer = await talk(head)
    assert answer.startswith(b"HTTP/1.1 421 ") and answer.count(b"HTTP/1.1") == 1, answer


PART = b"a" * (MAX_HEAD_BYTES // 3)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /" + PART, PART, PART, PART],
        [b"GET / HTTP/1.1\r\n" + HOST + b"X-A: ", PART, PART, PART, PART],
        [b"GET / HTTP/1.1\r\n" + HOST, *[b"X-%d: " % i + PART + b"\r\n" for i in range(4)], b"\r\n"],
        [post(b"Transfer-Encoding: chunked", body=b"0\r\n"), *[b"X-%d: " % i + PART + b"\r\n" for i in range(4)]],
        [post(b"Transfer-Encoding: chunked", body=b"3;" + PART), PART, PART, PART, PART],
    ],
    ids=["address", "header", "headers", "behind the body", "of a chunk"],
)
async def test_endless_head_is_refused(pieces: list[bytes]):
    answer = await talk(*pieces)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1, answer


async def test_connection_beyond_the_limit_is_told_to_come_again():
    app, bound = Starlette(routes=[Route("/", echo)]), bind("127.0.0.1", 0)
    async with serving(app, ServerRules(max_requests=2), bound, log_level="critical"):
        _, first = await asyncio.open_connection(*bound.getsockname())
        reader, second = await asyncio.open_connection(*bound.getsockname())
        second.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"HTTP/1.1 503 ")
        first.close()
        second.close()


async def test_headers_behind_a_body_are_dropped():
    body = b"3\r\nabc\r\n0\r\nX-Behind: 1\r\n\r\n"
    answer = await talk(post(b"Transfer-Encoding: chunked", b"X-Before: 1", body=body))
    assert answer.endswith(b'{"body":"abc","names":["x-before"]}')


async def test_pipelined_requests_are_answered_in_turn():
    one = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\n\r\n"
    answer = await talk(one + b"1" + one + b"2" + post(b"Content-Length: 1", body=b"3"))
    assert [answer.index(b'"body":"%d"' % n) for n in (1, 2, 3)] == sorted(
        answer.index(b'"body":"%d"' % n) for n in (1, 2, 3)
    )


async def test_upgrade_is_ignored_and_the_connection_closed():
    """Clients of HTTP/2 ask so, and use the connection again unless they are told that it ends."""
    answer = await talk(b"GET / HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK") and b"connection: close" in answer


async def test_stream_is_sent_as_it_comes():
    app, bound = Starlette(routes=[Route("/", count)]), bind("127.0.0.1", 0)
    app.state.go = asyncio.Event()
    async with serving(app, ServerRules(), bound):
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"one"), 30)
        app.state.go.set()
        assert b"two" in await asyncio.wait_for(reader.read(), 30)
        writer.close()


async def test_work_for_a_client_that_leaves_is_cancelled():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def ask(request: Request) -> Response:
        await while_wanted(request, work())
        raise AssertionError("nobody hears it")

    bound = bind("127.0.0.1", 0)
    app = Starlette(routes=[Route("/", ask)])
    guarded(app, ServerRules())
    async with serving(app, ServerRules(), bound):
        _, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        await asyncio.wait_for(begun.wait(), 30)
        writer.close()
        await asyncio.wait_for(ended.wait(), 30)


async def test_port_is_free_after_two_cancellations():
    bound, is_up = bind("127.0.0.1", 0), asyncio.Event()
    port = bound.getsockname()[1]

    async def hold() -> None:
        async with serving(Starlette(), ServerRules(), bound):
            is_up.set()
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await is_up.wait()
    for _ in range(2):
        holding.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({holding})
    with bind("127.0.0.1", port, is_only=True):
        assert holding.cancelled()
