"""Code that hangs, a plug-in's, a thread's or an engine's, ends its trajectory by name, or is left behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from typing import Any

import pytest

from polyturn.core.errors import LifecycleError, RolloutError, SchedulerError
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.environments.scheduler import EnvScheduler
from polyturn.rollout import schedulers as shipped
from polyturn.rollout.calls import LoopBridge, has_own_deadlines
from polyturn.rollout.env import envs
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.rollout.schedulers.environment import Gym
from polyturn.serving.openai.scheduler import SessionScheduler
from polyturn.testing.episodes import scripted_context, task
from support.parts import Says, Steps, virtual
from support.refusals import refuses, refuses_later


class Hangs(MultiTurnScheduler):
    """Hangs in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where = where

    async def wait(self, where: str) -> None:
        await asyncio.sleep(3600 if self.where == where else 0)

    async def run(self, episode: Any) -> Any:
        await self.wait("run")
        return await super().run(episode)

    async def step(self, episode: Any, turn: Any) -> Any:
        await self.wait("step")

    async def on_trajectory_start(self, episode: Any) -> Any:
        await self.wait("on_trajectory_start")

    async def on_turn_end(self, episode: Any, turn: Any) -> Any:
        await self.wait("on_turn_end")


@pytest.mark.parametrize("where", ["run", "step", "on_trajectory_start", "on_turn_end"])
@virtual
async def test_hanging_scheduler_method_ends_its_trajectory(where: str) -> None:
    context = scripted_context(["#### 4"], scheduler=Hangs(where), scheduler_timeout_s=10)
    trajectory = await run_episode(context, task(), id="e")
    assert (trajectory.error or "").startswith(f"SchedulerError: the scheduler's {where} took longer than 10 s")


@virtual
async def test_waiting_for_the_episode_is_not_a_schedulers_own_time() -> None:
    async def ask(episode: Any, turn: Any) -> Any:
        for _ in range(2):
            episode.record(turn, Reply.of("go on"))
            await episode.prepare()
            turn = await episode.generate()

    async def reward(trajectory: Any) -> float:
        return 1.0

    options = {"scheduler": Steps(ask), "scheduler_timeout_s": 10, "latency_s": 15, "rewards": {"mine": reward}}
    trajectory = await run_episode(scripted_context(["a", "b", "c"], **options), task(data_source="mine"), id="e")
    assert trajectory.error is None
    assert len(trajectory.turns) == 3


@virtual
async def test_agent_without_a_deadline_takes_its_time() -> None:
    async def agent() -> str:
        await asyncio.sleep(20)
        return "done"

    calls = scripted_context(["a"], scheduler_timeout_s=10).calls
    assert await calls.call(agent, has_deadline=False, of="the agent") == "done"


