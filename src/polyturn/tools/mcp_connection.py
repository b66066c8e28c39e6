"""Connections to an MCP server, one for a run or one for each episode; lost connections are re-established, with back-off.

    server = McpServer("files", settings, session="episode", limits=McpLimits())
    server.open("train-7/2")                                       counts one user without connecting
    result = await server.call("train-7/2", "read", {...}, timeout_s=30)       the first call connects
    await server.close("train-7/2")                                the last user of a session ends it

The SDK's client must be entered and left by the same task, so each connection has a task that keeps the client open.
After `MAX_FAILURES` failed connections in a row, calls fail at once during the back-off instead of waiting for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from polyturn.core.errors import ToolError, ToolTimeoutError, one_line
from polyturn.infra.aio import PerLoop
from polyturn.tools.failures import TooLargeError
from polyturn.tools.mcp_stdio import StderrTail

logger = logging.getLogger(__name__)

SessionMode = Literal["run", "episode"]
Turn = Callable[[], contextlib.AbstractAsyncContextManager[Any]]

MAX_STARTS = 16
"""Maximum number of concurrent session starts per server; waiting does not count for the time to connect."""
MAX_FAILURES = 3
"""Number of consecutive failed connections after which calls no longer wait for the next try."""
MAX_SILENT = 3
"""Number of unanswered calls in a row after which a connection is closed and re-established."""
FIRST_PAUSE_S = 0.25
LOST_PAUSE_S = 0.1
MAX_PAUSE_S = 30.0
CANCEL_GRACE_S = 0.5
CLOSE_S = 5.0
"""Seconds to wait until a server has closed a session. A process is ended in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpLimits:
    """The limits of a server."""

    connect_timeout_s: float = 30.0
    max_answer_bytes: int = 8 << 20
    keep_s: float = 30.0
    """Seconds for which a run's connection is kept while unused."""


class _SessionLost(Exception):
    """The server has dropped the session since the last call, and has not executed this call."""


