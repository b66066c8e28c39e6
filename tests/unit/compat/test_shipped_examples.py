"""Every shipped tool and interaction has an example folder, and it runs: its file, its rows, and a scripted model."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.lifecycle import StopReason
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory
from polyturn.data.rows import task_from_row
from polyturn.interactions.registry import initialize_interactions_from_config
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context
from polyturn.tools.python_sandbox.isolation import Isolation, find_walls
from polyturn.tools.registry import initialize_tools_from_config
from support.services import serve

EXAMPLES = Path(__file__).parents[3] / "examples"
SERVICES = {
    "search": (
        "RETRIEVAL_URL",
        {"result": [[{"document": {"contents": "Hamlet\nA play by William Shakespeare."}, "score": 0.9}]]},
    ),
    "sandbox": (
        "SANDBOX_URL",
        {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "56088\n", "stderr": ""}},
    ),
}
SAID = {
    "gsm8k": "Current parsed answer='71' reward=0.0",
    "geo3k": "reward=1.0",
    "search": "Doc 1 (Title: Hamlet)",
    "sandbox": "56088",
    "python_sandbox": "56088",
    "mcp": "72",
    "function": "72",
}


@contextlib.asynccontextmanager
async def service_of(name: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    if name not in SERVICES:
        yield
        return
    variable, reply = SERVICES[name]
    async with serve(lambda asked, number: reply) as server:
        monkeypatch.setenv(variable, server.url)
        yield


async def play(folder: Path) -> Trajectory:
    tools: Any = initialize_tools_from_config(folder / "tools.yaml") if (folder / "tools.yaml").exists() else ()
    partners: Any = {}
    if (folder / "interactions.yaml").exists():
        partners = initialize_interactions_from_config(folder / "interactions.yaml")
    context = scripted_context(json.loads((folder / "model.json").read_text()), tools=tools, interactions=partners)
    trajectory = await run_episode(context, first_task(folder), id="e")
    assert not context.tools.live_ids and not context.num_live_interactions
    return trajectory


def first_task(folder: Path) -> Task:
    row = json.loads((folder / "tasks.jsonl").read_text().splitlines()[0])
    return task_from_row(row, index=0, split="train", source=str(folder / "tasks.jsonl"))


@pytest.mark.parametrize("name", sorted(SAID))
async def test_a_tools_example_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "python_sandbox" and find_walls()[0] is Isolation.NONE:
        pytest.skip(f"code cannot be isolated here: {find_walls()[1]}")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    async with service_of(name, monkeypatch):
        trajectory = await play(EXAMPLES / "tools" / name)
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.STOP, None)
    results = [r for t in trajectory.turns for r in t.tool_results]
    assert [r.error for r in results] == [None] * len(results)
    assert SAID[name] in str(results[0].content)
    assert trajectory.reward is not None and trajectory.reward.components["outcome"] == 1.0


async def test_the_zoom_example_shows_the_region_to_a_model_that_reads_images() -> None:
    folder = EXAMPLES / "tools" / "zoom"
    (tool,) = initialize_tools_from_config(folder / "tools.yaml")
    task = first_task(folder)
    await tool.create("e", **task.tools_kwargs["image_zoom_in_tool"].create_kwargs)
    called = json.loads(json.loads((folder / "model.json").read_text())[0].split(">")[1].split("<")[0])
    response, _, metrics = await tool.execute("e", called["arguments"])
    assert metrics["success"] and response.image[0].getpixel((5, 5)) == (255, 0, 0)
    await tool.release("e")


@pytest.mark.parametrize(("name", "scores"), [("gsm8k", (0.0, 1.0)), ("weather", (None, 1.0))])
async def test_an_interactions_example_runs(name: str, scores: tuple[float | None, ...]) -> None:
    trajectory = await play(EXAMPLES / "interactions" / name)
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.ENV_DONE, None)
    assert trajectory.turn_scores == scores
    assert trajectory.reward is not None and trajectory.reward.total == 1.0


@pytest.mark.parametrize("folder", [p for kind in ("tools", "interactions") for p in sorted((EXAMPLES / kind).iterdir())])
def test_every_example_says_what_it_is(folder: Path) -> None:
    assert (folder / "README.md").read_text().startswith("# ")
    assert {"tasks.jsonl", "model.json"} <= {p.name for p in folder.iterdir()}
