"""A buffer that takes the first complete groups: dropped groups, carried ones, and the bound on staleness."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polyturn.buffer.drop_stats import DropStats, deciles
from polyturn.buffer.group_buffer import GroupBuffer
from polyturn.buffer.staleness import Replay, check_staleness
from polyturn.core.errors import LifecycleError
from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import Segment, Span, SpanSource, Trajectory, TrajectoryGroup
from polyturn.testing.episodes import task
from support.refusals import refuses

TASK = task()


def group(name: str, *, version: int = 0, lengths: tuple[int, ...] = (2,)) -> TrajectoryGroup:
    def trajectory(index: int, length: int) -> Trajectory:
        span = Span(
            ids=np.arange(length, dtype=np.int32),
            source=SpanSource.SAMPLED,
            turn=0,
            logprobs=np.zeros(length, np.float32),
            policy_version=version,
        )
        segment = Segment(spans=(span,))
        return Trajectory(id=f"{name}/{index}", task=TASK, segments=(segment,), turns=(), stop_reason=StopReason.STOP)

    return TrajectoryGroup(id=name, task=TASK, trajectories=tuple(trajectory(i, n) for i, n in enumerate(lengths)))


async def test_step_takes_the_first_complete_groups() -> None:
    buffer = GroupBuffer(groups_per_step=2, extra=2)
    assert [await buffer.admit() for _ in range(4)] == [0, 1, 2, 3]
    await buffer.put(3, group("g3"))
    taking = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    assert not taking.done()
    await buffer.put(1, group("g1"))
    taken = await taking
    assert [g.id for g in taken.groups] == ["g1", "g3"] and [f.ticket for f in taken.left] == [0, 2]
    await buffer.put(0, group("g0"))  # too late to be taken
    assert buffer.num_waiting == 0
    await buffer.advance(1)
    assert await buffer.admit() == 4


async def test_carried_groups_are_trained_before_they_are_too_old() -> None:
    buffer = GroupBuffer(groups_per_step=2, extra=2, carries=True, max_staleness=1)
    assert [await buffer.admit() for _ in range(4)] == [0, 1, 2, 3]
    await buffer.put(3, group("g3"))
    await buffer.put(2, group("g2"))
    taken = await buffer.take()
    assert [g.id for g in taken.groups] == ["g2", "g3"] and taken.left == []
    assert buffer.pending == [0, 1]
    await buffer.advance(1)
    assert [await buffer.admit() for _ in range(2)] == [4, 5]
    for ticket in (4, 5):
        await buffer.put(ticket, group(f"g{ticket}"))
    taking = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    assert not taking.done(), "groups 0 and 1 are of version 0: a later step could not train them"
    await buffer.put(0, group("g0"))
    await buffer.put(1, group("g1"))
    assert [g.id for g in (await taking).groups] == ["g0", "g1"]


async def test_resumed_buffer_grants_pending_tickets_first() -> None:
    buffer = GroupBuffer(groups_per_step=2, extra=2, carries=True, max_staleness=1, version=3, pending=[4, 7])
    assert [await buffer.admit() for _ in range(4)] == [4, 7, 8, 9]


@given(
    data=st.data(),
    groups_per_step=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
    extra=st.integers(0, 6),
    carries=st.booleans(),
)
def test_staleness_is_bounded_and_the_buffer_never_sticks(
    data: Any, groups_per_step: int, max_staleness: int, extra: int, carries: bool
):
    """I10, for every order in which groups start, finish and are trained; carried over, every ticket is trained once."""
    num_steps = 5
    if carries:
        extra = min(extra, max_staleness * groups_per_step)
    carries = carries and extra > 0

    async def run() -> None:
        buffer = GroupBuffer(groups_per_step=groups_per_step, max_staleness=max_staleness, extra=extra, carries=carries)
        num_tickets = num_steps * buffer.tickets_per_step
        started: dict[int, int] = {}
        live: list[int] = []
        trained: list[int] = []
        admitting: asyncio.Task[int] | None = None
        taking: asyncio.Task[Any] | None = None
        step = 0
        while step < num_steps:
            if admitting is None and len(started) < num_tickets:
                admitting = asyncio.ensure_future(buffer.admit())
            if taking is None:
                taking = asyncio.ensure_future(buffer.take())
            for _ in range(3):
                await asyncio.sleep(0)
            choices = ["start"] * (admitting is not None and admitting.done()) + ["finish"] * bool(live)
            choices += ["train"] * taking.done()
            assert choices, "nothing can go on: the buffer is stuck"
            chosen = data.draw(st.sampled_from(choices))
            if chosen == "start":
                ticket = admitting.result()
                started[ticket] = buffer.version
                live.append(ticket)
                admitting = None
            elif chosen == "finish":
                ticket = live.pop(data.draw(st.integers(0, len(live) - 1)))
                await buffer.put(ticket, group(f"g{ticket}", version=started[ticket]))
            else:
                taken = taking.result()
                taking = None
                assert len(taken.groups) == groups_per_step
                check_staleness(taken.groups, step=step, max_staleness=max_staleness)
                if not extra:
                    assert [int(g.id[1:]) for g in taken.groups] == [
                        step * groups_per_step + i for i in range(groups_per_step)
                    ]
                trained += [int(g.id[1:]) for g in taken.groups]
                live = [ticket for ticket in live if ticket not in {f.ticket for f in taken.left}]
                step += 1
                await buffer.advance(step)
        assert len(set(trained)) == len(trained)
        if carries:
            assert sorted(trained) == list(range(num_tickets)), "nothing was left out"
        for waiting in (admitting, taking):
            if waiting is not None:
                waiting.cancel()

    asyncio.run(run())


def test_token_that_is_too_old_ends_the_run() -> None:
    check_staleness([group("g7", version=4)], step=5, max_staleness=1)
    refuses(
        lambda: check_staleness([group("g7", version=3)], step=5, max_staleness=1),
        LifecycleError,
        "g7 ",
        " version 3",
        " step 5",
    )


def test_replay_draws_young_groups_once_by_seed() -> None:
    replays = [Replay(max_staleness=1, seed=4) for _ in range(2)]
    for replay in replays:
        replay.add([group(f"g{i}", version=0) for i in range(4)])
        assert replay.draw(0, step=1) == []
    first, second = ([g.id for g in replay.draw(2, step=1)] for replay in replays)
    assert first == second and len(set(first)) == 2
    replays[0].add([group("new", version=1)])
    assert [g.id for g in replays[0].draw(9, step=2)] == ["new"], "those of version 0 are two versions behind"
    assert len(replays[0]) == 0


def test_deciles_of_drops_show_a_bias() -> None:
    every = list(range(100))
    assert deciles(every[::2], of=every) == [5] * 10
    assert deciles(every[80:], of=every) == [0] * 8 + [10, 10]
    assert deciles([7, 7], of=[7] * 10) == [0, 0, 0, 0, 0, 2, 0, 0, 0, 0]
    assert deciles([], of=[]) == [0] * 10


def test_left_out_trajectory_of_a_trained_group_counts() -> None:
    """Long answers fail, are cut and are rejected more often than short ones: that is a bias like any other."""
    taken = [group(f"g{i}", lengths=(10, 1000)) for i in range(5)]
    metrics = DropStats().read(taken, left_out={f"g{i}/1" for i in range(5)})
    assert [metrics[f"buffer/dropped_decile_{i}"] for i in range(10)] == [0] * 7 + [5, 0, 0]


def test_drops_are_counted_by_reason_and_step() -> None:
    drops = DropStats()
    drops.add([3, 9], reason="left_over")
    drops.add_group(group("g", lengths=(4, 4)), reason="resampled")
    taken = [group("a", lengths=(1, 2)), group("b", lengths=(5, 6))]
    metrics = drops.read(taken, left_out={t.id for t in taken[0].trajectories})
    assert metrics["buffer/groups_left_over"] == metrics["buffer/groups_resampled"] == 1
    assert metrics["tokens/dropped_left_over"] == 12 and metrics["tokens/dropped_resampled"] == 8
    assert sum(metrics[f"buffer/dropped_decile_{i}"] for i in range(10)) == 6
    assert sum(drops.read([]).values()) == 0