class Env:
    """An async environment that hangs in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where = where

    async def wait(self, where: str) -> None:
        await asyncio.sleep(3600 if self.where == where else 0)

    async def reset(self, *, seed: int) -> str:
        await self.wait("reset")
        return "Begin."

    async def step(self, action: str) -> Any:
        await self.wait("step")
        return "again", 0.0, False, {}

    async def close(self) -> None:
        await self.wait("close")


envs.register("hangs")(Env)


@pytest.mark.parametrize("where", ["reset", "step", "close"])
async def test_hanging_environment_ends_its_trajectory(where: str) -> None:
    gym = Gym(env="hangs", env_config={"where": where})
    context = scripted_context(["go"], scheduler=gym, scheduler_timeout_s=0.5, limits=Limits(max_turns=2))
    trajectory = await run_episode(context, task(data_source=None), id="e")
    if where == "close":
        assert trajectory.metrics["close_errors"] == 1
    else:
        assert f"the environment 'hangs': {where} took longer than 0.5 s" in (trajectory.error or "")


class PlainUser(Says):
    """An interaction whose plain reply runs in a thread."""

    def __init__(self, reply: Any) -> None:
        super().__init__()
        self.reply = reply

    def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return self.reply()


async def test_plain_interaction_blocks_no_other_episode() -> None:
    everybody = threading.Barrier(5)
    user = PlainUser(lambda: (everybody.wait() and None) or (True, "bye", 1.0, {}))
    context = scripted_context(["a"], interactions={"user": user})
    done = await asyncio.gather(*(run_episode(context, task(interaction="user"), id=f"e{i}") for i in range(5)))
    assert [t.error for t in done] == [None] * 5
    assert sorted(each for each in user.calls if each.startswith("end")) == [f"end own-e{i}" for i in range(5)]


async def test_hanging_plain_interaction_ends_its_trajectory() -> None:
    gate = threading.Event()
    user = PlainUser(gate.wait)
    context = scripted_context(["a"], interactions={"user": user}, interaction_timeout_s=0.5)
    trajectory = await run_episode(context, task(interaction="user"), id="e")
    gate.set()
    assert "generate_response took longer than 0.5 s" in (trajectory.error or "")
    assert user.calls[-1] == "end own-e"


class Stubborn(Says):
    """Never answers, and ignores its first cancellation."""

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        try:
            await asyncio.sleep(36_000)
        except asyncio.CancelledError:
            await asyncio.sleep(36_000)


@virtual
async def test_too_many_abandoned_calls_end_the_run() -> None:
    user = Stubborn()
    context = scripted_context(["a"], interactions={"user": user}, interaction_timeout_s=5)
    for batch in range(2):
        many = [run_episode(context, task(interaction="user"), id=f"{batch}/{i}") for i in range(40)]
        assert all("generate_response took longer than 5 s" in (t.error or "") for t in await asyncio.gather(*many))
    assert len([each for each in user.calls if each.startswith("end")]) == 80
    await refuses_later(lambda: run_episode(context, task(interaction="user"), id="one more"), RolloutError, "'user'")


SHIPPED = [getattr(shipped, name) for name in shipped.__all__ if name != "schedulers"]


@pytest.mark.parametrize("ours", [*SHIPPED, SessionScheduler, EnvScheduler])
def test_only_methods_of_a_subclass_have_a_deadline(ours: type[MultiTurnScheduler]) -> None:
    class Mine(ours):  # type: ignore[misc, valid-type]
        async def step(self, episode: Any, turn: Any) -> Any:
            return None

    written = [method for _, method in inspect.getmembers(ours, inspect.iscoroutinefunction)]
    assert len(written) > 2
    assert all(map(has_own_deadlines, written))
    assert not has_own_deadlines(Mine.step)
    assert has_own_deadlines(Mine.run)


async def answer() -> str:
    await asyncio.sleep(0)
    return "answered"


async def test_thread_gets_the_answer_of_the_loop():
    bridge = LoopBridge()
    bridge.enter()
    assert await asyncio.to_thread(lambda: bridge.wait(answer(), of="e")) == "answered"


async def test_loop_does_not_wait_for_itself():
    bridge = LoopBridge()
    bridge.enter()
    refuses(lambda: bridge.wait(answer(), of="e"), SchedulerError, "await")


async def test_ended_episode_awaits_nothing():
    bridge = LoopBridge()
    bridge.enter()
    bridge.close()
    await refuses_later(lambda: asyncio.to_thread(lambda: bridge.wait(answer(), of="e")), LifecycleError, "'e'")


async def test_end_of_an_episode_frees_waiting_threads():
    bridge = LoopBridge()
    bridge.enter()
    begun = asyncio.Event()

    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    thread = asyncio.ensure_future(asyncio.to_thread(lambda: bridge.wait(forever(), of="e")))
    await begun.wait()
    bridge.close()
    with pytest.raises((concurrent.futures.CancelledError, asyncio.CancelledError)):
        await thread


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
    assert "did not accept an abort" in caplog.text
