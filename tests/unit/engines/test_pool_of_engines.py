"""The pool: the server and the order of turns, and lost servers."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

from polyturn.core.errors import EngineError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.engines.pool import EnginePool
from polyturn.engines.remote import EngineLostError
from polyturn.engines.replica import PooledRequest, Replica
from support.parts import virtual
from support.refusals import refuses_later
from support.timed_engine import RestartableEngine, TimedEngine
from support.virtual_time import run_virtual


def ask(session: str, turn: int = 0, prompt: int = 10) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{session}/{turn}",
        session_id=session,
        prompt_ids=np.zeros(prompt, np.int32),
        sampling=SamplingParams(max_tokens=10_000),
    )


def servers(count: int, length: int = 100, **options: Any) -> list[TimedEngine]:
    return [TimedEngine(plan=lambda r: length, name=f"s{i}", **options) for i in range(count)]


@virtual
async def test_turns_go_where_their_prefix_is() -> None:
    engines = servers(2)
    pool = EnginePool(engines)
    await asyncio.gather(*(pool.generate(ask(f"g/{i}")) for i in range(4)))
    await asyncio.gather(*(pool.generate(ask(f"g/{i}", turn=1, prompt=120)) for i in range(4)))
    assert [sorted(engine.served) for engine in engines] == [["g/0", "g/0", "g/2", "g/2"], ["g/1", "g/1", "g/3", "g/3"]]
    assert pool.admission.num_moved == 0


@virtual
async def test_requests_of_a_killed_server_are_redone_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engines = servers(2)
        pool = EnginePool(engines)
        asyncio.get_running_loop().call_later(0.3, engines[0].kill)
        answers = await asyncio.gather(*(pool.generate(ask(f"g/{i}")) for i in range(8)))
    assert [len(a.token_ids) for a in answers] == [100] * 8
    assert (pool.num_lost, [r.num_done for r in pool.replicas]) == (4, [0, 8])
    assert len(caplog.records) == 1
    assert "replica 0 is left out (EngineLostError: s0 was killed)" in caplog.text


@virtual
async def test_no_server_up_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engines = servers(2)
        pool = EnginePool(engines, patience_s=20.0)
        for engine in engines:
            engine.kill()
        await refuses_later(lambda: pool.generate(ask("g/0")), EngineLostError, "cannot be reached")
    said = [record.message for record in caplog.records if "no server is up" in record.message]
    wait = "; requests and weights wait up to 20 s for a server to come back (engine.patience_s)"
    each = "; ".join(f"replica {i}: EngineLostError: s{i} cannot be reached" for i in range(2))
    assert said == [f"no server is up ({each}){wait}"]


@virtual
async def test_hung_server_is_left_and_used_again_when_back() -> None:
    engines = servers(2, timeout_s=5.0)
    pool = EnginePool(engines, slots=1)
    engines[0].hang()
    await asyncio.gather(*(pool.generate(ask(f"g/{i}")) for i in range(4)))
    engines[0].restart()
    await asyncio.sleep(120)
    await asyncio.gather(*(pool.generate(ask(f"h/{i}")) for i in range(4)))
    done = [r.num_done for r in pool.replicas]
    assert pool.num_lost >= 1
    assert done[0] >= 1
    assert sum(done) == 8


@virtual
async def test_lost_server_is_tried_when_its_pause_ends() -> None:
    engines = [TimedEngine(token_s=0.1, plan=lambda r: 10_000, name=f"s{i}") for i in range(2)]
    pool = EnginePool(engines, slots=1)
    pool.replicas[0].pause_s = 60.0  # the longest, as behind many losses
    engines[0].kill()
    busy = asyncio.create_task(pool.generate(ask("g/0")))  # lost there, then a thousand seconds on the other one
    await asyncio.sleep(1)
    engines[0].restart()
    waiting = asyncio.create_task(pool.generate(ask("g/1")))
    await asyncio.sleep(60)
    running = list(pool.replicas[0].running)
    busy.cancel(), waiting.cancel()
    assert running == ["g/1/0"]


def test_request_waits_while_all_servers_are_down() -> None:
    async def main(returns: bool) -> Completion:
        engines = servers(1)
        pool = EnginePool(engines, patience_s=100.0, max_tries=50)
        engines[0].kill()
        if returns:
            asyncio.get_running_loop().call_later(20.0, engines[0].restart)
        return await pool.generate(ask("g/0"))

    assert len(run_virtual(main(True)).token_ids) == 100
    with pytest.raises(EngineLostError, match=r"no server was up|was lost"):
        run_virtual(main(False))


@virtual
async def test_patience_begins_when_no_server_is_up() -> None:
    engine = TimedEngine(plan=lambda r: 9_000 if r.session_id == "long" else 10, token_s=0.1)
    pool = EnginePool([engine], slots=1, patience_s=100.0)
    tasks = [asyncio.create_task(pool.generate(ask(name))) for name in ("long", "short")]
    await asyncio.sleep(500)  # the second one waits for its turn longer than the patience
    engine.kill()
    asyncio.get_running_loop().call_later(0.5, engine.restart)
    assert [len(completion.token_ids) for completion in await asyncio.gather(*tasks)] == [9_000, 10]


@virtual
async def test_server_restarted_with_old_weights_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    engines = servers(2)
    pool = EnginePool(engines)
    await pool.update_weights(3)
    engines[0].restart(version=0)
    answers = await asyncio.gather(*(pool.generate(ask(f"g/{i}")) for i in range(4)))
    assert [a.policy_versions[-1][1] for a in answers] == [3] * 4
    assert pool.num_stale == 2
    assert "replica 0 is left out (EngineError: it answers as policy version 0 and was sent 3)" in caplog.text


@virtual
async def test_abort_reaches_waiting_and_running_requests() -> None:
    pool = EnginePool(servers(1), slots=1)
    tasks = [asyncio.create_task(pool.generate(ask(f"g/{i}"))) for i in range(3)]
    await asyncio.sleep(0.1)
    await pool.abort("g/0/0")
    await pool.abort("g/1/0")
    tasks[2].cancel()
    done = await asyncio.gather(*tasks[:2])
    await asyncio.wait({tasks[2]})
    assert ([c.finish_reason for c in done], pool.replicas[0].load) == ([FinishReason.ABORT, FinishReason.ABORT], 0)


@virtual
async def test_abort_reaches_a_request_before_its_server_has_it() -> None:
    (engine,) = servers(1)
    pool = EnginePool([engine], slots=1)
    first, second = (asyncio.create_task(pool.generate(ask(f"g/{i}"))) for i in range(2))
    await asyncio.sleep(0.1)
    await engine.abort("g/0/0")
    aborted = asyncio.create_task(pool.abort("g/1/0"))  # runs after the first request has left its slot to the second one
    await asyncio.wait({first, second, aborted})
    assert (second.result().finish_reason, engine.served, pool.replicas[0].load) == (FinishReason.ABORT, ["g/0"], 0)


@virtual
async def test_abort_of_a_request_that_is_just_given_up_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, aborted = EnginePool(servers(1)), []

    async def give_up(waiting: PooledRequest) -> Replica:
        waiting.assigned.set_exception(EngineLostError("no server was up"))
        await pool.abort("g/0/0")  # before the request learns that it is lost
        aborted.append("g/0/0")
        return await waiting.assigned

    monkeypatch.setattr(pool.admission, "place", give_up)
    await refuses_later(lambda: pool.generate(ask("g/0")), EngineLostError, "no server was up")
    assert aborted == ["g/0/0"]


@virtual
async def test_aborted_request_of_a_lost_server_is_not_repeated() -> None:
    class Dying(TimedEngine):
        async def abort(self, request_id: str) -> None:
            self.kill()

    engines = [Dying(plan=lambda r: 100, name="s0"), *servers(1)]
    pool = EnginePool(engines)
    asked = asyncio.create_task(pool.generate(ask("g/0")))
    await asyncio.sleep(0.1)
    await pool.abort("g/0/0")
    completion = await asked
    assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.ABORT, 0)
    assert engines[1].served == []


@virtual
async def test_close_fails_requests_that_wait_for_a_lost_server() -> None:
    engine = RestartableEngine(dead_s=1e6)
    pool = EnginePool([engine], slots=1, patience_s=1e6)
    running, waiting = (asyncio.create_task(pool.generate(ask(f"g/{i}"))) for i in range(2))
    await asyncio.sleep(0.1)
    engine.fail()
    await asyncio.sleep(0.1)
    await pool.close()
    async with asyncio.timeout(60):
        for task in (running, waiting):
            await refuses_later(lambda task=task: task, EngineError, "pool was closed")  # type: ignore[misc]


@virtual
async def test_failed_close_of_a_server_leaves_none_open() -> None:
    class Broken(TimedEngine):
        async def close(self) -> None:
            raise EngineError("no cluster")

    class Slow(TimedEngine):
        async def close(self) -> None:
            await asyncio.sleep(20)
            await super().close()

    slow = Slow(plan=lambda request: 1)
    pool = EnginePool([Broken(plan=lambda request: 1), slow])
    await refuses_later(pool.close, EngineError, "no cluster")
    await refuses_later(lambda: slow.generate(ask("g/0")), EngineLostError, "cannot be reached")


@virtual
async def test_waiting_requests_go_in_the_order_of_arrival() -> None:
    (engine,) = servers(1)
    pool = EnginePool([engine], slots=1)
    await asyncio.gather(*(pool.generate(ask(session)) for session in ("b/1", "a/1", "b/2", "a/2")))
    assert engine.served == ["b/1", "a/1", "b/2", "a/2"]
