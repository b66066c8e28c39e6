"""What an episode asks an engine, and takes back: an engine that does not listen holds nobody up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task


async def test_an_engine_that_does_not_take_an_abort_samples_on_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("polyturn.rollout.resources.ABORT_S", 0.05)
    context = scripted_context(["#### 4"], latency_s=0.3)

    async def deaf(request_id: str) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(context.engine, "abort", deaf)
    episodes: list[Any] = []
    running = asyncio.create_task(run_episode(context, task(), id="e", on_start=episodes.append))
    while not (episodes and episodes[0].resources._answered):  # noqa: ASYNC110 (nothing says that it asks)
        await asyncio.sleep(0.01)
    await episodes[0].resources.abort()
    assert not (await running).is_failed
    assert "did not take an abort within 0.05 s" in caplog.text
