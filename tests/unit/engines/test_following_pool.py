"""Rollout workers that send requests to the servers of the controller's pool directly."""

from __future__ import annotations

import asyncio

from polyturn.core.errors import EngineError, EngineLostError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.engines.following import FollowingPool, PoolView
from polyturn.engines.pool import WATCH_S, EnginePool
from polyturn.engines.remote import FOREIGN_VERSION
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.vllm import VllmEngine
from support.parts import virtual
from support.refusals import refuses_later
from support.timed_engine import RestartableEngine

LATER = WATCH_S + 60


def server() -> RestartableEngine:
    """Return a server that keeps its weights; the controller and the worker may share its client."""
    return RestartableEngine(dead_s=0.0, keeps_weights=True)


def ask(name: str) -> GenerateRequest:
    return GenerateRequest(request_id=name, session_id=name, prompt_ids=[1], sampling=SamplingParams(max_tokens=1))


def controller_and_worker(*servers: RestartableEngine) -> tuple[EnginePool, FollowingPool]:
    """Return both pools over the servers; the worker hears of every change at once."""
    controller, worker = EnginePool(servers), FollowingPool(servers)
    controller.on_change = lambda: worker.follow(PoolView.of(controller))
    return controller, worker


@virtual
async def test_dead_server_is_noticed_without_a_request_of_the_controller() -> None:
    controller, worker = controller_and_worker(engine := server())
    await controller.update_weights(1)
    watching = asyncio.create_task(controller.watch(controller.replicas[0]))
    engine.fail()
    completion = await worker.generate(ask("a"))
    assert completion.policy_versions == ((0, 1),) and engine.num_restarts == 1
    assert worker.num_redone == 1
    assert controller.replicas[0].is_live and worker.replicas[0].is_live
    watching.cancel()


@virtual
async def test_server_that_does_not_answer_at_the_start_comes_later() -> None:
    controller, worker = controller_and_worker(server(), late := server())
    late.fail()
    await controller.start()
    assert [replica.is_live for replica in worker.replicas] == [True, False]
    await asyncio.sleep(LATER)
    assert late.num_restarts == 1 and worker.replicas[1].is_live


@virtual
async def test_server_that_cannot_start_is_reported() -> None:
    class Refusing(RestartableEngine):
        async def start(self) -> None:
            raise EngineError("no such interpreter")

    await refuses_later(lambda: EnginePool([server(), Refusing()]).start(), EngineError, "no such interpreter")


@virtual
async def test_workers_do_not_all_start_with_the_same_server() -> None:
    servers = [server(), server()]
    await asyncio.gather(*(FollowingPool(servers).generate(ask(f"{i}")) for i in range(64)))
    assert all(one.served for one in servers)


@virtual
async def test_worker_brings_no_server_back() -> None:
    dead, well = server(), server()
    _, worker = controller_and_worker(dead, well)
    dead.fail()
    await asyncio.gather(*(worker.generate(ask(f"{i}")) for i in range(8)))
    await asyncio.sleep(LATER)
    assert dead.num_restarts == 0 and [replica.num_done for replica in worker.replicas] == [0, 8]


@virtual
async def test_excluded_server_gets_no_request_of_a_worker() -> None:
    controller, worker = controller_and_worker(server(), server())
    await controller.update_weights(1)
    controller.exclude(controller.replicas[0], EngineError("its weights are wrong"))
    await asyncio.gather(*(worker.generate(ask(f"{i}")) for i in range(8)))
    assert [replica.num_done for replica in worker.replicas] == [0, 8]
    await asyncio.sleep(LATER)
    await controller.update_weights(2)
    await asyncio.gather(*(worker.generate(ask(f"later {i}")) for i in range(8)))
    assert worker.replicas[0].num_done > 0, "it took the next weights"


@virtual
async def test_request_that_older_weights_answered_is_repeated() -> None:
    behind, right = server(), server()
    controller, worker = controller_and_worker(behind, right)
    await controller.update_weights(3)
    behind.restart(version=0)  # as after a restart that neither pool has noticed
    answers = await asyncio.gather(*(worker.generate(ask(f"{i}")) for i in range(8)))
    assert {one.policy_versions for one in answers} == {((0, 3),)} and worker.num_stale > 0


@virtual
async def test_answer_of_newer_weights_is_kept() -> None:
    controller, worker = controller_and_worker(engine := server())
    await controller.update_weights(1)
    await engine.update_weights(2)
    assert (await worker.generate(ask("a"))).policy_versions == ((0, 2),) and worker.num_stale == 0


@virtual
async def test_older_view_is_ignored() -> None:
    controller, worker = controller_and_worker(server())
    before = PoolView.of(controller)
    await controller.update_weights(4)
    worker.follow(before)
    assert worker.replicas[0].version == 4


@virtual
async def test_requests_fail_once_all_servers_are_gone() -> None:
    controller, worker = controller_and_worker(server())
    controller.replicas[0].is_gone = True
    worker.follow(PoolView.of(controller))
    await refuses_later(lambda: worker.generate(ask("a")), EngineLostError, "all servers are lost for good")
    await refuses_later(lambda: worker.update_weights(1), EngineError, "only the controller can")
    controller.replicas[0].why = "the actor died"
    await refuses_later(lambda: controller.update_weights(1), EngineLostError, "the actor died")


@virtual
async def test_requests_of_workers_are_counted_by_the_controller() -> None:
    dead, well = server(), server()
    controller, worker = controller_and_worker(dead, well)
    dead.fail()
    await asyncio.gather(*(worker.generate(ask(f"{i}")) for i in range(8)))
    controller.uses["worker 0"] = worker.use()
    metrics = controller.read_metrics()
    assert metrics["engine/lost"] == metrics["engine/redone"] == worker.num_lost > 0
    controller.uses["worker 0"] = worker.use()
    assert controller.read_metrics()["engine/lost"] == 0, "since the last call"


async def test_client_of_a_worker_reads_versions_from_names() -> None:
    ours, theirs = (VllmEngine(url, ServedModel(vocab_size=8)) for url in ("http://a:1", ""))
    ours._updates, ours.version = 2, 2
    controller, worker = EnginePool([ours]), FollowingPool([theirs])
    worker.follow(PoolView.of(controller))
    assert theirs.url == "http://a:1" and theirs.version_of(ours.tag(2)) == 2
    assert theirs.version_of("default") == FOREIGN_VERSION