class McpConnection:
    """One session with one server."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        *,
        limits: McpLimits,
        is_own: bool,
        turn: Turn | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Prepare a connection; the first call opens it.

        Args:
            name: The server's name.
            settings: Its command or URL.
            limits: The server's limits.
            is_own: Whether it belongs to one episode, which then gets an error if the server's state is lost.
            turn: Makes a context manager that is held while connecting; it limits concurrent starts.
            clock: Returns the time in seconds for the back-off; by default, the event loop's time.
        """
        self.name = name
        self.num_users = 0
        self._settings = settings
        self._limits = limits
        self._is_own = is_own
        self._turn = turn or contextlib.nullcontext
        self._clock = clock
        self._holder: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_over = asyncio.Event()
        self._words = StderrTail()
        self._strays: set[asyncio.Task[Any]] = set()
        self.num_failures = 0
        """Number of consecutive failed connections."""
        self._has_changed = False
        self._num_silent = 0
        self._retry_at = 0.0
        self._why = ""

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to a server."""
        return self._holder is not None and not self._holder.done()

    @property
    def has_ended(self) -> bool:
        """Whether the connected server has ended."""
        return self._words.has_ended

    @property
    def num_calls(self) -> int:
        """Number of calls that wait for an answer."""
        return len(self._strays)

    async def call(self, tool: str, arguments: dict[str, Any], *, timeout_s: float) -> Any:
        """Call a tool and return the SDK's `CallToolResult`.

        Raises:
            ToolError: the server refused the request.
            TooLargeError: the answer was larger than `max_answer_bytes`.
            ToolTimeoutError: the server did not answer within `timeout_s`, which excludes the time to connect.
            ConnectionError: the server cannot be reached, or closed the connection.
        """
        try:
            return await self._call(tool, arguments, timeout_s=timeout_s)
        except _SessionLost as problem:
            if self._is_own:
                raise ConnectionError(
                    f"MCP server {self.name!r} ended since the last call, and its state is lost{problem}; the next call "
                    "starts the server again"
                ) from None
            logger.warning("MCP server %r ended between two calls%s; connecting again", self.name, problem)
        try:
            return await self._call(tool, arguments, timeout_s=timeout_s)
        except _SessionLost as problem:
            raise ConnectionError(f"MCP server {self.name!r} does not keep a session{problem}; see its log") from None

    async def close(self) -> None:
        """Disconnect and end a server process that was started, even if the caller is cancelled."""
        holder, ready, self._holder, self._ready = self._holder, self._ready, None, None
        if holder is None:
            return
        self._is_over.set()
        if ready is not None and not ready.done():
            holder.cancel()
        await asyncio.wait({holder}, timeout=CLOSE_S)
        if not holder.done():  # a server at a URL that does not answer the request to close
            holder.cancel()
            await asyncio.wait({holder}, timeout=CLOSE_S)

    async def _call(self, tool: str, arguments: dict[str, Any], *, timeout_s: float) -> Any:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST, CallToolRequest, CallToolRequestParams, CallToolResult

        client, ready = await self._connect(), self._ready
        if self._words.has_ended:
            note = self._words.note
            await self._lose(ready, f"it ended{note}")
            raise _SessionLost(note)
        # Not `client.call_tool`, which lists all tools first, and then validates the answer against the server's output
        # schema on the event loop; a slow regular expression in that schema would block the loop.
        request = CallToolRequest(params=CallToolRequestParams(name=tool, arguments=arguments))
        try:
            result = await self._answer(client.session.send_request(request, CallToolResult), timeout_s)
        except TimeoutError:
            await self._count_silence(ready)
            raise ToolTimeoutError(f"Tool call failed: no answer within {timeout_s:g} s") from None
        except MCPError as problem:
            is_forgotten = problem.code == INVALID_REQUEST and "session" in problem.message.lower()
            if is_forgotten and "url" in self._settings:
                await self._lose(ready, "it forgot the session")
                raise _SessionLost from problem
            if "too large" in problem.message or "byte limit" in problem.message:
                raise TooLargeError(f"Tool call failed: {problem.message}") from problem
            if problem.code != CONNECTION_CLOSED:
                self._num_silent = 0
                raise ToolError(f"Tool call failed: {one_line(problem)}") from problem
            raise await self._broken(ready, problem) from problem
        except (RuntimeError, ValueError) as problem:  # an invalid answer
            raise ToolError(f"Tool call failed: {one_line(problem)}") from problem
        except Exception as problem:
            raise await self._broken(ready, problem) from problem
        self._num_silent = 0
        return result

    async def _answer(self, request: Any, timeout_s: float) -> Any:
        """Await a request with a deadline that also works if the server ignores the cancellation."""
        task = asyncio.ensure_future(request)
        self._strays.add(task)
        task.add_done_callback(self._forget)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
            raise TimeoutError
        return task.result()

    def _now(self) -> float:
        return asyncio.get_running_loop().time() if self._clock is None else self._clock()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._strays.discard(task)
        _ = task.cancelled() or task.exception()  # marks the exception as retrieved

    # ---- the client -------------------------------------------------------------------------------------------------

    async def _connect(self) -> Any:
        """Return the SDK's client, connected.

        Raises:
            ConnectionError: the server cannot be reached.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._holder, self._ready = loop, None, None  # drops connections of an earlier event loop
        while True:
            if not self.is_connected:
                pause = self._retry_at - self._now()
                if pause > 0 and self.num_failures >= MAX_FAILURES:
                    raise ConnectionError(
                        f"MCP server {self.name!r} failed {self.num_failures} times in a row, last: {self._why}; it is "
                        f"tried again in {pause:.0f} s"
                    )
                if pause > 0:
                    await asyncio.sleep(pause)
                    continue
                self._begin()
            ready = self._ready
            assert ready is not None
            try:
                return await asyncio.shield(ready)
            except ConnectionError as problem:
                if self.num_failures >= MAX_FAILURES or not self.num_users:
                    raise ConnectionError(f"MCP server {self.name!r}: {problem}") from problem

    def _begin(self) -> None:
        from polyturn.tools.mcp_client import secrets_of

        self._is_over, self._words = asyncio.Event(), StderrTail(secrets_of(self._settings))
        self._ready = asyncio.get_running_loop().create_future()
        holding = self._hold(self._ready, self._is_over, self._words)
        self._holder = asyncio.create_task(holding, name=f"mcp-{self.name}")

    async def _hold(self, ready: asyncio.Future[Any], is_over: asyncio.Event, words: StderrTail) -> None:
        """Keep one client open until it is no longer needed."""
        from polyturn.tools.mcp_client import make_client

        why = "the connection was closed before the server was ready"
        try:
            async with contextlib.AsyncExitStack() as stack:
                scope = asyncio.timeout(self._limits.connect_timeout_s)
                try:
                    async with self._turn(), scope:
                        http_client = make_client(
                            self._settings,
                            words=words,
                            max_answer_bytes=self._limits.max_answer_bytes,
                            is_stateful=self._is_own,
                            on_message=self._hear,
                        )
                        client = await stack.enter_async_context(http_client)
                except TimeoutError as problem:
                    late = f"it did not answer the handshake within {self._limits.connect_timeout_s:g} s"
                    raise ConnectionError(late if scope.expired() else reason(problem)) from problem
                self.num_failures = 0
                ready.set_result(client)
                await is_over.wait()
        except Exception as problem:
            why = f"{reason(problem)}{words.note}"
            logger.debug("MCP server %r: %s", self.name, why)
        finally:
            words.has_ended = True
            if not ready.done():
                self._count_failure(why)
                ready.set_exception(ConnectionError(why))
                _ = ready.exception()  # marks the exception as retrieved, if no caller is waiting

    async def _hear(self, message: Any) -> None:
        from mcp.types import ToolListChangedNotification

        if isinstance(message, ToolListChangedNotification) and not self._has_changed:
            self._has_changed = True  # warns only once
            logger.warning("MCP server %r changed its list of tools; the run keeps the list that it began with", self.name)

    # ---- failures --------------------------------------------------------------------------------------------------

    async def _broken(self, ready: asyncio.Future[Any] | None, problem: Exception) -> ConnectionError:
        words = self._words
        await self._lose(ready, why := reason(problem))
        return ConnectionError(f"MCP server {self.name!r}: {why}{words.note}")

    async def _lose(self, ready: asyncio.Future[Any] | None, why: str) -> None:
        """Give up an established connection; if several calls report the same loss, only the first has an effect.

        The call itself may have caused the loss, so a loss does not count as a failed connection, and the next call waits
        only `LOST_PAUSE_S` seconds.
        """
        if ready is None or ready is not self._ready:
            return
        self._retry_at, self._why = self._now() + LOST_PAUSE_S, why
        await self.close()

    async def _count_silence(self, ready: asyncio.Future[Any] | None) -> None:
        self._num_silent += 1
        if self._num_silent >= MAX_SILENT:
            logger.warning("MCP server %r left %d calls unanswered; connecting again", self.name, self._num_silent)
            self._num_silent = 0
            await self._lose(ready, "it does not answer")

    def _count_failure(self, why: str) -> None:
        self.num_failures += 1
        pause = min(FIRST_PAUSE_S * 2.0 ** (self.num_failures - 1), MAX_PAUSE_S)
        self._retry_at, self._why = self._now() + pause, why


