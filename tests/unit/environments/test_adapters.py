"""The shipped adapters: observations, actions and mistakes."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.core.errors import ConfigError, RewardError, SchedulerError
from polyturn.core.lifecycle import StopReason
from polyturn.environments import find_adapter
from polyturn.environments.base import Adapter
from polyturn.environments.gymnasium import reader
from polyturn.environments.scripted import play
from polyturn.rewards.router import RewardRouter, Weighing
from polyturn.rollout.calls import AuthorCalls
from polyturn.rollout.env_session import EnvSession
from polyturn.rollout.limits import Limits
from support.cases import needs
from support.refusals import refuses, refuses_later

gymnasium = pytest.importorskip("gymnasium", reason="pip install 'polyturn[environments]'")
pytestmark = needs("textarena", "reasoning_gym", extra="environments")


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<action>right</action>", "2"),
        ("I think left, no: <action> Right </action> it is.", "2"),
        ("First I go left, then down", "1"),
        ("3", "3"),
        ("Go RIGHT!", "2"),
        ("<action>7</action>", None),
        ("I pass.", None),
        ("", None),
    ],
)
async def test_discrete_action_is_read_by_name_or_number(text: str, action: str | None) -> None:
    played = await play(find_adapter("gymnasium:FrozenLake-v1"), seed=0, actions=[text])
    assert played.trajectory.turns[0].info.get("action") == action
    assert played.trajectory.turns[0].info["is_valid"] is (action is not None)


async def test_invalid_actions_cost_and_end_after_three() -> None:
    taxi = find_adapter("gymnasium:Taxi-v4", {"invalid_reward": -0.5})
    t = (await play(taxi, seed=0, actions=["fly", "swim", "north", "fly", "fly", "fly", "north"])).trajectory
    assert [turn.scores["env"] for turn in t.turns] == [-0.5, -0.5, -1.0, -0.5, -0.5, -0.5]
    assert t.stop_reason is StopReason.MAX_TURNS and "south, north, east, west" in t.turns[0].observation[0].text


def test_prompt_shows_the_picture_and_the_actions() -> None:
    refuses(lambda: find_adapter("gymnasium:FrozenLake-v1", {"max_invalid": "few"}), ConfigError, "max_invalid", "'few'")
    refuses(lambda: find_adapter("gymnasium:FrozenLake-v1", {"max_invalid": math.inf}), ConfigError, "max_invalid")
    lake = find_adapter("gymnasium:FrozenLake-v1")
    shown = lake.make().reset(seed=0)
    assert shown.startswith("[S]FFF\nFHFH\nFFFH\nHFFG") and "\x1b" not in shown  # type: ignore[union-attr]
    assert lake.instructions.endswith("Actions: left, down, right, up.")
    assert "your sum " in find_adapter("gymnasium:Blackjack-v1").make().reset(seed=1)


@pytest.mark.parametrize(
    ("space", "text", "wanted"),
    [
        (gymnasium.spaces.MultiDiscrete([3, 4]), "<action>2 3</action>", [2, 3]),
        (gymnasium.spaces.MultiDiscrete([3, 4]), "<action>2 9</action>", None),
        (gymnasium.spaces.MultiDiscrete([3, 4]), "<action>1.7 3</action>", None),
        (gymnasium.spaces.MultiBinary(2), "<action>256 1</action>", None),
        (gymnasium.spaces.Box(-1, 1, (2,)), "0.5 and -1", [0.5, -1.0]),
        (gymnasium.spaces.Box(-1, 1, (2,)), "0.5", None),
        (gymnasium.spaces.Discrete(3, start=-1), "<action>-1</action>", -1),
        (gymnasium.spaces.Discrete(3), "step-1", 1),
        (gymnasium.spaces.Text(5), "abc", "abc"),
        (gymnasium.spaces.Text(2), "abc", None),
    ],
)
def test_other_spaces_are_read_as_numbers_or_text(space: Any, text: str, wanted: Any) -> None:
    found = reader(space, (), spaces=gymnasium.spaces, name="x")(text)
    assert (found is None) if wanted is None else np.array_equal(found, wanted)
    refuses(lambda: reader(gymnasium.spaces.Dict({}), (), spaces=gymnasium.spaces, name="x"), ConfigError, "wrap it")


def test_game_for_several_players_is_refused_for_one() -> None:
    refuses(
        lambda: find_adapter("textarena:MarketEntryGame-v0", {"num_players": 1}),
        ConfigError,
        "does not start with 1 players",
        "for several players",
    )


async def test_move_that_breaks_a_game_ends_it_against_the_player() -> None:
    guess = find_adapter("textarena:GuessTheNumber-v0", {"max_turns": 1})
    t = (await play(guess, seed=3, actions=["[4]", "nothing", "nothing"])).trajectory
    assert t.error is None and t.reward is not None  # whatever the game makes of it, the policy has not dodged it
    tic = find_adapter("textarena:TicTacToe-v0")
    game: Any = tic.make()
    game.reset(seed=0)
    game._game.step = lambda action: 1 / 0
    ended = game.step("[0]")
    assert ended.terminated and ended.rewards == {0: -1.0} and "ZeroDivisionError" in ended.info["crashed"]


async def test_retries_are_turns_and_the_last_answer_counts() -> None:
    sums = find_adapter("reasoning_gym:chain_sum", {"tries": 3, "retry": "No."})
    truth: Any = sums.make()
    truth.reset(seed=5)
    right = truth._entry["answer"]
    t = (await play(sums, seed=5, actions=["<answer>x</answer>", f"so <answer>{right}</answer>", "never"])).trajectory
    assert [turn.scores["env"] for turn in t.turns] == [0.0, 1.0] and t.reward is not None and t.reward.total == 1.0
    assert t.turns[0].observation[0].text == "No."
    assert t.task.prompt[0].text.startswith("Write your final answer between <answer> and </answer>.\n")
    given_up = await play(sums, seed=5, actions=["a", "b", "c"])
    assert given_up.trajectory.stop_reason is StopReason.ENV_DONE and given_up.reward < 1.0


class Slow:
    """An environment whose step waits."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.calls: list[str] = []
        self.wait = wait

    def reset(self, *, seed: int) -> str:
        return "Wait."

    def step(self, action: str) -> Any:
        self.calls.append("step")
        self.wait()
        self.calls.append("stepped")
        return "", 0.0, False, {}

    def close(self) -> None:
        self.calls.append("close")


