"""stdio_transport: runs an MCP server as a process, with its standard input and output as a transport of the SDK.

    async with stdio_transport(StdioServerParameters(command="python", args=["server.py"]), words, …) as (read, write): ...

It replaces the SDK's `stdio_client`, because a server is foreign code that must not harm the run. A line beyond the limit is
never kept in memory and ends the connection. An invalid line does not log a traceback. The end of standard error is kept for
error messages. On exit, the process and all its children are ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from polyturn.core.secrets import hide
from polyturn.infra.process import dies_with_parent, end_async

if TYPE_CHECKING:
    from mcp import StdioServerParameters

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 1.0
"""Seconds that a server may take to exit after its standard input is closed, and again after SIGTERM."""
POLL_S = 0.01
EXIT_POLL_S = 0.2
NUM_WORDS_BYTES = 4096


class StderrTail:
    """The end of a server's standard error, and the reasons why its connection ended."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """Start empty.

        Args:
            secrets: Texts that are masked if the server writes them.
        """
        self._tail = b""
        self._secrets = tuple(secrets)
        self.has_ended = False
        """Whether the server's output, or the connection to it, has ended."""
        self.broke_limit = ""
        """The limit that the server exceeded, which ended the connection; empty if it exceeded none."""
        self.http_status: int | None = None
        """The last HTTP error status of a server at a URL."""

    def clear(self) -> None:
        """Reset everything before another try."""
        self._tail, self.has_ended, self.broke_limit, self.http_status = b"", False, "", None

    def add(self, chunk: bytes) -> None:
        """Append output of the server."""
        self._tail = (self._tail + chunk)[-NUM_WORDS_BYTES:]

    @property
    def note(self) -> str:
        """The end of an error message: the exceeded limit, the HTTP status, or the last lines; empty without any of them."""
        if self.broke_limit:
            return f"; {self.broke_limit}"
        if self.http_status is not None:
            hint = "; give auth_token, or a better one" if self.http_status in (401, 403) else ""
            return f" (HTTP {self.http_status}{hint})"
        lines = [line.strip() for line in self._tail.decode("utf-8", "replace").splitlines() if line.strip()]
        tail = hide(" | ".join(lines[-4:]), *self._secrets)[-600:]
        return f"; its standard error ends: {tail}" if tail else ""


@asynccontextmanager
async def stdio_transport(server: StdioServerParameters, words: StderrTail, *, max_answer_bytes: int) -> AsyncIterator[Any]:
    """Start a server and yield the SDK's two streams; end the process on exit.

    Its environment consists of `server.env` and a few variables (PATH, HOME, …) that every server gets.

    Raises:
        OSError: the server cannot be started.
    """
    import anyio
    from mcp.client.stdio import get_default_environment

    env = get_default_environment() | (server.env or {})
    process = await asyncio.create_subprocess_exec(
        *dies_with_parent([server.command, *server.args], env=env, cwd=server.cwd),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
        cwd=server.cwd,
        start_new_session=True,
        limit=max_answer_bytes,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    to_session, read_stream = anyio.create_memory_object_stream[Any](0)
    write_stream, from_session = anyio.create_memory_object_stream[Any](0)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_read, process.stdout, to_session, words)
            group.start_soon(_write, process.stdin, from_session, to_session)
            group.start_soon(_listen, process.stderr, words)
            group.start_soon(_notice_exit, process, to_session, words)
            try:
                yield read_stream, write_stream
            finally:
                group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process, words)
        for stream in (to_session, read_stream, write_stream, from_session):
            stream.close()


async def _read(stdout: asyncio.StreamReader, to_session: Any, words: StderrTail) -> None:
    """Forward the server's messages, line by line."""
    import anyio
    import mcp.types as types
    from mcp.shared.message import SessionMessage

    try:
        async with to_session:
            while line := await stdout.readline():
                try:
                    message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    logger.debug("an MCP server wrote a line that is not a message: %r", line[:200])
                    await asyncio.sleep(0)  # a flood of invalid lines must not block the event loop
                    continue
                await to_session.send(SessionMessage(message))
    except ValueError:  # a line beyond the limit
        words.broke_limit = "an answer was larger than max_answer_bytes; ask for less at once"
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, ConnectionError):
        pass  # the session is gone
    finally:
        words.has_ended = True


async def _write(stdin: asyncio.StreamWriter, from_session: Any, to_session: Any) -> None:
    try:
        async with from_session:
            async for item in from_session:
                stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await stdin.drain()
    except (OSError, RuntimeError):
        await to_session.aclose()  # so that pending requests fail at once


async def _listen(stderr: asyncio.StreamReader, words: StderrTail) -> None:
    while chunk := await stderr.read(65536):
        words.add(chunk)


async def _notice_exit(process: asyncio.subprocess.Process, to_session: Any, words: StderrTail) -> None:
    """End the connection when the server exits, even if one of its children keeps the output open."""
    while process.returncode is None:  # noqa: ASYNC110
        await asyncio.sleep(EXIT_POLL_S)
    await asyncio.sleep(EXIT_POLL_S)  # time to read its last output
    words.has_ended = True
    await to_session.aclose()


async def _stop(process: asyncio.subprocess.Process, words: StderrTail) -> None:
    """End the process and its children, gently at first, and collect its last output."""
    assert process.stderr is not None
    if not await end_async(process, grace_s=EXIT_GRACE_S):
        logger.warning("the MCP server's process %d does not end", process.pid)
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(0.2):
            while chunk := await process.stderr.read(65536):
                words.add(chunk)
    process._transport.close()  # type: ignore[attr-defined]  # also closes pipes that another process keeps open
