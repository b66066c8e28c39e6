"""OpenEnv servers: valid messages are played; any other fails one episode by name and never hangs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polyturn.core.errors import ConfigError, SchedulerError
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import Trajectory
from polyturn.environments import find_adapter
from polyturn.environments.openenv import MAX_MESSAGE_BYTES, OpenEnv
from polyturn.environments.openenv_codec import MAX_VALUES, OpenEnvCodec
from polyturn.environments.scheduler import EnvScheduler, Stage
from polyturn.infra.aio import PerLoop
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context
from support.refusals import refuses, refuses_later

TEXT, CLOSE, PING, PONG = 0x1, 0x8, 0x9, 0xA
MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
SCHEMA = json.dumps({"action": {"properties": {"say": {"type": "string"}}}}).encode()

GENERATES = PerLoop(asyncio.Event)
"""Set while the model may say something."""

Serve = Callable[["Socket"], Awaitable[object]]


def frame(opcode: int, payload: bytes = b"", *, is_last: bool = True, is_packed: bool = False) -> bytes:
    size = len(payload)
    kind, width = (size, 0) if size < 126 else (126, 2) if size < 1 << 16 else (127, 8)
    return bytes([is_last << 7 | is_packed << 6 | opcode, kind]) + (size.to_bytes(width, "big") if width else b"") + payload


def says(observation: str, *, done: bool = False) -> bytes:
    data = {"observation": {"text": observation}, "reward": 1.0, "done": done}
    return json.dumps({"type": "observation", "data": data}).encode()


STATE = frame(TEXT, b'{"type": "state", "data": {}}')


class Socket:
    """The server's end of a connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def asked(self) -> None:
        """Receive a request and the one that always follows."""
        await self.hear()
        assert json.loads(await self.hear()) == {"type": "state"}

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hear(self, opcode: int = TEXT) -> bytes:
        """Return the next short message of this kind; others are passed over."""
        while True:
            head = await self.reader.readexactly(2)
            size = head[1] & 0x7F
            size = int.from_bytes(await self.reader.readexactly(2), "big") if size == 126 else size
            mask = await self.reader.readexactly(4)
            body = bytes(b ^ mask[i % 4] for i, b in enumerate(await self.reader.readexactly(size)))
            if head[0] & 0xF == opcode:
                return body


async def as_agreed(socket: Socket) -> None:
    await socket.asked()
    await socket.send(frame(TEXT, says("begin")) + STATE)
    await socket.asked()
    await socket.send(frame(TEXT, says("end", done=True)) + STATE)


async def answers_late(socket: Socket) -> None:
    """Answers the reset twice, the second time after the episode's end."""
    await socket.asked()
    await socket.send(frame(TEXT, says("begin")) + STATE)
    await socket.asked()
    await socket.send(frame(TEXT, says("end", done=True)))
    await asyncio.sleep(0.05)
    await socket.send(frame(TEXT, says("go on")) + STATE)


async def is_full(socket: Socket) -> None:
    """Refuses the connection, as a server without room does."""
    found = {"message": "Server at capacity: 1/1 sessions active", "code": "CAPACITY_REACHED", "max_sessions": 1}
    await socket.send(frame(TEXT, json.dumps({"type": "error", "data": found}).encode()) + frame(CLOSE, b""))


async def hangs_up_at_the_end(socket: Socket) -> None:
    await socket.asked()
    await socket.send(frame(TEXT, says("begin")) + STATE)
    await socket.asked()
    await socket.send(frame(TEXT, says("end", done=True)) + frame(CLOSE, b""))


async def speaks_without_end(socket: Socket) -> None:
    await socket.hear()
    await socket.send(frame(TEXT, says("x" * MAX_MESSAGE_BYTES)))


async def lists_without_end(socket: Socket) -> None:
    await socket.hear()
    await socket.send(frame(TEXT, b"[" + b"[]," * MAX_VALUES + b"[]]"))


async def floods(socket: Socket) -> None:
    await socket.hear()
    while True:
        await socket.send(frame(TEXT, says("begin")))


async def in_pieces(socket: Socket) -> None:
    """Sends a message in pieces, and a ping between them."""
    whole = says("begin")
    await socket.asked()
    await socket.send(frame(TEXT, whole[:9], is_last=False) + frame(PING, b"?") + frame(0, whole[9:20], is_last=False))
    await socket.send(frame(0, whole[20:]) + STATE)
    await socket.asked()
    await socket.send(frame(TEXT, says("end", done=True)) + STATE)


async def drips(socket: Socket) -> None:
    await socket.hear()
    await socket.send(frame(TEXT, b"", is_last=False))
    while True:
        await socket.send(frame(0, b" ", is_last=False))
        await asyncio.sleep(0.01)


async def needs_pongs(socket: Socket) -> None:
    """Waits for the answer to its ping while the model generates; real servers hang up without one."""
    GENERATES().clear()
    await socket.asked()
    await socket.send(frame(TEXT, says("begin")) + STATE + frame(PING, b"?"))
    assert await socket.hear(PONG) == b"?"
    GENERATES().set()
    await socket.asked()
    await socket.send(frame(TEXT, says("end", done=True)) + STATE)


