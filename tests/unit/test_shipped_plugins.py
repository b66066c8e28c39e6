"""Every tool and interaction that comes with polyturn plays an episode with a scripted model (plays.yaml)."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyturn.core.lifecycle import StopReason
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory
from polyturn.data.rows import task_from_row
from polyturn.interactions.registry import initialize_interactions_from_config
from polyturn.rollout.run_episode import run_episode
from polyturn.sandbox.python.isolation import Isolation, find_isolation
from polyturn.testing.episodes import scripted_context
from polyturn.tools.registry import initialize_tools_from_config
from support.services import serve

pytestmark = pytest.mark.timeout(300)  # a server of a tool may have to start

FOLDER = Path(__file__).parents[1] / "data" / "shipped_plugins"
PLAYS: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "plays.yaml").read_text())
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


@contextlib.asynccontextmanager
async def service_of(name: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    if name not in SERVICES:
        yield
        return
    variable, reply = SERVICES[name]
    async with serve(lambda asked, number: reply) as server:
        monkeypatch.setenv(variable, server.url)
        yield


def tools_of(name: str, folder: Path) -> Any:
    """Return the tools of a play, read from a file as a run reads them, beside the files that it names."""
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    (folder / "file.yaml").write_text(yaml.safe_dump({"tools": PLAYS[name].get("tools", [])}))
    return initialize_tools_from_config(folder / "file.yaml") if "tools" in PLAYS[name] else ()


async def play(name: str, folder: Path) -> Trajectory:
    interactions = initialize_interactions_from_config({"interaction": PLAYS[name].get("interactions", [])})
    says, tools = PLAYS[name]["said"], tools_of(name, folder)
    limit_s = 300.0  # a server may have to start
    context = scripted_context(says, tools=tools, interactions=interactions, tool_timeout_s=limit_s)
    trajectory = await run_episode(context, task_of(name), id="e")
    assert not context.tools.live_ids and not context.num_live_interactions
    return trajectory


def task_of(name: str) -> Task:
    return task_from_row(PLAYS[name]["row"], index=0, split="train", source="plays.yaml")


@pytest.mark.parametrize("name", [name for name, of in PLAYS.items() if "result" in of])
async def test_tool_answers_the_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "python_sandbox" and find_isolation()[0] is Isolation.NONE:
        pytest.skip(f"code cannot be isolated here: {find_isolation()[1]}")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    async with service_of(name, monkeypatch):
        trajectory = await play(name, tmp_path)
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.STOP, None)
    results = [r for t in trajectory.turns for r in t.tool_results]
    assert [r.error for r in results] == [None] * len(results)
    assert PLAYS[name]["result"] in str(results[0].content)
    assert trajectory.reward.components["outcome"] == 1.0


async def test_zoom_shows_the_region_to_a_model_that_reads_images(tmp_path: Path) -> None:
    (tool,) = tools_of("zoom", tmp_path)
    await tool.create("e", **task_of("zoom").tools_kwargs["image_zoom_in_tool"].create_kwargs)
    response, _, metrics = await tool.execute("e", PLAYS["zoom"]["arguments"])
    assert metrics["success"] and response.image[0].getpixel((5, 5)) == (255, 0, 0)
    await tool.release("e")


@pytest.mark.parametrize("name", [name for name, of in PLAYS.items() if "scores" in of])
async def test_interaction_scores_the_turns(name: str, tmp_path: Path) -> None:
    trajectory = await play(name, tmp_path)
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.ENV_DONE, None)
    assert trajectory.turn_scores == tuple(PLAYS[name]["scores"])
    assert trajectory.reward.total == 1.0