async def test_late_environment_is_closed_once_its_step_returns() -> None:
    gate, calls = threading.Event(), AuthorCalls(timeout_s=60.0)
    slow = Slow(gate.wait)
    session = EnvSession("slow", lambda: slow, {}, call=calls.call)
    await session.reset(seed=0)
    calls.bounded.timeout_s = 0.05
    await refuses_later(lambda: session.step("go"), SchedulerError, "took longer than")
    closing = asyncio.create_task(session.close())
    assert slow.calls == ["step"]
    gate.set()
    calls.bounded.timeout_s = 60.0
    await closing
    while len(slow.calls) < 3:  # noqa: ASYNC110 (closed by its own thread)
        await asyncio.sleep(0.01)
    assert slow.calls == ["step", "stepped", "close"]


async def test_own_environment_may_truncate_its_episodes(tmp_path: Path) -> None:
    (tmp_path / "lake.py").write_text(
        "class Lake:\n"
        "    def __init__(self, limit=2): self.limit = limit\n"
        "    def reset(self, *, seed): return f'seed {seed}'\n"
        "    def step(self, action):\n"
        "        self.limit -= 1\n"
        "        return 'on', 0.25, False, self.limit == 0, {}\n"
        "    def close(self): pass\n"
    )
    lake = find_adapter("lake.py:Lake", {"limit": 3}, base=tmp_path)
    t = (await play(lake, seed=9, actions=["a", "b", "c", "d"])).trajectory
    assert t.stop_reason is StopReason.MAX_TURNS and len(t.turns) == 3 and t.reward is not None and t.reward.total == 0.75
    last = await play(lake, seed=9, actions=["a", "b", "c"], score="last")
    assert last.reward == 0.25


class Meets(Adapter):
    """Eight environments, none of whose steps returns before all have begun."""

    everybody = threading.Barrier(8)

    def make(self) -> Any:
        return Slow(self.everybody.wait)


async def test_hanging_environment_blocks_no_other_episode() -> None:
    many = (play(Meets("t:s", "s", {}), seed=n, actions=["x"], limits=Limits(max_turns=1)) for n in range(8))
    assert [played.trajectory.error for played in await asyncio.gather(*many)] == [None] * 8


async def test_reward_function_may_score_each_agent() -> None:
    played = await play(find_adapter("textarena:Nim-v0"), seed=0, actions=["[0 3]", "[1 4]", "[2 5]"])

    def judge(trajectory: Any) -> Any:
        return {"score": 0.5, "agents": {"seat 0": np.float32(2.0), "seat 1": -1}}

    router = RewardRouter({"env/*": judge}, weighing=Weighing(weights={"outcome": 2.0, "turns": 1.0}))
    reward = await router.score(played.trajectory)
    assert reward.total == 1.0
    assert dict(reward.agents) == {"seat 0": 4.0, "seat 1": -2.0}
    assert (reward.of("seat 1"), reward.of("nobody")) == (-2.0, 1.0)
    with pytest.raises(RewardError, match="map names of agents to finite numbers"):
        await RewardRouter({"env/*": lambda t: {"score": 0.5, "agents": {"seat 0": float("nan")}}}).score(played.trajectory)