async def play(
    serve: Serve,
    *,
    schema: bytes = SCHEMA,
    headers: str = "",
    is_slow: bool = False,
    timeout_s: float = 50.0,
) -> Trajectory:
    """Play an episode of two turns with a server that runs `serve` once it is connected."""
    GENERATES().set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /schema"):
                size = len(schema) + is_slow
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n{headers}\r\n".encode() + schema)
                await asyncio.sleep(3600 if is_slow else 0)
            else:
                key = next(
                    line.split(b": ")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key")
                )
                accept = base64.b64encode(hashlib.sha1(key + MAGIC).digest()).decode()
                writer.write(
                    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                    f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
                )
                await serve(Socket(reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    adapter: Any = find_adapter(f"openenv:http://127.0.0.1:{port}", {"timeout_s": timeout_s})
    assert isinstance(adapter, OpenEnv)
    context = scripted_context(
        ["a", "b"],
        scheduler=EnvScheduler({adapter.name: Stage(adapter=adapter)}),
        limits=Limits(max_context=1 << 16),
    )
    generate = context.engine.generate

    async def generate_then(request: GenerateRequest) -> Completion:
        await GENERATES().wait()
        return await generate(request)

    context.engine.generate = generate_then  # type: ignore[method-assign]
    try:
        return await run_episode(context, adapter.tasks(split="train", seeds=range(1))[0], id="e")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("serve", "options"),
    [
        (as_agreed, {}),
        (in_pieces, {}),
        (as_agreed, {"schema": gzip.compress(SCHEMA), "headers": "Content-Encoding: gzip\r\n"}),
        (needs_pongs, {}),
        (hangs_up_at_the_end, {}),
    ],
    ids=["as agreed", "in pieces", "packed", "pongs while the model generates", "hangs up at the end"],
)
async def test_episode_is_played_as_the_protocol_allows(serve: Serve, options: dict[str, Any]):
    found = await play(serve, **options)
    assert found.error is None
    assert found.stop_reason is StopReason.ENV_DONE
    assert found.reward is not None
    assert found.reward.total == 1.0


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        (answers_late, "sent an extra message"),
        pytest.param(floods, "sent an extra message", marks=pytest.mark.slow),
        (is_full, "set env.kwargs.sessions"),
        (speaks_without_end, "closed the connection at a reset"),
        (lists_without_end, "answered a reset with "),
        (drips, ""),
    ],
)
async def test_breach_of_the_protocol_fails_the_episode(serve: Serve, message: str):
    found = await play(serve, timeout_s=1.0 if serve is drips else 50.0)
    assert found.error is not None
    assert message in found.error
    assert "\n" not in found.error


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (gzip.compress(bytes(1 << 27)), {"headers": "Content-Encoding: gzip\r\n"}, "the answer is larger than"),
        (gzip.compress(SCHEMA)[:24], {"headers": "Content-Encoding: gzip\r\n"}, "cannot be reached"),
        (SCHEMA, {"is_slow": True, "timeout_s": 1.0}, "cannot be reached (TimeoutError)"),
        (b"[" * 100_000, {}, "cannot be reached"),
        (b"[1]", {}, "the environment 'openenv:http"),
        (b'{"action": [1]}', {}, "the environment 'openenv:http"),
        (b'{"action": {"properties": {"message": "string"}}}', {}, "the environment 'openenv:http"),
    ],
    ids=["bomb", "half", "never ends", "nested", "list", "action is a list", "property is a text"],
)
async def test_unreadable_schema_fails_the_episode(schema: bytes, options: dict[str, Any], message: str):
    found = await play(as_agreed, schema=schema, **options)
    assert found.error is not None
    assert message in found.error
    assert "\n" not in found.error


