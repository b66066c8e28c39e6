"""What an OpenEnv server may send: each server here costs at most its own episode, in a sentence, and never a hang."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from polyturn.core.aio import PerLoop
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import Trajectory
from polyturn.environments import find_adapter
from polyturn.environments.openenv import MAX_MESSAGE_BYTES, OpenEnv
from polyturn.environments.openenv_codec import MAX_VALUES
from polyturn.environments.scheduler import EnvScheduler, Stage
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context

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
        """Take a question and what is always asked behind it."""
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
    """Answers the reset once more when a step has been asked for; what it says to that comes after the episode's end."""
    await socket.asked()
    await socket.send(frame(TEXT, says("begin")) + STATE)
    await socket.asked()
    await socket.send(frame(TEXT, says("end", done=True)))
    await asyncio.sleep(0.05)
    await socket.send(frame(TEXT, says("go on")) + STATE)


async def is_full(socket: Socket) -> None:
    """Refuses the connection before anything is asked, as a server without room does."""
    found = {"message": "Server at capacity: 1/1 sessions active", "code": "CAPACITY_REACHED", "max_sessions": 1}
    await socket.send(frame(TEXT, json.dumps({"type": "error", "data": found}).encode()) + frame(CLOSE, b""))


async def hangs_up_at_the_end(socket: Socket) -> None:
    await socket.asked()
    await socket.send(frame(TEXT, says("begin")) + STATE)
    await socket.asked()
    await socket.send(frame(TEXT, says("end", done=True)) + frame(CLOSE, b""))


async def answers_twice(socket: Socket) -> None:
    await socket.hear()
    await socket.send(2 * frame(TEXT, says("begin")))
    await socket.hear()


async def answers_unasked(socket: Socket) -> None:
    """Answers once more while the model takes its time."""
    GENERATES().clear()
    await socket.asked()
    await socket.send(frame(TEXT, says("begin")) + STATE)
    await asyncio.sleep(0.05)
    await socket.send(frame(TEXT, says("begin")) + frame(PING, b"?"))
    await socket.hear(PONG)
    GENERATES().set()
    await socket.hear()


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
    """Pieces of a message, and a ping between them, as the protocol has it."""
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


async def only_pings(socket: Socket) -> None:
    await socket.hear()
    while True:
        await socket.send(100 * frame(PING, b"?"))
        await asyncio.sleep(0)


async def packs_unasked(socket: Socket) -> None:
    await socket.hear()
    await socket.send(frame(TEXT, gzip.compress(says("begin")), is_packed=True))


async def needs_pongs(socket: Socket) -> None:
    """Waits for the answer to its ping while the model takes its time; real servers hang up without one."""
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
    latency_s: float = 0.0,
    timeout_s: float = 30.0,
) -> Trajectory:
    """Return an episode of two turns with a server that goes by `serve` once it is connected."""
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
        latency_s=latency_s,
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
async def test_what_the_protocol_allows_is_played(serve: Serve, options: dict[str, Any]):
    async with asyncio.timeout(120):
        found = await play(serve, **options)
    assert found.error is None and found.stop_reason is StopReason.ENV_DONE, found.error
    assert found.reward is not None and found.reward.total == 1.0


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        (answers_twice, "answered more than it was asked, at a reset: "),
        (answers_late, "answered more than it was asked, at a step: "),
        (is_full, "has no room for another episode (Server at capacity: 1/1 sessions active); set env.kwargs.sessions"),
        (answers_unasked, "answered more than it was asked, before a step: "),
        (floods, "answered more than it was asked, at a reset: "),
        (speaks_without_end, "hung up at a reset"),
        (lists_without_end, "answered a reset with "),
        (drips, "took longer than 1 s for a reset"),
        (only_pings, "took longer than 1 s for a reset"),
        (packs_unasked, "hung up at a reset"),
    ],
)
async def test_what_it_does_not_allow_fails_the_episode_in_a_sentence(serve: Serve, said: str):
    async with asyncio.timeout(120):
        found = await play(serve, latency_s=0.05, timeout_s=1.0 if said.startswith("took longer") else 30.0)
    assert found.error is not None and said in found.error and "\n" not in found.error


@pytest.mark.parametrize(
    ("schema", "options", "said"),
    [
        (gzip.compress(bytes(1 << 27)), {"headers": "Content-Encoding: gzip\r\n"}, "the answer is larger than"),
        (gzip.compress(SCHEMA)[:24], {"headers": "Content-Encoding: gzip\r\n"}, "cannot be reached"),
        (SCHEMA, {"is_slow": True, "timeout_s": 1.0}, "cannot be reached (TimeoutError)"),
        (b"[" * 100_000, {}, "cannot be reached"),
    ],
    ids=["a bomb", "half of it", "never ends", "nested"],
)
async def test_a_schema_that_cannot_be_read_fails_the_episode_in_a_sentence(
    schema: bytes, options: dict[str, Any], said: str
):
    async with asyncio.timeout(120):
        found = await play(as_agreed, schema=schema, **options)
    assert found.error is not None and said in found.error and "\n" not in found.error
