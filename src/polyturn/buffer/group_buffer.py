"""GroupBuffer: finished groups wait here, and staleness is bounded by slots that are freed only by new weights.

Before a group may start it needs a slot. There are (1 + max_staleness) steps' worth of slots ahead of the version that is
live, and one step's worth is freed when new weights are live. So a group that starts under version v is trained at the
latest in step v + max_staleness, and its staleness never passes the bound (I10). With max_staleness = 0 this is
synchronous training: all groups of a step start, all are trained, new weights, and again.

    slots granted so far  <=  (version + 1 + max_staleness) * groups_per_step
"""

from __future__ import annotations

import asyncio

from polyturn.core.trajectory import TrajectoryGroup


class GroupBuffer:
    """Slots for groups that may start, and a queue of those that are done."""

    def __init__(self, *, groups_per_step: int, max_staleness: int = 0, version: int = 0) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.version = version
        self._granted = version * groups_per_step
        self._done: dict[int, TrajectoryGroup] = {}
        self._next = self._granted
        self._changed = asyncio.Condition()

    @property
    def num_waiting(self) -> int:
        """Groups that are done and not yet taken."""
        return len(self._done)

    async def admit(self) -> int:
        """Wait for a slot and return its ticket, a running number."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._granted < self._num_slots)
            ticket = self._granted
            self._granted += 1
            return ticket

    async def put(self, ticket: int, group: TrajectoryGroup) -> None:
        """Hand in the group that was run on `ticket`."""
        async with self._changed:
            self._done[ticket] = group
            self._changed.notify_all()

    async def take(self) -> list[TrajectoryGroup]:
        """Wait for one step's groups and return them in the order of their tickets.

        Tickets are consumed in order, whatever order groups finish in, so that nothing that is trained on depends on
        timing, and long episodes are not left behind.
        """
        wanted = range(self._next, self._next + self.groups_per_step)
        async with self._changed:
            await self._changed.wait_for(lambda: all(ticket in self._done for ticket in wanted))
            self._next = wanted.stop
            return [self._done.pop(ticket) for ticket in wanted]

    async def advance(self, version: int) -> None:
        """Free the slots of one step: the weights of `version` are live."""
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    @property
    def _num_slots(self) -> int:
        return (self.version + 1 + self.max_staleness) * self.groups_per_step
