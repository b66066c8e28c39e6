"""Environments: what an author writes, what the model is shown, what is scored, and that each is closed once."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.env import Env, envs
from polyturn.core.errors import ConfigError, DataError, UnknownNameError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.schedulers import Gym
from polyturn.testing.episodes import scripted_context, task

CLOSED: list[Any] = []
STEPPED: list[Any] = []
EVERYBODY = threading.Barrier(16)


@envs.register("test_counter")
class Counter:
    """Counts what it is told, up to a goal."""

    def __init__(self, goal: int = 2, fails: str = "", returns: Any = None, shows: Any = "Count.") -> None:
        self.goal, self.fails, self.returns, self.shows = goal, fails, returns, shows
        self.said: list[str] = []

    def reset(self, *, seed: int) -> Any:
        self.seed = seed
        if self.fails == "reset":
            raise OSError("no map")
        return self.shows

    def step(self, action: str) -> Any:
        self.said.append(action)
        if self.fails == "step":
            raise OSError("the ice broke")
        if self.fails == "sleep":
            STEPPED.append(self)
            time.sleep(0.2)
        if self.fails == "meet":
            EVERYBODY.wait()
        if self.returns is not None:
            return self.returns
        return f"{len(self.said)} so far.", 0.5, len(self.said) == self.goal, {"count": len(self.said)}

    def close(self) -> None:
        CLOSED.append(self)


class AsyncCounter(Counter):
    async def reset(self, *, seed: int) -> Any:
        await asyncio.sleep(0)
        return super().reset(seed=seed)

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        return super().step(action)


envs.register("test_async_counter")(AsyncCounter)


def context(says: Any = ("one", "two", "three"), *, limits: Limits | None = None, **kwargs: Any) -> Any:
    CLOSED.clear()
    made = scripted_context(list(says), scheduler=Gym(**{"env": "test_counter", **kwargs}), limits=limits)
    made.rewarder = RewardRouter({}, scheduler=made.scheduler)
    return made


def row(**config: Any) -> Any:
    return task("Play.", data_source=None, extra={"env_config": config})


@pytest.mark.parametrize("name", ["test_counter", "test_async_counter"])
async def test_an_environment_answers_scores_and_ends_the_episode(name: str) -> None:
    t = await run_episode(context(), row(name=name), id="e")
    assert t.stop_reason is StopReason.ENV_DONE and t.reward is not None and t.reward.total == 1.0
    assert [m.text for m in t.messages] == ["Play.\nCount.", "one", "1 so far.", "two", "2 so far."]
    assert t.turn_scores == (0.5, 0.5) and t.turns[1].info == {"count": 2}
    assert t.reward.components["turns"] == 1.0 and len(CLOSED) == 1


def test_a_class_with_three_methods_is_an_environment() -> None:
    assert isinstance(Counter(), Env)


async def test_the_row_names_the_environment_its_arguments_and_its_seed() -> None:
    one = context(env="test_async_counter", env_config={"goal": 1})
    t = await run_episode(one, row(), id="e")
    assert len(t.turns) == 1 and isinstance(CLOSED[0], AsyncCounter)
    own = CLOSED[0].seed
    await run_episode(one, row(name="test_counter", goal=3, seed=7), id="e1")
    assert type(CLOSED[1]) is Counter and CLOSED[1].seed == 7 and len(CLOSED[1].said) == 3
    await run_episode(one, row(), id="other")
    assert CLOSED[2].seed == own  # every trajectory of a task meets the same world


@pytest.mark.parametrize(
    ("shows", "said"),
    [
        ([{"role": "system", "content": "Rules."}, {"role": "user", "content": "Go."}], ["Rules.", "Go."]),
        (Message(role="user", content="Go."), ["Go."]),
        (None, ["Play."]),
        (("Count.", {"level": 1}), ["Play.\nCount."]),
        (([{"role": "user", "content": "Go."}], {}), ["Go."]),
    ],
)
async def test_a_reset_adds_to_the_prompt_or_replaces_it(shows: Any, said: list[str]) -> None:
    t = await run_episode(context(), row(shows=shows), id="e")
    assert [m.text for m in t.messages][: len(said)] == said and t.turns[0].message.text == "one"


@pytest.mark.parametrize(
    ("limits", "reason", "turns"),
    [
        (Limits(max_turns=1), StopReason.MAX_TURNS, 1),
        (Limits(max_tokens_per_turn=1), StopReason.LENGTH, 1),
        (Limits(max_context=1), StopReason.CONTEXT_FULL, 0),
    ],
)
async def test_a_limit_ends_the_episode_whatever_the_environment_says_and_closes_it(
    limits: Limits, reason: StopReason, turns: int
) -> None:
    t = await run_episode(context(["a long answer"], limits=limits), row(goal=99), id="e")
    assert t.stop_reason is reason and len(t.turns) == turns and len(CLOSED) == 1
    assert all(turn.scores == {"env": 0.5} for turn in t.turns)  # the last turn is scored as well


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"fails": "step"}, "the environment 'test_counter': step raised OSError: the ice broke"),
        ({"fails": "reset"}, "the environment 'test_counter': reset raised OSError: no map"),
        ({"returns": 3}, "step returned 3; return (observation, reward, done, info)"),
        ({"returns": ("x", "much", False, {})}, "step gave the reward 'much'; it must be a finite number"),
        ({"returns": ("x", float("nan"), False, {})}, "step gave the reward nan"),
        ({"returns": ("x", 0.0, False, 5)}, "step gave the info 5; it must be a mapping or None"),
        ({"returns": ("x", 0.0, "false", {})}, "step gave 'false' for whether it is over; it is true or false"),
        ({"returns": ("x", 0.0, float("nan"), {})}, "step gave nan for whether it is over"),
        ({"returns": ("x", 0.0, False, {}, {})}, "step gave {} for whether it is over"),
        ({"returns": ("x", 0.0, [[0, 1]], {})}, "step gave [[0, 1]] for whether it is over"),
        ({"returns": (5, 0.0, False, {})}, "showed 5; return a text, a message, or messages"),
    ],
)
async def test_an_environment_that_breaks_fails_its_trajectory_by_name_and_is_closed(config: Any, says: str) -> None:
    t = await run_episode(context(), row(**config), id="e")
    assert t.is_failed and t.error is not None and says in t.error and len(CLOSED) == 1


async def _begun() -> None:
    while not STEPPED:  # noqa: ASYNC110 (a thread appends to it)
        await asyncio.sleep(0.01)


async def test_a_cancelled_episode_closes_its_environment() -> None:
    STEPPED.clear()
    running = asyncio.create_task(run_episode(context(), row(fails="sleep"), id="e"))
    await _begun()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(CLOSED) == 1


async def test_an_environment_that_is_made_too_late_is_closed_as_well() -> None:
    class Slow(Counter):
        def __init__(self) -> None:
            STEPPED.append(self)
            time.sleep(0.2)
            super().__init__()

        async def close(self) -> None:
            super().close()

    if "test_slow" not in envs:
        envs.register("test_slow")(Slow)
    STEPPED.clear()
    running = asyncio.create_task(run_episode(context(env="test_slow"), row(), id="e"))
    await _begun()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    while not CLOSED:  # noqa: ASYNC110 (the thread that made it closes it)
        await asyncio.sleep(0.01)
    assert len(CLOSED) == 1


async def test_environments_do_not_wait_for_one_another() -> None:
    shared = context()
    found = await asyncio.gather(*(run_episode(shared, row(fails="meet", goal=1), id=f"e{i}") for i in range(16)))
    assert [t.error for t in found] == [None] * 16 and len(CLOSED) == 16


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"env_config": {"size": 4}}, "the environment 'test_counter' does not take its env_config: .*'size'"),
        ({"env_config": 3}, "env_config is 3; it must be an object"),
    ],
)
def test_a_row_that_cannot_be_played_is_refused_before_the_run(extra: Any, says: str) -> None:
    with pytest.raises(DataError, match=f"task 't0'.*{says}"):
        Gym(env="test_counter").check_task(task(extra=extra))


def test_an_environment_with_a_misspelt_method_is_refused_when_it_is_named(tmp_path: Path) -> None:
    methods = ("reset(self, *, seed)", "stepp(self, action)", "close(self)")
    (tmp_path / "mine.py").write_text("class Door:\n" + "".join(f"    def {method}: return None\n" for method in methods))
    with pytest.raises(ConfigError, match="step"):
        Gym(env="mine.py:Door", base=tmp_path)


def test_an_environment_that_is_missing_or_unknown_is_named() -> None:
    with pytest.raises(DataError, match="task 't0' names no environment; put `name` into its env_config"):
        Gym().check_task(task())
    with pytest.raises(UnknownNameError, match=r"envs: there is no 'test_countr'\. Did you mean 'test_counter'"):
        Gym(env="test_countr")
