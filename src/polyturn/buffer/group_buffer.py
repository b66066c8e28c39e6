"""GroupBuffer: finished groups wait here, and staleness is bounded by slots that are freed only by new weights.

Before a group may start it needs a slot, which comes with a ticket. There are slots for the step that the live weights are
for and for `max_staleness` steps ahead of it; one step's worth is freed when new weights are live. So a group that starts
under version v is trained at the latest in step v + max_staleness, and no token's staleness passes the bound (I10): tokens
that are sampled later only have newer versions.

    tickets   0 1 2 3 | 4 5 6 7 | 8 9 10 11 | ...      two groups a step, `extra` 2: a wave of four for each step
    step 0    the first two that are complete; the others are left over

`extra` groups are started beyond those that a step trains on. The caller cuts off what is left over (waves). With `carries`
it stays for a later step: nothing is dropped, and a step waits only for groups that no later step could train.
With `extra` 0 every step trains its own tickets, in order, so that nothing depends on which group finished first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from polyturn.core.trajectory import TrajectoryGroup


@dataclass(slots=True, eq=False)
class Slot:
    """A group that has a slot."""

    ticket: int
    version: int
    """The live weights when it got the slot; all its tokens are of this version or a newer one."""
    group: TrajectoryGroup | None = None
    finished: int = -1
    """Number of groups that finished before it."""


class Taken(NamedTuple):
    """The groups that one step trains on."""

    groups: list[TrajectoryGroup]
    tickets: list[int]
    """Of the groups."""
    left: list[Slot]
    """Those that no step will train on any more; the ones that run are to be cut off."""


class GroupBuffer:
    """Slots for groups that may start, and a queue of finished groups."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int = 0,
        version: int = 0,
        extra: int = 0,
        carries: bool = False,
        pending: Sequence[int] = (),
    ) -> None:
        """Start before the step that trains the weights of `version`.

        Args:
            groups_per_step: How many groups a step trains on.
            max_staleness: By how many versions their tokens may be behind.
            version: The weights that are live.
            extra: How many groups are started beyond a step's.
            carries: Whether those that a step does not take stay for a later one.
            pending: Tickets that a run before this one granted and did not train, with `carries`; they are granted again.
        """
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.version = version
        self._extra = extra
        self._carries = carries and extra > 0
        self._step = version
        self._slots: dict[int, Slot] = {}
        self._again = list(pending)
        # Behind all that were granted: the trained ones, and those in `pending`.
        self._next = version * self.tickets_per_step + len(self._again)
        self._num_finished = 0
        self._changed = asyncio.Condition()

    @property
    def num_waiting(self) -> int:
        """Finished groups that no step has taken yet."""
        return sum(slot.group is not None for slot in self._slots.values())

    @property
    def tickets_per_step(self) -> int:
        """Number of tickets of each step."""
        return self.groups_per_step if self._carries else self.groups_per_step + self._extra

    @property
    def pending(self) -> list[int]:
        """Tickets below the next one that no step has trained, with `carries`: a run that goes on grants them again."""
        return sorted([*self._slots, *self._again]) if self._carries else []

    async def admit(self) -> int:
        """Wait for a slot and return its ticket, a running number."""
        async with self._changed:
            await self._changed.wait_for(self._has_slot)
            if self._again:  # first, because they are older than all that were not granted
                ticket = self._again.pop(0)
            else:
                ticket, self._next = self._next, self._next + 1
            self._slots[ticket] = Slot(ticket, self.version)
            return ticket

    async def put(self, ticket: int, group: TrajectoryGroup) -> None:
        """Add the finished group of `ticket`; one that no step needs any more is dropped."""
        async with self._changed:
            # Its wave may be over by now, and what was cut off has no slot any more.
            if (slot := self._slots.get(ticket)) is not None:
                slot.group, slot.finished = group, self._num_finished
                self._num_finished += 1
                self._changed.notify_all()

    async def take(self) -> Taken:
        """Wait for one step's groups and return them in the order of their tickets."""
        async with self._changed:
            chosen: list[Slot] | None = None

            def is_ready() -> bool:
                nonlocal chosen
                chosen = self._due() if self._carries else self._of_wave()
                return chosen is not None

            await self._changed.wait_for(is_ready)
            assert chosen is not None
            # By ticket, so that the order of samples in a step does not depend on which group finished first.
            chosen.sort(key=lambda slot: slot.ticket)
            groups = [slot.group for slot in chosen if slot.group is not None]
            for slot in chosen:
                del self._slots[slot.ticket]
            left: list[Slot] = []
            if not self._carries:
                end = (self._step + 1) * self.tickets_per_step
                left = [self._slots.pop(ticket) for ticket in sorted(self._slots) if ticket < end]
                self._next = max(self._next, end)
            self._step += 1
            return Taken(groups, [slot.ticket for slot in chosen], left)

    async def advance(self, version: int) -> None:
        """Free the slots of one step: the weights of `version` are live."""
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    def _has_slot(self) -> bool:
        # What is carried over keeps its slot, so that slots and not tickets are counted: a run ahead is bounded by them.
        if self._carries:
            ahead = self._step * self.groups_per_step + len(self._slots)
            return ahead < (self.version + 1) * self.groups_per_step + self._extra
        return self._next < (self.version + 1 + self.max_staleness) * self.tickets_per_step

    def _of_wave(self) -> list[Slot] | None:
        """Return the first complete groups of the step's own tickets; None while there are too few."""
        end = (self._step + 1) * self.tickets_per_step
        done = [slot for slot in self._slots.values() if slot.ticket < end and slot.group is not None]
        if len(done) < self.groups_per_step:
            return None
        return sorted(done, key=lambda slot: slot.finished)[: self.groups_per_step]

    def _due(self) -> list[Slot] | None:
        """Return the first complete groups, and among them as many old ones as must not wait; None while there are too few.

        Of those that can be trained in the next j + 1 steps at the latest, all but j steps' worth must be trained now.
        """
        slots = sorted(self._slots.values(), key=lambda slot: (slot.group is None, slot.finished))
        done = [slot for slot in slots if slot.group is not None]
        if len(done) < self.groups_per_step:
            return None
        chosen: list[Slot] = []
        # The most urgent first: later = 0 are those that no step after this one may train.
        for later in range(self.max_staleness + 1):
            oldest = self._step + later - self.max_staleness
            old = sum(slot.version <= oldest for slot in slots)
            need = old - later * self.groups_per_step - sum(slot.version <= oldest for slot in chosen)
            if need > 0:
                due = [slot for slot in done if slot.version <= oldest and slot not in chosen][:need]
                if len(due) < need:  # one that must be trained now still runs, and the step waits for it
                    return None
                chosen += due
        chosen += [slot for slot in done if slot not in chosen][: self.groups_per_step - len(chosen)]
        return chosen
