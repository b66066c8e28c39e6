"""The simulated server takes the time that its formula says."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from polyturn.core.generation import Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.engines.remote import EngineLostError
from polyturn.engines.simulated import SimulatedEngine, Speed
from polyturn.engines.virtual_time import run_virtual
from support.failing_engine import FailingEngine

SPEED = Speed(step_s=1.0, per_sequence_s=0.5, prefill_token_s=0.1, slots=2, kv_tokens=1000)


def ask(session: str, prompt: int = 10, turn: int = 0, **options: float) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{session}/{turn}",
        session_id=session,
        prompt_ids=np.zeros(prompt, np.int32),
        sampling=SamplingParams(max_tokens=500, stop_token_ids=(7,)),
        **options,
    )


async def timed(engine: SimulatedEngine, request: GenerateRequest) -> tuple[Completion, float]:
    completion = await engine.generate(request)
    return completion, asyncio.get_running_loop().time()


def test_sequence_takes_its_prefill_and_its_steps() -> None:
    completion, at = run_virtual(timed(SimulatedEngine(SPEED, plan=lambda r: 4), ask("a")))
    assert at == pytest.approx(10 * 0.1 + 4 * 1.5)
    assert completion.token_ids.tolist() == [0, 0, 0, 7]
    assert completion.finish_reason is FinishReason.STOP


def test_sequences_share_steps_and_wait_for_slots() -> None:
    async def main() -> list[float]:
        engine = SimulatedEngine(SPEED, plan=lambda r: 4)
        return [at for _, at in await asyncio.gather(*(timed(engine, ask(s)) for s in "abc"))]

    first, second, third = run_virtual(main())
    assert first == second == pytest.approx(2.0 + 4 * 2.0)
    assert third == pytest.approx(first + 1.0 + 4 * 1.5)


def test_a_request_joins_at_the_next_step() -> None:
    async def main() -> list[float]:
        engine = SimulatedEngine(SPEED, plan=lambda r: 4)
        one = asyncio.create_task(timed(engine, ask("a")))
        await asyncio.sleep(1.0 + 2.0)  # in its second step
        two = await timed(engine, ask("b"))
        return [(await one)[1], two[1]]

    one, two = run_virtual(main())
    assert one == pytest.approx(1.0 + 2 * 1.5 + 1.0 + 2 * 2.0)
    assert two == pytest.approx(one + 2 * 1.5)


def test_the_next_turn_computes_only_what_is_new() -> None:
    async def main() -> list[int]:
        engine = SimulatedEngine(SPEED, plan=lambda r: 4)
        first = await engine.generate(ask("a"))
        second = await engine.generate(ask("a", prompt=20, turn=1))
        await engine.end_session("a")
        third = await engine.generate(ask("a", prompt=30, turn=2))
        return [c.info["prefilled_tokens"] for c in (first, second, third)]

    assert run_virtual(main()) == [10, 6, 30]


def test_a_longer_context_makes_each_step_longer() -> None:
    speed = dataclasses.replace(SPEED, context_token_s=0.01)

    async def main() -> list[float]:
        engine = SimulatedEngine(speed, plan=lambda r: 4 if r.session_id == "a" else 2)
        return [at for _, at in await asyncio.gather(*(timed(engine, ask(s)) for s in "ab"))]

    long, short = run_virtual(main())
    both = 2 * 2.0 + 0.01 * (22 + 24)
    assert short == pytest.approx(2.0 + both)
    assert long == pytest.approx(2.0 + both + 2 * 1.5 + 0.01 * (13 + 14))


def test_partial_cache_block_is_computed_again() -> None:
    async def main() -> int:
        engine = SimulatedEngine(dataclasses.replace(SPEED, cache_block=8, request_s=1.0), plan=lambda r: 4)
        await engine.generate(ask("a"))
        second = await engine.generate(ask("a", prompt=20, turn=1))
        assert engine.busy_s == pytest.approx(2 * 1.0 + 0.1 * (10 + 12) + 8 * 1.5)
        return int(second.info["prefilled_tokens"])

    assert run_virtual(main()) == 20 - 8  # it had 14 tokens


def test_sequence_beyond_the_cache_is_put_back_and_finished() -> None:
    async def main() -> tuple[int, list[int]]:
        engine = SimulatedEngine(Speed(slots=2, kv_tokens=100), plan=lambda r: 60)
        done = await asyncio.gather(*(engine.generate(ask(s)) for s in "ab"))
        return engine.num_put_back, [len(c.token_ids) for c in done]

    assert run_virtual(main()) == (1, [60, 60])


def test_the_highest_priority_goes_first() -> None:
    async def main() -> tuple[float, float]:
        engine = SimulatedEngine(Speed(slots=1), plan=lambda r: 4)
        requests = [ask("x"), ask("low", priority=1.0), ask("high", priority=2.0)]
        _, low, high = await asyncio.gather(*(timed(engine, request) for request in requests))
        return low[1], high[1]

    low, high = run_virtual(main())
    assert high < low


def test_killed_and_hung_servers_lose_their_requests() -> None:
    async def main(fault: str) -> float:
        engine = FailingEngine(SPEED, plan=lambda r: 400, timeout_s=30.0)
        asyncio.get_running_loop().call_later(5.0, engine.kill if fault == "kill" else engine.hang)
        with pytest.raises(EngineLostError):
            await engine.generate(ask("a"))
        return asyncio.get_running_loop().time()

    assert run_virtual(main("kill")) == pytest.approx(5.0)
    assert run_virtual(main("hang")) == pytest.approx(35.0)


def test_abort_and_cancellation_free_their_slots() -> None:
    async def main() -> tuple[Completion, int]:
        engine = SimulatedEngine(SPEED, plan=lambda r: 400)
        running = asyncio.create_task(engine.generate(ask("a")))
        other = asyncio.create_task(engine.generate(ask("b")))
        await asyncio.sleep(2.0 + 2.0 * 3 + 0.5)
        await engine.abort("a/0")
        other.cancel()
        await asyncio.wait({other})
        return await running, engine.num_live

    completion, left = run_virtual(main())
    assert (len(completion.token_ids), completion.finish_reason, left) == (3, FinishReason.ABORT, 0)


def test_a_table_replaces_the_line() -> None:
    speed = Speed(table=((1, 1.0), (3, 2.0)))
    assert [speed.tau(b) for b in (1, 2, 3, 5)] == pytest.approx([1.0, 1.5, 2.0, 3.0])
    assert speed.best_token_s(3) == pytest.approx(2.0 / 3)