class McpServer:
    """One server, shared by all of its tools; selects the session for an episode's calls."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        *,
        session: SessionMode = "run",
        limits: McpLimits | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.name = name
        self._settings = settings
        self._mode = session
        self._limits = limits or McpLimits()
        self._clock = clock
        self.sessions: dict[str, McpConnection] = {}
        """Episode id -> session; "" is the session of a run."""
        self._leaving: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._turn = PerLoop(lambda: asyncio.Semaphore(MAX_STARTS))

    @property
    def host(self) -> str | None:
        """The host and port of its URL; None for a command."""
        return urlsplit(str(self._settings["url"])).netloc if "url" in self._settings else None

    @property
    def num_connected(self) -> int:
        """Number of connected sessions."""
        return sum(session.is_connected for session in self.sessions.values())

    def open(self, instance_id: str) -> None:
        """Add a user of an episode's session."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        key = self._key(instance_id)
        if key not in self.sessions:
            is_own = self._mode == "episode"
            self.sessions[key] = McpConnection(
                self.name, self._settings, limits=self._limits, is_own=is_own, turn=self._turn, clock=self._clock
            )
        self.sessions[key].num_users += 1

    async def call(self, instance_id: str, tool: str, arguments: dict[str, Any], *, timeout_s: float) -> Any:
        """Call a tool in an episode's session; see `McpConnection.call`."""
        return await self.sessions[self._key(instance_id)].call(tool, arguments, timeout_s=timeout_s)

    async def close(self, instance_id: str) -> None:
        """Remove a user. The last one ends the session; a run's session ends after `keep_s`."""
        key = self._key(instance_id)
        session = self.sessions[key]
        session.num_users -= 1
        if session.num_users:
            return
        if self._mode == "run" and self._limits.keep_s:
            loop = asyncio.get_running_loop()
            self._leaving = loop.call_later(self._limits.keep_s, self._leave, key)
            return
        del self.sessions[key]
        await session.close()

    async def close_now(self) -> None:
        """End every session, also those in use; a later call starts a new session."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        sessions = list(self.sessions.values())
        self.sessions = {key: session for key, session in self.sessions.items() if session.num_users}
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(session.close())

    def _leave(self, key: str) -> None:
        self._leaving = None
        task = asyncio.ensure_future(self.sessions.pop(key).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _key(self, instance_id: str) -> str:
        return instance_id if self._mode == "episode" else ""


def reason(problem: BaseException) -> str:
    """Return the message of an exception, or of the first exception in a group."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return str(problem) if isinstance(problem, ConnectionError) and problem.errno is None else one_line(problem)
