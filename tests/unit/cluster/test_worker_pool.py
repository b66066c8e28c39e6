"""The gates of rollout workers that send requests to the servers of the controller's pool directly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polyturn.cluster.worker import RolloutWorker
from polyturn.cluster.worker_pool import RemoteWorker, WorkerLostError, WorkerPool
from polyturn.core.trajectory import Trajectory
from polyturn.engines.following import FollowingPool
from polyturn.engines.pool import EnginePool
from polyturn.engines.update_gate import UpdateGate, UpdateMode
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.testing.episodes import scripted_context, task
from support.parts import virtual
from support.timed_engine import RestartableEngine

COMPLETION_S = 0.8
"""Seconds of a completion of `RestartableEngine`: 100 tokens of 8 ms."""


class LocalWorker(RemoteWorker):
    """A worker in this process, over the servers of the controller."""

    def __init__(self, name: str, servers: list[RestartableEngine], mode: UpdateMode) -> None:
        super().__init__(name)
        self.is_dead = self.is_ended = False
        self._worker = RolloutWorker(lambda journal: RolloutPool(context_over(FollowingPool(servers), mode)))

    async def call(self, method: str, *arguments: Any) -> Any:
        if self.is_dead:
            raise WorkerLostError(f"{self.name} was killed")
        return await getattr(self._worker, method)(*arguments)

    async def end(self) -> None:
        self.is_ended = True


def context_over(engine: EnginePool, mode: UpdateMode) -> Any:
    context = scripted_context([])
    context.engine = UpdateGate(engine, mode=mode)
    return context


def pool_of_workers(mode: UpdateMode) -> tuple[WorkerPool, EnginePool, list[LocalWorker]]:
    servers = [RestartableEngine() for _ in range(2)]
    engines, workers = EnginePool(servers), [LocalWorker(f"worker {n}", servers, mode) for n in range(2)]
    context = context_over(engines, mode)
    return WorkerPool(workers, context, max_concurrent=8, max_failed_share=1.0, engines=engines), engines, workers


def run_groups(pool: WorkerPool, names: str = "ab") -> list[asyncio.Task[Any]]:
    specs = [GroupSpec(id=name, task=task(id=name), size=2) for name in names]
    return [asyncio.create_task(pool.run_one(spec)) for spec in specs]


async def trajectories_of(running: list[asyncio.Task[Any]]) -> list[Trajectory]:
    return [one for group in await asyncio.gather(*running) for one in group.trajectories]


def versions_of(trajectory: Trajectory) -> list[int]:
    assert trajectory.error is None
    return [span.policy_version for span in trajectory.segments[0].spans if span.logprobs is not None]


@virtual
async def test_weights_wait_for_the_requests_of_all_workers() -> None:
    pool, engines, _ = pool_of_workers("wait")
    servers = [replica.engine for replica in engines.replicas if isinstance(replica.engine, RestartableEngine)]
    running = run_groups(pool)
    await asyncio.sleep(COMPLETION_S / 2)
    async with pool.closed():
        later = run_groups(pool, "cd")
        await asyncio.sleep(COMPLETION_S / 2)
        assert sum(replica.num_done + replica.load for replica in engines.replicas) == 0, "workers send their own requests"
        assert sum(len(server.served) for server in servers) == 4, "the new groups wait"
        await engines.update_weights(1)
    assert [versions_of(one) for one in await trajectories_of(running)] == [[0]] * 4
    assert [versions_of(one) for one in await trajectories_of(later)] == [[1]] * 4


@virtual
async def test_cut_requests_of_workers_continue_with_new_weights() -> None:
    pool, engines, _ = pool_of_workers("abort_resume")
    running = run_groups(pool)
    await asyncio.sleep(COMPLETION_S / 2)
    async with pool.closed():
        await engines.update_weights(1)
    assert [versions_of(one) for one in await trajectories_of(running)] == [[0, 1]] * 4


@virtual
async def test_requests_run_again_after_a_failed_update() -> None:
    pool, _, _ = pool_of_workers("wait")
    running = run_groups(pool)
    await asyncio.sleep(COMPLETION_S / 2)
    with pytest.raises(ZeroDivisionError):
        async with pool.closed():
            raise ZeroDivisionError
    assert [versions_of(one) for one in await trajectories_of([*running, *run_groups(pool, "cd")])] == [[0]] * 8


@virtual
async def test_dead_worker_holds_no_update_up() -> None:
    pool, engines, workers = pool_of_workers("wait")
    running = run_groups(pool)
    await asyncio.sleep(COMPLETION_S / 2)
    workers[0].is_dead = True
    async with pool.closed():
        await engines.update_weights(1)
    assert len(await trajectories_of(running)) == 4


@virtual
async def test_lost_worker_is_ended() -> None:
    pool, _, workers = pool_of_workers("in_flight")
    workers[0].is_dead = True
    assert len(await trajectories_of(run_groups(pool))) == 4
    assert [worker.is_ended for worker in workers] == [True, False]
