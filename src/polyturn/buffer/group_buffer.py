"""GroupBuffer: a queue of finished groups, which bounds staleness by slots that only new weights free.

A group needs a slot, with a ticket, before it may start. There are slots for the step that trains the live weights and for
`max_staleness` steps after it. (With `carries`, there are slots for that step and for `extra` more groups.) New weights
free the slots of one step. So a group that starts under version v is trained in step v + max_staleness at the latest, and no
token exceeds the bound of staleness (I10): tokens sampled later have newer versions.

    tickets   0 1 2 3 | 4 5 6 7 | 8 9 10 11 | ...      two groups a step, `extra` 2: a wave of four tickets a step
    step 0    takes the first two finished groups; the others are left over

`extra` groups are started in addition to those that a step trains on. Without `carries`, every step starts that many, and
the caller cuts off the groups that the step leaves over (waves). With `carries`, the groups that are left over keep their
slots for a later step: no group is dropped, and a step waits only for groups that no later step could train. With `extra` 0
every step trains the groups of its tickets, in order, so the order in which groups finish does not matter.
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
    """Version of the live weights when the group got its slot; all its tokens have this version or a newer one."""
    group: TrajectoryGroup | None = None
    finished: int = -1
    """Number of groups that finished before this one; -1 while it runs."""


class Taken(NamedTuple):
    """The groups that one step trains on."""

    groups: list[TrajectoryGroup]
    tickets: list[int]
    """The ticket of each group."""
    left: list[Slot]
    """Slots of groups that no step will train; the caller cuts off the groups that still run."""


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
        """Make a buffer whose first step trains the weights of `version`.

        Args:
            groups_per_step: How many groups a step trains on.
            max_staleness: Largest staleness of a token, in versions.
            version: Version of the live weights.
            extra: How many groups are started in addition to those that a step trains on.
            carries: Whether groups that a step does not take stay for a later step.
            pending: With `carries`, the tickets that an earlier run granted and did not train; they are granted again.
        """
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.version = version
        self._extra = extra
        self._carries = carries and extra > 0
        self._step = version
        self._slots: dict[int, Slot] = {}
        self._again = list(pending)
        # After all tickets granted so far, which are trained or in `pending`.
        self._next = version * self.tickets_per_step + len(self._again)
        self._num_finished = 0
        self._changed = asyncio.Condition()

    @property
    def num_waiting(self) -> int:
        """Number of finished groups that no step has taken yet."""
        return sum(slot.group is not None for slot in self._slots.values())

    @property
    def tickets_per_step(self) -> int:
        """Number of tickets for each step."""
        return self.groups_per_step if self._carries else self.groups_per_step + self._extra

    @property
    def pending(self) -> list[int]:
        """With `carries`, the granted tickets that no step has trained; a resumed run grants them again."""
        return sorted([*self._slots, *self._again]) if self._carries else []

    async def admit(self) -> int:
        """Wait for a slot and return its ticket."""
        async with self._changed:
            await self._changed.wait_for(self._has_slot)
            if self._again:  # first, because they are older than all new tickets
                ticket = self._again.pop(0)
            else:
                ticket, self._next = self._next, self._next + 1
            self._slots[ticket] = Slot(ticket, self.version)
            return ticket

    async def put(self, ticket: int, group: TrajectoryGroup) -> None:
        """Add the finished group of `ticket`; drop it if no step needs it any more."""
        async with self._changed:
            # A group that still ran when its wave ended has lost its slot.
            if (slot := self._slots.get(ticket)) is not None:
                slot.group, slot.finished = group, self._num_finished
                self._num_finished += 1
                self._changed.notify_all()

    async def take(self) -> Taken:
        """Wait for the groups of one step and return them in the order of their tickets."""
        async with self._changed:
            chosen: list[Slot] | None = None

            def is_ready() -> bool:
                nonlocal chosen
                chosen = self._due() if self._carries else self._of_wave()
                return chosen is not None

            await self._changed.wait_for(is_ready)
            assert chosen is not None
            # Sort by ticket, so that the order of samples in a step does not depend on which group finished first.
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
        """Free the slots of one step, because the weights of `version` are live."""
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    def _has_slot(self) -> bool:
        # A group that is carried over keeps its slot, so slots, not tickets, bound how far the rollout runs ahead.
        if self._carries:
            ahead = self._step * self.groups_per_step + len(self._slots)
            return ahead < (self.version + 1) * self.groups_per_step + self._extra
        return self._next < (self.version + 1 + self.max_staleness) * self.tickets_per_step

    def _of_wave(self) -> list[Slot] | None:
        """Return the first groups to finish among the step's tickets; None while there are too few."""
        end = (self._step + 1) * self.tickets_per_step
        done = [slot for slot in self._slots.values() if slot.ticket < end and slot.group is not None]
        if len(done) < self.groups_per_step:
            return None
        return sorted(done, key=lambda slot: slot.finished)[: self.groups_per_step]

    def _due(self) -> list[Slot] | None:
        """Return the groups of the next step: those that must be trained now, then the first to finish; None while the
        step must wait.

        For each j, count the groups that must be trained in this step or the j steps after it. The j later steps can train
        only j * groups_per_step of them, so this step must train the others.
        """
        slots = sorted(self._slots.values(), key=lambda slot: (slot.group is None, slot.finished))
        done = [slot for slot in slots if slot.group is not None]
        if len(done) < self.groups_per_step:
            return None
        chosen: list[Slot] = []
        # The most urgent first: with later = 0, the groups that no later step may train.
        for later in range(self.max_staleness + 1):
            oldest = self._step + later - self.max_staleness
            old = sum(slot.version <= oldest for slot in slots)
            need = old - later * self.groups_per_step - sum(slot.version <= oldest for slot in chosen)
            if need > 0:
                due = [slot for slot in done if slot.version <= oldest and slot not in chosen][:need]
                if len(due) < need:  # a group that must be trained now still runs, so the step waits for it
                    return None
                chosen += due
        chosen += [slot for slot in done if slot not in chosen][: self.groups_per_step - len(chosen)]
        return chosen
