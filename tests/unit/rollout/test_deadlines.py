"""Whatever an author's code does, plain or async, its episode comes to an end: it is late by name, or left behind."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

import pytest

from polyturn.core.env import envs
from polyturn.core.errors import RolloutError
from polyturn.environments.scheduler import EnvScheduler
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout import schedulers as shipped
from polyturn.rollout.calls import has_own_deadlines
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.schedulers.environment import Gym
from polyturn.serving.openai.scheduler import SessionScheduler
from polyturn.testing.episodes import scripted_context, task


async def stubborn() -> None:
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        await asyncio.sleep(3600)  # it does not let itself be cancelled, the first time


class Hangs(MultiTurnScheduler):
    """Hangs in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where = where

    async def run(self, episode: Any) -> Any:
        return await (asyncio.sleep(3600) if self.where == "run" else super().run(episode))

    async def step(self, episode: Any, turn: Any) -> Any:
        await (asyncio.sleep(3600) if self.where == "step" else asyncio.sleep(0))

    async def on_trajectory_start(self, episode: Any) -> Any:
        await (asyncio.sleep(3600) if self.where == "on_trajectory_start" else asyncio.sleep(0))

    async def on_turn_end(self, episode: Any, turn: Any) -> Any:
        await (asyncio.sleep(3600) if self.where == "on_turn_end" else asyncio.sleep(0))


@pytest.mark.parametrize("where", ["run", "step", "on_trajectory_start", "on_turn_end"])
async def test_an_async_method_of_a_scheduler_that_hangs_ends_its_trajectory(where: str):
    context = scripted_context(["#### 4"], scheduler=Hangs(where), scheduler_timeout_s=0.1)
    trajectory = await run_episode(context, task(), id="e")
    said = f"SchedulerError: the scheduler's {where} took longer than 0.1 s; raise rollout.scheduler_timeout_s or make"
    assert (trajectory.error or "").startswith(said)


async def test_what_a_scheduler_waits_for_with_its_episode_is_not_its_own_time():
    class Asks(MultiTurnScheduler):
        async def step(self, episode: Any, turn: Any) -> Any:
            for _ in range(2):
                episode.record(turn, await self.reply())
                await episode.prepare()
                turn = await episode.generate()

        async def reply(self) -> Any:
            from polyturn.rollout.scheduler import Reply

            return Reply.of("go on")

    context = scripted_context(["a", "b", "c"], scheduler=Asks(), scheduler_timeout_s=0.1, latency_s=0.15)
    trajectory = await run_episode(context, task(ground_truth="c"), id="e")
    assert trajectory.error is None, trajectory.error
    assert len(trajectory.turns) == 3


async def test_an_agent_that_asks_from_elsewhere_may_take_as_long_as_it_needs():
    async def agent() -> str:
        await asyncio.sleep(0.2)
        return "done"

    calls = scripted_context(["a"], scheduler_timeout_s=0.05).calls
    assert await calls.call(agent, has_deadline=False, of="the agent") == "done"


class Env:
    """An async environment that hangs where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    async def reset(self, *, seed: int) -> str:
        await self.maybe("reset")
        return "Begin."

    async def step(self, action: str) -> Any:
        await self.maybe("step")
        return "again", 0.0, False, {}

    async def close(self) -> None:
        await self.maybe("close")

    async def maybe(self, where: str) -> None:
        if self.where == where:
            await asyncio.sleep(3600)


@pytest.mark.parametrize("where", ["reset", "step", "close"])
async def test_an_async_environment_that_hangs_ends_its_trajectory(where: str):
    if "hangs" not in envs:
        envs.register("hangs")(Env)
    context = scripted_context(
        ["go"],
        scheduler=Gym(env="hangs", env_config={"where": where}),
        scheduler_timeout_s=0.1,
        limits=Limits(max_turns=2),
    )
    trajectory = await run_episode(context, task(data_source=None), id="e")
    if where == "close":
        assert trajectory.metrics["close_errors"] == 1
    else:
        assert f"the environment 'hangs': {where} took longer than 0.1 s" in (trajectory.error or "")


class User(BaseInteraction):
    """An interaction with a reply of the test's."""

    def __init__(self, reply: Any) -> None:
        super().__init__({"name": "user"})
        self.reply = reply
        self.ended: list[str] = []

    def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:  # type: ignore[override]
        return self.reply()

    def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:  # type: ignore[override]
        self.ended.append(instance_id)


async def test_a_plain_interaction_blocks_no_other_episode():
    everybody = threading.Barrier(5)
    user = User(lambda: (everybody.wait() and None) or (True, "bye", 1.0, {}))
    context = scripted_context(["a"], interactions={"user": user})
    done = await asyncio.gather(*(run_episode(context, task(interaction="user"), id=f"e{i}") for i in range(5)))
    assert [t.error for t in done] == [None] * 5
    assert sorted(user.ended) == [f"e{i}" for i in range(5)]


@pytest.mark.parametrize("reply", [threading.Event().wait, stubborn], ids=["plain", "async, not to be cancelled"])
async def test_an_interaction_that_hangs_ends_its_trajectory(reply: Any):
    user = User(reply)
    context = scripted_context(["a"], interactions={"user": user}, interaction_timeout_s=0.05)
    trajectory = await run_episode(context, task(interaction="user"), id="e")
    assert "generate_response took longer than 0.05 s" in (trajectory.error or "")
    assert user.ended == ["e"]


async def test_too_many_calls_left_behind_end_the_run():
    done = threading.Event()
    user = User(done.wait)
    context = scripted_context(["a"], interactions={"user": user}, interaction_timeout_s=0.02)
    try:
        for batch in range(2):
            many = [run_episode(context, task(interaction="user"), id=f"{batch}/{i}") for i in range(40)]
            assert all("took longer" in (t.error or "") for t in await asyncio.gather(*many))
        with pytest.raises(RolloutError, match="calls of the interaction 'user' still run past their deadline"):
            await run_episode(context, task(interaction="user"), id="one more")
    finally:
        done.set()


SHIPPED = [getattr(shipped, name) for name in shipped.__all__ if name != "schedulers"]


@pytest.mark.parametrize("ours", [*SHIPPED, SessionScheduler, EnvScheduler])
def test_our_own_async_methods_are_called_directly_and_those_of_a_subclass_have_a_deadline(ours: type[MultiTurnScheduler]):
    class Mine(ours):  # type: ignore[misc, valid-type]
        async def step(self, episode: Any, turn: Any) -> Any:
            return None

    written = [method for _, method in inspect.getmembers(ours, inspect.iscoroutinefunction)]
    assert len(written) > 2 and all(map(has_own_deadlines, written))
    assert not has_own_deadlines(Mine.step) and has_own_deadlines(Mine.run)
