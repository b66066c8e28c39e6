"""Messages between two processes of one run: pickled objects with their length before them, over a connected socket.

    [ length, 4 bytes, little endian ][ pickle ]    again and again, in both directions

Separate because both ends speak it. It is for a socket that nobody else can connect to: whoever writes to it is trusted.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable
from typing import Any

from polyturn.core.errors import EngineError

_LENGTH = struct.Struct("<I")
MAX_BYTES = 2**32 - 1


class MessageSocket(asyncio.Protocol):
    """One end: `send` writes an object, `on_message` is called with each that arrives, `on_end` when no more can come."""

    def __init__(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()

    def send(self, message: object) -> None:
        """Write an object; it leaves when the other end reads. Nothing happens once the connection is gone.

        Raises:
            EngineError: it has more than 4 GiB.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        if len(data) > MAX_BYTES:
            raise EngineError(f"a message of {len(data)} bytes is too long for the engine's process; at most {MAX_BYTES}")
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        """Close the connection once everything is written."""
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        held = self._data
        held += data
        start = 0
        while len(held) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(held, start)
            end = start + _LENGTH.size + length
            if len(held) < end:
                break
            self._on_message(pickle.loads(memoryview(held)[start + _LENGTH.size : end].toreadonly()))
            start = end
        del held[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_end()
