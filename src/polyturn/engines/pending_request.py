"""PendingRequest: a request to a server, until it is answered, ended by its caller, past its deadline, or given up.

    pending = PendingRequest(lambda: url, abort=…, abort_later=…, busy_limit_s=60)
    reply = await pending.run(post, deadline=…)     the server's JSON; None if it ended before the server accepted it
    pending.end()                                   from the caller: return the tokens so far
    pending.give_up(EngineLostError(…))             when the server is lost

To end a request, abort messages are repeated, because the request itself may still be on its way to the server.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from polyturn.core.errors import EngineBusyError, EngineError, EngineLostError

_ABORT_GRACE_S = 10.0
_FIRST_ABORT_PAUSE_S, _LAST_ABORT_PAUSE_S = 0.005, 0.5
_FIRST_BUSY_PAUSE_S, _LAST_BUSY_PAUSE_S = 0.05, 2.0


class PendingRequest:
    """A request of one caller. It may run several times in a row, for the parts of one completion."""

    def __init__(
        self,
        where: Callable[[], str],
        *,
        abort: Callable[[str], Awaitable[None]],
        abort_later: Callable[[str], None],
        busy_limit_s: float,
    ) -> None:
        """Prepare a request.

        Args:
            where: Returns the server's name in messages.
            abort: Makes the server end the request with an id.
            abort_later: The same without waiting.
            busy_limit_s: Seconds for which it is repeated to a server that is full.
        """
        self._where = where
        self._abort = abort
        self._abort_later = abort_later
        self._busy_limit_s = busy_limit_s
        self._id = ""
        self._sent: asyncio.Task[Any] | None = None
        self._is_refused = False
        """Whether the server has refused the request because it is full, so that there is nothing to abort."""
        self._problem: EngineError | None = None
        self.is_ended = False
        """Whether the caller has requested the end."""
        self._wake: asyncio.Future[None] | None = None
        """Set by the awaited task, by a requested end, or at the deadline, to wake the caller."""
        self.num_busy = 0

    def end(self) -> None:
        """Request the result so far."""
        self.is_ended = True
        self._awaken()

    def give_up(self, problem: EngineError) -> None:
        """Make the waiting call raise `problem`."""
        self._problem = problem
        if self._sent is None or not self._sent.cancel():
            self._awaken()

    async def done(self, work: Coroutine[Any, Any, Any], *, deadline: float | None) -> bool:
        """Wait for `work`; cancel it and return False if the caller requests the end, or the deadline passes, before.

        Raises:
            EngineError: the request is given up, or `work` raised.
        """
        task = asyncio.create_task(work)
        try:
            await self._first(task, deadline)
            if task.done():
                await task
            if self._problem is not None:
                raise self._problem
            return task.done()
        finally:
            task.cancel()

    async def opened(self, is_open: asyncio.Event, *, deadline: float | None) -> bool:
        """Wait for `is_open`; return False if the caller requests the end, or the deadline passes, before.

        Raises:
            EngineError: the request is given up.
        """
        while not is_open.is_set():
            if not await self.done(is_open.wait(), deadline=deadline):
                return False
        return True

    async def run(self, post: Callable[[str], Awaitable[Any]], *, deadline: float | None) -> Any:
        """Send the request and wait for the answer; None if it ended before the server accepted it.

        Args:
            post: Sends the request under the given id, and returns the answer.
            deadline: `loop.time()` at which the result so far is requested.

        Raises:
            EngineLostError: there was no answer.
            EngineError: the server refused the request, or it was given up.
        """
        if self._problem is not None:
            raise self._problem
        self._id = uuid.uuid4().hex
        self._sent = asyncio.create_task(self._send(post))
        try:
            return await self._within(self._sent, deadline)
        except asyncio.CancelledError:
            self._sent.cancel()
            self._abort_later(self._id)
            task = asyncio.current_task()  # did the caller cancel, or did `give_up` cancel only the request?
            if self._problem is not None and (task is None or not task.cancelling()):
                raise self._problem from None
            raise
        except EngineLostError:
            self._abort_later(self._id)  # the server may still be working on it
            raise

    async def _send(self, post: Callable[[str], Awaitable[Any]]) -> Any:
        """Send the request until the server accepts it."""
        loop = asyncio.get_running_loop()
        limit, pause = loop.time() + self._busy_limit_s, _FIRST_BUSY_PAUSE_S
        while True:
            self._is_refused = False
            try:
                return await post(self._id)
            except EngineBusyError:
                self.num_busy += 1
                if loop.time() + pause > limit:
                    raise
            self._is_refused = True
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_BUSY_PAUSE_S)

    async def _within(self, sent: asyncio.Task[Any], deadline: float | None) -> Any:
        """Wait for the answer; after the deadline or a requested end, abort to get the result so far."""
        loop = asyncio.get_running_loop()
        await self._first(sent, deadline)
        grace, pause = loop.time() + _ABORT_GRACE_S, _FIRST_ABORT_PAUSE_S
        while not sent.done():
            if self._is_refused:  # it waits to be repeated; the server does not have it
                sent.cancel()
                return None
            if loop.time() > grace:
                sent.cancel()
                raise EngineLostError(f"{self._where()} did not end a request within {_ABORT_GRACE_S:.0f} s of its abort")
            await self._abort(self._id)
            await asyncio.wait({sent}, timeout=pause)
            pause = min(2 * pause, _LAST_ABORT_PAUSE_S)
        return await sent

    async def _first(self, task: asyncio.Task[Any], deadline: float | None) -> None:
        """Return once `task` is done, the caller has requested the end, the deadline has passed, or the request is given
        up."""
        if self.is_ended or self._problem is not None:
            return
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        task.add_done_callback(self._awaken)
        timer = None if deadline is None else loop.call_at(deadline, self._awaken)
        try:
            await self._wake
        finally:
            self._wake = None
            if timer is not None:
                timer.cancel()

    def _awaken(self, task: asyncio.Task[Any] | None = None) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
