"""Slots bound staleness, whatever the schedule; groups leave in the order of their tickets.

`test_first_done.py` checks the bound (I10) in every order in which groups start, finish and are trained.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polyturn.buffer.group_buffer import GroupBuffer
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.testing.episodes import task


def group(ticket: int) -> TrajectoryGroup:
    return TrajectoryGroup(id=f"g{ticket}", task=task(), trajectories=())


async def is_blocked(work: Any) -> bool:
    """Return whether `work` waits for something that has not happened; it is cancelled if so."""
    running = asyncio.ensure_future(work)
    for _ in range(5):
        await asyncio.sleep(0)
    if running.done():
        return False
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    return True


async def test_group_starts_with_a_slot_and_new_weights_free_slots() -> None:
    buffer = GroupBuffer(groups_per_step=2)
    assert [await buffer.admit() for _ in range(2)] == [0, 1]
    assert await is_blocked(buffer.admit())
    await buffer.advance(1)
    assert [await buffer.admit() for _ in range(2)] == [2, 3]
    assert await is_blocked(buffer.admit())

    buffer = GroupBuffer(groups_per_step=2, max_staleness=2)
    assert [await buffer.admit() for _ in range(6)] == list(range(6))
    assert await is_blocked(buffer.admit())


async def test_groups_are_taken_in_the_order_of_their_tickets() -> None:
    buffer = GroupBuffer(groups_per_step=2, max_staleness=1)
    tickets = [await buffer.admit() for _ in range(4)]
    for ticket in (3, 1, 2):
        await buffer.put(ticket, group(ticket))
    assert await is_blocked(buffer.take()), "group 0 is missing, and no other group overtakes it"
    assert buffer.num_waiting == 3
    await buffer.put(tickets[0], group(0))
    assert [g.id for g in (await buffer.take()).groups] == ["g0", "g1"]
    assert [g.id for g in (await buffer.take()).groups] == ["g2", "g3"]
    assert buffer.num_waiting == 0


async def test_cancelled_take_loses_nothing() -> None:
    buffer = GroupBuffer(groups_per_step=1)
    ticket = await buffer.admit()
    assert await is_blocked(buffer.take())
    await buffer.put(ticket, group(ticket))
    assert [g.id for g in (await buffer.take()).groups] == ["g0"]


async def test_buffer_starts_with_the_tickets_of_its_version() -> None:
    buffer = GroupBuffer(groups_per_step=3, version=4)
    assert [await buffer.admit() for _ in range(3)] == [12, 13, 14]
    assert await is_blocked(buffer.admit())
