"""An engine that does not take an abort delays no episode."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polyturn.core.generation import Completion, GenerateRequest
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task


async def test_engine_that_ignores_an_abort_samples_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("polyturn.rollout.resources.ABORT_S", 0.05)
    context = scripted_context(["#### 4"])
    asked, may_answer, generate = asyncio.Event(), asyncio.Event(), context.engine.generate

    async def held(request: GenerateRequest) -> Completion:
        asked.set()
        await may_answer.wait()
        return await generate(request)

    async def deaf(request_id: str) -> None:
        asyncio.get_running_loop().call_later(0.1, may_answer.set)
        await asyncio.sleep(3600)

    monkeypatch.setattr(context.engine, "generate", held)
    monkeypatch.setattr(context.engine, "abort", deaf)
    episodes: list[Any] = []
    running = asyncio.create_task(run_episode(context, task(), id="e", on_start=episodes.append))
    await asked.wait()
    await episodes[0].resources.abort()
    assert not (await running).is_failed
    assert "did not take an abort" in caplog.text
