"""One connection of a server: uvicorn's protocol on httptools, with the bounds that it lacks.

    a head that takes long, or is long           closed after `head_s` seconds; 400 beyond 32 KiB
    a body of two lengths, or another coding     400     (Content-Length beside Transfer-Encoding, gzip as a transfer coding)
    no Host, or two                              400
    headers behind a body                        dropped, for those in front of it were looked at
    a connection beyond `max_connections`        closed

Separate from `guard.py`, which sees requests whose head is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from polyturn.serving.rules import ServerRules

MAX_HEAD_BYTES = 32 << 10
_MAX_HELD_BYTES = 64 << 10
LEAVING = "polyturn.leaving"
"""The extension of a request's scope with the set of functions that are called when its client leaves."""


class _HeadError(ValueError):
    """A head that is refused; the parser tells its protocol, which answers 400."""


class _JoinedWrites(asyncio.WriteTransport):
    """Sends in one call what one step of the loop writes: the head of a response, and its body."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(bytes(data))
        self._size += len(data)
        if self._size > _MAX_HELD_BYTES:
            self._send()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _send(self) -> None:
        if self._held:
            data = b"".join(self._held)
            self._held.clear()
            self._size = 0
            self._transport.write(data)


class Connection(HttpToolsProtocol):
    """Reads requests and writes their answers."""

    def __init__(self, rules: ServerRules, /, config: Config, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[arg-type]
        self._rules = rules
        self._deadline: asyncio.TimerHandle | None = None
        self._num_unread = 0
        """Bytes since the last that completed a head or were of a body."""
        self._is_in_head = True
        self._leaving: set[Callable[[], object]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or close what is one connection too many."""
        super().connection_made(transport)
        self.transport = _JoinedWrites(transport, self.loop)  # type: ignore[assignment]
        if len(self.connections) > self._rules.max_connections:
            transport.close()
            return
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        """Read what came, and set a deadline where no request of it is answered."""
        self._num_unread += len(data)
        super().data_received(data)
        if self._num_unread > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request is longer than {MAX_HEAD_BYTES} bytes.")
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif not is_answering and self._deadline is None:
            self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and cancel the work for the client."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)
        for leave in tuple(self._leaving):
            leave()

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(self._rules.head_s, self.transport.close)

    # What the parser found.

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; one behind the body is dropped."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Answer the request.

        Raises:
            _HeadError: its head is refused.
        """
        self._num_unread, self._is_in_head = 0, False
        num_bytes, hosts, codings = len(self.url), 0, []
        for name, value in self.headers:
            num_bytes += len(name) + len(value)
            hosts += name == b"host"
            if name == b"transfer-encoding":
                codings.append(value.lower())
        if num_bytes > MAX_HEAD_BYTES:
            raise _HeadError(f"the head has {num_bytes} bytes; use at most {MAX_HEAD_BYTES}")
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() != "1.0"):
            raise _HeadError(f"the request names {hosts} hosts; it names one")
        if codings not in ([], [b"chunked"]):
            raise _HeadError(f"the body is coded as {codings!r:.80}; send it as it is, or chunked")
        self.scope["extensions"] = {LEAVING: self._leaving}  # type: ignore[dict-item]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body."""
        self._num_unread = 0
        super().on_body(body)

    def _unsupported_upgrade_warning(self) -> None:
        self.cycle.keep_alive = False  # the parser reads nothing behind such a request
