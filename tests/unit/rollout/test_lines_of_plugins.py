"""The error of an episode names the line of the plug-in's code, also if only its result was wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest

import polyturn
from polyturn.core.trajectory import RAISED_AT
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.env import envs
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.schedulers import Gym
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.base import BaseTool
from support.parts import call
from support.tools_parts import schema

SAYS = [call("look"), "#### 4"]


class WrongStep(MultiTurnScheduler):
    async def step(self, episode: Any, turn: Any) -> Any:
        return 3


class WrongEnd(MultiTurnScheduler):
    def check_finished(self, episode: Any, turn: Any) -> Any:
        return "perhaps"


class WrongRun(MultiTurnScheduler):
    async def run(self, episode: Any) -> Any:
        return "over"


class WrongReply(BaseInteraction):
    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return 3


class WrongScore(BaseInteraction):
    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return True, "", math.nan, {}


@envs.register("test_wrong_world")
class WrongWorld:
    def reset(self, *, seed: int) -> str:
        return "Go."

    def step(self, action: str) -> Any:
        return 3

    def close(self) -> None: ...


@polyturn.tool
def look() -> Any:
    """Look."""
    return "nothing", math.nan


class WrongReward(BaseTool):
    async def execute(self, instance_id: str, parameters: Any, **kwargs: Any) -> str:
        return "nothing"

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return "much"


def score(trajectory: Any) -> Any:
    return "good"


@pytest.mark.parametrize(
    ("options", "row"),
    [
        ({"scheduler": WrongStep()}, {}),
        ({"scheduler": WrongEnd()}, {}),
        ({"scheduler": WrongRun()}, {}),
        ({"interactions": {"user": WrongReply({"name": "user"})}}, {"interaction": "user"}),
        ({"interactions": {"user": WrongScore({"name": "user"})}}, {"interaction": "user"}),
        ({"scheduler": Gym(env="test_wrong_world")}, {}),
        ({"tools": [look]}, {}),
        ({"tools": [WrongReward({}, schema("look"))]}, {}),
        ({"rewards": {"mine": score}}, {"data_source": "mine"}),
    ],
)
async def test_wrong_return_names_the_line_of_the_method(options: dict[str, Any], row: dict[str, Any]) -> None:
    t = await run_episode(scripted_context(SAYS, **options), task(**row), id="e")
    assert t.is_failed and str(t.error).count(" (test_lines_of_plugins.py, line ") == 1, t.error


async def test_wrong_return_of_a_tool_is_logged_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    @polyturn.tool(name="look")
    def tuple_of_four() -> Any:
        """Look."""
        return 1, 2, 3, 4

    t = await run_episode(scripted_context(SAYS, tools=[tuple_of_four]), task(), id="e")
    line = t.turns[0].tool_results[0].metrics[RAISED_AT]
    assert line.startswith("test_lines_of_plugins.py, line ")
    assert any(f"({line})" in message for message in caplog.messages)
