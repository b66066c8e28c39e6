"""Slots bound staleness, whatever the schedule (I10); groups leave in the order of their tickets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


async def test_a_group_starts_only_with_a_slot_and_new_weights_free_one_steps_worth():
    buffer = GroupBuffer(groups_per_step=2)
    assert [await buffer.admit() for _ in range(2)] == [0, 1]
    assert await is_blocked(buffer.admit())
    await buffer.advance(1)
    assert [await buffer.admit() for _ in range(2)] == [2, 3]
    assert await is_blocked(buffer.admit())


async def test_staleness_s_lets_s_steps_run_ahead():
    buffer = GroupBuffer(groups_per_step=2, max_staleness=2)
    assert [await buffer.admit() for _ in range(6)] == list(range(6))
    assert await is_blocked(buffer.admit())


async def test_groups_are_taken_in_the_order_of_their_tickets_whatever_order_they_finish_in():
    buffer = GroupBuffer(groups_per_step=2, max_staleness=1)
    tickets = [await buffer.admit() for _ in range(4)]
    for ticket in (3, 1, 2):
        await buffer.put(ticket, group(ticket))
    assert await is_blocked(buffer.take()), "group 0 is missing, and nobody overtakes it"
    assert buffer.num_waiting == 3
    await buffer.put(tickets[0], group(0))
    assert [g.id for g in (await buffer.take()).groups] == ["g0", "g1"]
    assert [g.id for g in (await buffer.take()).groups] == ["g2", "g3"]
    assert buffer.num_waiting == 0


async def test_a_take_that_is_cancelled_loses_nothing():
    buffer = GroupBuffer(groups_per_step=1)
    ticket = await buffer.admit()
    assert await is_blocked(buffer.take())
    await buffer.put(ticket, group(ticket))
    assert [g.id for g in (await buffer.take()).groups] == ["g0"]


async def test_a_buffer_that_starts_at_a_version_goes_on_with_that_versions_tickets():
    buffer = GroupBuffer(groups_per_step=3, version=4)
    assert [await buffer.admit() for _ in range(3)] == [12, 13, 14]
    assert await is_blocked(buffer.admit())


@given(
    data=st.data(),
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    num_steps=st.integers(1, 6),
)
def test_staleness_never_passes_its_bound(data: Any, groups_per_step: int, max_staleness: int, num_steps: int):
    """I10: whatever order groups start, finish and are trained in; a group of step s starts under s - bound or later."""

    async def run() -> None:
        buffer = GroupBuffer(groups_per_step=groups_per_step, max_staleness=max_staleness)
        started_under: dict[int, int] = {}
        live: list[int] = []
        admitting: asyncio.Task[int] | None = None
        step = 0
        while step < num_steps:
            if admitting is None:
                admitting = asyncio.ensure_future(buffer.admit())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            wanted = range(step * groups_per_step, (step + 1) * groups_per_step)
            can_train = all(t in started_under and t not in live for t in wanted)
            choices = ["start"] * admitting.done() + ["finish"] * bool(live) + ["train"] * can_train
            assert choices, "nothing can go on: the buffer is stuck"
            chosen = data.draw(st.sampled_from(choices))
            if chosen == "start":
                ticket = admitting.result()
                started_under[ticket] = buffer.version
                live.append(ticket)
                admitting = None
            elif chosen == "finish":
                ticket = live.pop(data.draw(st.integers(0, len(live) - 1)))
                await buffer.put(ticket, group(ticket))
            else:
                taken = await buffer.take()
                assert not taken.left
                assert [g.id for g in taken.groups] == [f"g{t}" for t in wanted]
                assert all(0 <= step - started_under[t] <= max_staleness for t in wanted)
                step += 1
                await buffer.advance(step)
        if admitting is not None:
            admitting.cancel()

    asyncio.run(run())
