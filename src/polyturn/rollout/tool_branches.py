"""ToolBranch: the tools of a fork. Those that can be snapshotted are its own; the others are shared.

    conversation   note ── note ──┬── note             its notebook has three notes
                                  └── note (a fork)    its own has three as well; neither shows the other's third

Separate from the environment, which begins and ends tools: a fork may never call one, so its own are begun at the first
call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from polyturn.tools.session import ToolSession, copied


class ToolBranch:
    """One fork's tools."""

    __slots__ = ("_above", "_begun", "_id", "_lock", "_problems", "_states")

    def __init__(self, above: ToolSession | ToolBranch, *, id: str, states: Mapping[str, Any] | None) -> None:
        """Begin nothing yet.

        Args:
            above: The tools of what it is a fork of.
            id: The fork's id, which its tools get.
            states: What those kept where it goes on; None is what they keep when it first calls one.
        """
        self._above = above
        self._id = id
        self._states = states
        self._begun: ToolSession | None = None
        self._lock = asyncio.Lock()
        self._problems: list[str] = []

    async def session(self) -> ToolSession:
        """Return its tools, begun.

        Raises:
            ToolStartError, SnapshotError: one cannot be begun again where it stood.
        """
        async with self._lock:
            if self._begun is None:
                above = await session_of(self._above)
                # A copy at once: a state may be a live one, and whoever it is of goes on meanwhile.
                states = copied(await above.snapshot()) if self._states is None else self._states
                begun = above.branch(self._id)
                try:
                    await begun.start_branch(states)
                except BaseException:  # also a cancellation: whoever asks again gets tools that stand where they stood
                    self._problems += await begun.close()
                    raise
                self._begun = begun
            return self._begun

    async def states(self) -> Mapping[str, Any]:
        """Return what its tools keep."""
        if self._begun is not None:
            return await self._begun.snapshot()
        return await (await session_of(self._above)).snapshot() if self._states is None else self._states

    async def close(self) -> list[str]:
        """Release its tools, if there are any; return what went wrong."""
        return [*self._problems, *(() if self._begun is None else await self._begun.close())]


async def session_of(tools: ToolSession | ToolBranch) -> ToolSession:
    """Return the tools of a conversation or of a fork of it."""
    return tools if isinstance(tools, ToolSession) else await tools.session()
