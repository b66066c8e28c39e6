"""The gate between episodes and an engine: requests that are held back or cut while weights change."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from polyturn.core.generation import FinishReason, GenerateRequest, SamplingParams
from polyturn.engines.update_gate import UpdateGate, UpdateMode
from support.parts import virtual
from support.timed_engine import TimedEngine


def gate_and_engine(mode: UpdateMode) -> tuple[UpdateGate, TimedEngine]:
    engine = TimedEngine(plan=lambda request: 100, token_s=1.0)
    return UpdateGate(engine, mode=mode), engine


def ask(name: str) -> GenerateRequest:
    return GenerateRequest(request_id=name, session_id=name, prompt_ids=[1], sampling=SamplingParams(max_tokens=1000))


@pytest.mark.parametrize("mode", ["wait", "abort_resume"])
@virtual
async def test_abort_ends_a_request_that_is_held_back(mode: UpdateMode) -> None:
    gate, engine = gate_and_engine(mode)
    async with gate.closed():
        ended, kept = (asyncio.create_task(gate.generate(ask(name))) for name in ("ended", "kept"))
        await asyncio.sleep(1)
        await gate.abort("ended")
        done, _ = await asyncio.wait({ended}, timeout=60)
        assert done and ended.result().finish_reason is FinishReason.ABORT
        assert not kept.done()
    assert (len(ended.result().token_ids), len((await kept).token_ids), engine.served) == (0, 100, ["kept"])


@pytest.mark.parametrize("mode", ["wait", "abort_resume"])
@virtual
async def test_late_request_is_not_held_back(mode: UpdateMode) -> None:
    gate, engine = gate_and_engine(mode)
    async with gate.closed(), asyncio.timeout(60):
        late = await gate.generate(dataclasses.replace(ask("late"), deadline=asyncio.get_running_loop().time() + 5))
    assert (late.finish_reason, len(late.token_ids), engine.served) == (FinishReason.ABORT, 0, [])


@virtual
async def test_abort_of_a_cut_request_returns_its_tokens() -> None:
    gate, engine = gate_and_engine("abort_resume")
    asked = asyncio.create_task(gate.generate(ask("r")))
    await asyncio.sleep(10.5)
    async with gate.closed():
        await gate.abort("r")
        done, _ = await asyncio.wait({asked}, timeout=60)
        assert done and len(asked.result().token_ids) == 10
    assert engine.served == ["r"]
