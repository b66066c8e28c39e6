"""Metrics of a step show how long each tool and interaction takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polyturn.core.metrics import reduce
from polyturn.core.task import InteractionRef
from polyturn.core.trajectory import ToolResult, Trajectory
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from polyturn.training.rollout_metrics import plugin_times


async def episode(tool_s: list[float], *, error: str | None = None, interaction_s: float | None = None) -> Trajectory:
    ref = None if interaction_s is None else InteractionRef(name="user", kwargs={})
    t = await run_episode(scripted_context(["#### 4"]), task(), id="e")
    results = tuple(ToolResult(call_id="c", name="search", content="x", error=error, duration_s=s) for s in tool_s)
    timings = {"generate": 6.0, "tools": max(tool_s, default=0.0)}
    timings |= {} if interaction_s is None else {"interaction": interaction_s}
    turn = replace(t.turns[0], tool_results=results, timings=timings)
    return replace(t, turns=(turn,), task=replace(t.task, interaction=ref))


async def test_tool_has_its_median_slow_calls_and_share():
    found = reduce(plugin_times([await episode([1.0]), await episode([2.0]), await episode([3.0])]))
    assert found["time/tool/search/p50_s"] == 2.0
    assert found["time/tool/search/p99_s"] == pytest.approx(2.98)
    assert found["time/tool/search/share"] == pytest.approx(6 / 24)


async def test_interaction_has_its_times():
    found = reduce(plugin_times([await episode([], interaction_s=2.0)]))
    assert found == {
        "time/interaction/user/p50_s": 2.0,
        "time/interaction/user/p99_s": 2.0,
        "time/interaction/user/share": pytest.approx(0.25),
    }


async def test_unknown_tool_makes_no_metric():
    assert plugin_times([await episode([1.0], error="unknown_tool")]) == {}
    assert plugin_times([]) == {}