@contextlib.asynccontextmanager
async def answering(*answers: str) -> AsyncIterator[str]:
    """Serve an environment that answers these, one after the other, and give its address."""

    async def schema(request: web.Request) -> web.Response:
        return web.json_response({})

    async def talk(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for answer in answers:
            await socket.receive()
            await socket.send_str(answer)
            await socket.receive()
            await socket.send_str('{"type": "state", "data": {}}')
        await socket.receive()
        return socket

    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPFound(request.path.removeprefix("/away"))

    app = web.Application()
    app.add_routes([web.get("/schema", schema), web.get("/ws", talk), web.get("/away/{_:.*}", elsewhere)])
    async with TestServer(app) as server:
        yield str(server.make_url(""))


@pytest.mark.parametrize(
    "answer",
    [
        "3",
        "[" * 20_000,
        '{"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": ["bad"]}}',
        '{"type": "observation", "data": [1]}',
        '{"type": "state", "data": {"observation": "Go."}}',
    ],
)
async def test_unreadable_answer_is_a_scheduler_error(answer: str):
    async with answering(answer) as url:
        session = find_adapter(f"openenv:{url}").make()
        await refuses_later(lambda: session.reset(seed=1), SchedulerError, "openenv:http")
        await session.close()


@pytest.mark.parametrize("field", ['"reward": "abc"', '"reward": NaN', '"reward": 1e308', '"done": "false"', '"done": NaN'])
async def test_step_earns_a_number_and_ends_by_a_truth_value(field: str):
    from polyturn.compat.swift.openenv_wrapper import OpenEnvWrapper

    begin = '{"type": "observation", "data": {"observation": "Go."}}'
    step = f'{{"type": "observation", "data": {{"observation": "Gone.", {field}}}}}'
    async with answering(begin, step) as url:
        session = find_adapter(f"openenv:{url}").make()
        await session.reset(seed=1)
        await refuses_later(lambda: session.step('{"message": "a"}'), SchedulerError, "reward")
        await session.close()
        wrapper = OpenEnvWrapper({"base_url": url})
        await asyncio.to_thread(wrapper.reset)
        await refuses_later(lambda: asyncio.to_thread(wrapper.step, {"message": "a"}), SchedulerError, "reward")
        await asyncio.to_thread(wrapper.close)


async def test_redirect_is_not_followed():
    async with answering('{"type": "observation", "data": {"observation": "Go."}}') as url:
        session = find_adapter(f"openenv:{url}/away").make()
        await refuses_later(lambda: session.reset(seed=1), SchedulerError, "redirect")
        await session.close()


NUMBER = {"properties": {"metadata": {"type": "object"}, "number": {"type": "integer"}}}
TEXT_ACTION = {"properties": {"metadata": {"type": "object"}, "message": {"type": "string"}}, "required": ["message"]}
TWO = {"properties": {"row": {"type": "integer"}, "column": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "options", "text", "action"),
    [
        (TEXT_ACTION, {}, "Hello 3", {"message": "Hello 3"}),
        (NUMBER, {}, "I say 3, no: -4.", {"number": -4}),
        (NUMBER, {}, "It is 2.9", {"number": 2}),
        (NUMBER, {}, "9007199254740993", {"number": 9007199254740993}),
        (NUMBER, {}, "I pass", "no number"),
        (NUMBER, {}, "9" * 400, "no number"),
        (TWO, {}, 'First {x}. Then {"row": 1, "column": {"a": 2}} it is', {"row": 1, "column": {"a": 2}}),
        (TWO, {}, "1 2", "'row', 'column'"),
        (TWO, {}, '{"row": ' * 5000, "no JSON object"),
        (TWO, {"field": "row"}, "2", {"row": 2}),
    ],
)
def test_text_becomes_the_action_of_the_schema(schema: Any, options: Any, text: str, action: Any):
    found = OpenEnvCodec(schema, **options).action(text)
    assert found == action if isinstance(action, dict) else action in str(found)


@pytest.mark.parametrize(
    ("options", "observation", "text"),
    [
        ({}, {"hint": "higher", "picture": None}, "higher"),
        ({}, {"hint": "higher", "left": 2}, '{"hint": "higher", "left": 2}'),
        ({"show": "left"}, {"hint": "higher", "left": 2}, "2"),
        ({}, {"hint": "higher", "metadata": {"answer": 7}}, "higher"),
        ({}, {"metadata": {"answer": 7}}, ""),
        ({"show": "metadata"}, {"metadata": {"answer": 7}}, '{"answer": 7}'),
        ({}, {}, ""),
        ({}, None, ""),
    ],
)
def test_observation_is_shown_as_text_or_json(options: Any, observation: Any, text: str):
    assert OpenEnvCodec({}, **options).shown(observation) == text


SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ.get("WORKERS", "").encode())
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> str:
    """A stand-in for a Python with OpenEnv and uvicorn; its server answers every GET with the variable WORKERS."""
    python = tmp_path / "python"
    (tmp_path / "server.py").write_text(SERVER)
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || PORT=$7 exec {sys.executable} {tmp_path}/server.py\n')
    python.chmod(0o755)
    return str(python)


async def test_variables_reach_the_server_as_text(interpreter: str):
    adapter = find_adapter("openenv:guess.app:app", {"python": interpreter, "variables": {"WORKERS": 4}})
    slot = await adapter.take()
    async with aiohttp.ClientSession() as http, http.get(slot.url) as reply:
        assert await reply.text() == "4"
    adapter.close()


@pytest.mark.parametrize("variables", [{"WORKERS": [4]}, {"WORKERS": None}, {"DEBUG": True}, ["WORKERS=4"]])
def test_non_text_variables_are_refused(interpreter: str, variables: Any):
    options = {"python": interpreter, "variables": variables}
    refuses(lambda: find_adapter("openenv:guess.app:app", options), ConfigError, "variables")


async def test_dead_server_is_replaced_and_leaves_nothing(interpreter: str):
    adapter = find_adapter("openenv:guess.app:app", {"python": interpreter, "servers": 1})
    dead = await adapter.take()
    await adapter.give_back(dead)
    os.kill(dead.server.pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, dead.server.pid, os.WEXITED | os.WNOWAIT)
    log = dead.server.log
    assert log.exists()
    assert (await adapter.take()).url != dead.url
    assert not log.exists()
    adapter.close()
