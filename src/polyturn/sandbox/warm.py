"""WarmSandboxes: sandboxes of one spec, started before an episode needs them.

    SandboxSpec(backend="podman", image="…", warm=4)   ->  open_sandbox returns one of four and starts the next

Each event loop has its own warm sandboxes; unused ones are closed when the loop ends.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import deque
from collections.abc import Awaitable, Callable

from polyturn.infra.aio import PerLoop
from polyturn.sandbox.base import BaseSandbox, SandboxSpec


class WarmSandboxes:
    """Started sandboxes of one spec."""

    def __init__(self, spec: SandboxSpec, start: Callable[[SandboxSpec], Awaitable[BaseSandbox]]) -> None:
        self._spec = spec
        self._start = start
        self._waiting: deque[asyncio.Task[BaseSandbox]] = deque()
        self._keeper = asyncio.create_task(self._keep())

    async def take(self) -> BaseSandbox:
        """Return a live sandbox, which the caller closes, and start a replacement.

        Raises:
            SandboxSetupError: the sandbox did not start.
        """
        while True:
            self._fill()
            starting = self._waiting.popleft()
            self._fill()
            try:
                sandbox = await asyncio.shield(starting)
                if await sandbox.is_alive():
                    return sandbox
            except asyncio.CancelledError:
                self._waiting.appendleft(starting)
                raise
            await sandbox.close()

    def _fill(self) -> None:
        while len(self._waiting) < self._spec.warm:
            self._waiting.append(asyncio.create_task(_started(self._start, self._spec)))

    async def _keep(self) -> None:
        """Wait until the event loop ends and cancels this task; then close the unused sandboxes."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            for starting in self._waiting:
                # The ending loop may have cancelled it already; cancelling twice would interrupt its clean-up.
                if not starting.cancelling():
                    starting.cancel()  # no effect if the sandbox is open
            for sandbox in await asyncio.gather(*self._waiting, return_exceptions=True):
                if isinstance(sandbox, BaseSandbox):
                    await sandbox.close()


async def _started(start: Callable[[SandboxSpec], Awaitable[BaseSandbox]], spec: SandboxSpec) -> BaseSandbox:
    return await start(spec)


@functools.cache
def _of_process(pid: int) -> PerLoop[dict[str, WarmSandboxes]]:
    return PerLoop(dict)


async def take_warm(spec: SandboxSpec, start: Callable[[SandboxSpec], Awaitable[BaseSandbox]]) -> BaseSandbox:
    """Return a started sandbox of a spec with warm sandboxes.

    Raises:
        SandboxSetupError: the sandbox did not start.
    """
    warm = _of_process(os.getpid())()
    if (key := repr(spec)) not in warm:
        warm[key] = WarmSandboxes(spec, start)
    return await warm[key].take()
