"""Messages between two processes of one run: pickled objects with their length before them, over a connected socket.

    [ length, 4 bytes, little endian ][ pickle ]    again and again, in both directions

    (3, "generate", arguments)  ->    <-  (3, None, answer)       both ends call, and both answer
    (3, None, None)             ->                                the caller was cancelled

The arguments of a call are pickled separately, including classes of the main script, which the other end does not have. If
the other end cannot unpickle them, only that call fails. Each end unpickles whatever arrives, so no untrusted process may be
able to connect to the socket.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import socket
import struct
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import cloudpickle

from polyturn.core.errors import EngineError, PolyturnError

_LENGTH = struct.Struct("<I")
MAX_BYTES = 2**32 - 1


class Peer(asyncio.Protocol):
    """One end of a socket over which two processes call methods of each other; calls run concurrently."""

    def __init__(self, methods: Mapping[str, Callable[..., Awaitable[Any]]], *, on_end: Callable[[], BaseException]) -> None:
        """Offer `methods` to the other end; `on_end` makes the error for calls that are waiting when the connection ends."""
        self._methods = methods
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._problem: BaseException | None = None

    async def connect(self, connection: socket.socket) -> None:
        """Start to use a connected socket on the running event loop."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the other end and return its result; cancelling the caller cancels the remote call.

        Raises:
            PolyturnError: the error of the remote method; any other exception becomes a RuntimeError with its traceback.
        """
        if self._problem is not None:
            raise self._problem
        packed = _pickled(arguments)
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send((number, method, packed))
            value, problem = pickle.loads(await answer)
        except asyncio.CancelledError:
            self._send((number, None, None))
            raise
        finally:
            del self._waiting[number]
        if problem is not None:
            raise problem
        return value

    def notify(self, method: str, *arguments: Any) -> None:
        """Call a method of the other end without waiting; its result or error is dropped, as is a call after the end."""
        self._send((next(self._numbers), method, _pickled(arguments)))

    def close(self) -> None:
        """Close the connection once everything is written."""
        if self._transport is not None:
            self._transport.close()

    def _send(self, message: tuple[int, str | None, bytes | None]) -> None:
        """Write a message without waiting for the other end to read; do nothing if the connection is lost.

        Raises:
            EngineError: the message is larger than 4 GiB.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        if len(data) > MAX_BYTES:
            raise EngineError(f"a message of {len(data)} bytes is too long for another process; at most {MAX_BYTES}")
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def _receive(self, number: int, method: str | None, packed: bytes | None) -> None:
        if packed is None:
            if (task := self._answering.get(number)) is not None:
                task.cancel()
        elif method is not None:
            task = self._answering[number] = asyncio.ensure_future(self._answer(number, method, packed))
            task.add_done_callback(lambda _: self._answering.pop(number))  # also for a task cancelled before it began
        elif (future := self._waiting.get(number)) is not None and not future.done():
            future.set_result(packed)

    async def _answer(self, number: int, method: str, packed: bytes) -> None:
        try:
            try:
                answer = _pickled((await self._methods[method](*pickle.loads(packed)), None))
            except PolyturnError as error:
                answer = _pickled((None, error))
                pickle.loads(answer)  # raises if the class cannot be made again from the message alone
            self._send((number, None, answer))
        except Exception:
            problem = RuntimeError(f"in another process of the run:\n{traceback.format_exc()}")
            self._send((number, None, _pickled((None, problem))))

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        buffer = self._data
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            self._receive(*pickle.loads(memoryview(buffer)[start + _LENGTH.size : end].toreadonly()))
            start = end
        del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._problem = self._on_end()
        for task in self._answering.values():
            task.cancel()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._problem)


def _pickled(value: object) -> bytes:
    """Pickle a value. Only classes of the main script and local ones need cloudpickle, which takes several times as long."""
    try:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return bytes(cloudpickle.dumps(value))
    return bytes(cloudpickle.dumps(value)) if b"__main__" in data else data
