"""The promise to authors of schedulers, for plain and async methods alike: what is called when, where, and how often."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from polyturn.core.errors import RolloutError
from polyturn.core.lifecycle import StopReason
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task
from support.clock import skip_an_hour_once
from support.refusals import refuses_later

HOOKS = ("on_trajectory_start", "on_turn_end", "check_finished", "step", "on_trajectory_end")


def recorder(kind: str, log: list[str], **answers: Any) -> MultiTurnScheduler:
    """A scheduler whose five methods are all `kind`, log their calls, and return or raise what `answers` says."""

    def made(name: str) -> Any:
        def note(self: Any, episode: Any, turn: Any = None) -> Any:
            log.append(name if turn is None else f"{name} {turn.index}")
            answer = answers.get(name)
            answer = answer(turn) if callable(answer) else answer
            if isinstance(answer, Exception):
                raise answer
            return answer

        async def wait(self: Any, episode: Any, turn: Any = None) -> Any:
            await asyncio.sleep(0)
            return note(self, episode, turn)

        method = note if kind == "plain" else wait
        method.__name__ = name
        return method

    return type("Recorder", (MultiTurnScheduler,), {name: made(name) for name in HOOKS})()


async def run(scheduler: MultiTurnScheduler, **options: Any) -> Any:
    return await run_episode(scripted_context(["x"], scheduler=scheduler, **options), task(data_source=None), id="e")


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_methods_are_called_in_one_order(kind: str) -> None:
    log: list[str] = []
    t = await run(recorder(kind, log, step=lambda turn: "go on" if turn.index < 1 else None))
    assert t.stop_reason is StopReason.STOP
    turns = [f"{name} {i}" for i in range(2) for name in ("on_turn_end", "check_finished", "step")]
    assert log == ["on_trajectory_start", *turns, "on_trajectory_end"]


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize(
    ("answer", "reason"), [(True, StopReason.ENV_DONE), (StopReason.MAX_TOKENS, StopReason.MAX_TOKENS), (False, None)]
)
async def test_on_turn_end_can_end_the_episode_but_not_extend_it(kind: str, answer: Any, reason: Any) -> None:
    log: list[str] = []
    t = await run(recorder(kind, log, on_turn_end=answer, check_finished=True))
    assert t.stop_reason is (reason or StopReason.STOP)
    assert ("check_finished 0" in log) == (reason is None) and "step 0" not in log


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("where", HOOKS)
async def test_raising_method_fails_its_trajectory_by_name(kind: str, where: str) -> None:
    log: list[str] = []
    t = await run(recorder(kind, log, **{where: KeyError("mine")}))
    assert log.count("on_trajectory_end") == 1 and log[-1] == "on_trajectory_end"
    if where == "on_trajectory_end":
        assert not t.is_failed and t.metrics["close_errors"] == 1, "the trajectory was over, and is kept"
    else:
        assert (t.error or "").startswith(f"SchedulerError: the scheduler's {where} raised KeyError: 'mine'")


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_end_comes_once_after_a_timeout_and_a_cancel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    slow = {"latency_s": 60.0}
    with monkeypatch.context() as patch:
        skip_an_hour_once(lambda: log, patch)
        t = await run(recorder(kind, log), limits=Limits(timeout_s=60.0), **slow)
    assert t.stop_reason is StopReason.TIMEOUT
    running = asyncio.create_task(run(recorder(kind, log), **slow))
    while log.count("on_trajectory_start") < 2:  # noqa: ASYNC110 (a plain method runs in a thread)
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert log == ["on_trajectory_start", "on_trajectory_end"] * 2


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_hook_can_set_scores_and_weights(kind: str) -> None:
    class Scores(MultiTurnScheduler):
        def on_turn_end(self, episode: Any, turn: Any) -> None:
            turn.scores["env"] = 0.25
            turn.info["seen"] = turn.text
            episode.weigh(turn, 0.0)

    class Awaits(Scores):
        async def on_turn_end(self, episode: Any, turn: Any) -> None:
            super().on_turn_end(episode, turn)

    t = await run(Scores() if kind == "plain" else Awaits())
    assert t.turn_scores == (0.25,) and t.turns[0].info == {"seen": "x"} and not t.segments[0].loss_weights.any()


# Plain methods run in threads.


async def test_shared_plain_scheduler_runs_in_one_thread_at_a_time() -> None:
    class Shared(MultiTurnScheduler):
        shared = True
        inside = most = calls = 0

        def step(self, episode: Any, turn: Any) -> None:
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.002)
            self.inside -= 1
            self.calls += 1

    scheduler = Shared()
    context = scripted_context(["x"], scheduler=scheduler)
    await asyncio.gather(*(run_episode(context, task(data_source=None), id=f"e{i}") for i in range(8)))
    assert (scheduler.calls, scheduler.most) == (8, 1)


async def test_plain_step_past_its_deadline_fails_and_too_many_end_the_run() -> None:
    done = threading.Event()

    class Hangs(MultiTurnScheduler):
        def step(self, episode: Any, turn: Any) -> None:
            done.wait()

    context = scripted_context(["x"], scheduler=Hangs(), scheduler_timeout_s=1.0)
    context.calls.bounded.max_abandoned = 1
    t = await run_episode(context, task(data_source=None), id="e0")
    assert "the scheduler's step took longer than 1 s; raise rollout.scheduler_timeout_s" in (t.error or "")
    await refuses_later(
        lambda: run_episode(context, task(data_source=None), id="e1"), RolloutError, "2 calls of the scheduler's step"
    )
    done.set()


async def test_plain_run_drives_the_episode() -> None:
    class Drives(MultiTurnScheduler):
        def run(self, episode: Episode) -> StopReason:
            for _ in range(2):
                if (limit := episode.wait(episode.prepare())) is not None:
                    return limit
                turn = episode.wait(episode.generate())
                episode.record(turn, episode.rewrite([*episode.task.prompt, {"role": "user", "content": turn.text}]))
            return StopReason.STOP

    t = await run(Drives())
    assert t.stop_reason is StopReason.STOP and len(t.turns) == 2 and len(t.segments) == 2


async def test_plain_run_that_outlives_its_episode_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[str] = []
    begun, over, done = threading.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    skip_an_hour_once(begun.is_set, monkeypatch)

    class Outlives(MultiTurnScheduler):
        def run(self, episode: Episode) -> StopReason:
            begun.set()
            loop.call_soon_threadsafe(lambda: None)  # the loop looks at its clock
            over.wait()
            try:
                episode.wait(episode.prepare())
            except Exception as problem:
                errors.append(str(problem))
            done.set()
            return StopReason.STOP

    t = await run(Outlives(), limits=Limits(timeout_s=60.0))
    assert t.stop_reason is StopReason.TIMEOUT
    over.set()
    assert await asyncio.to_thread(done.wait, 60)
    assert len(errors) == 1 and "episode 'e' has ended" in errors[0]


async def test_wait_in_an_async_method_is_an_error() -> None:
    class Confused(MultiTurnScheduler):
        async def step(self, episode: Any, turn: Any) -> Any:
            return episode.wait(episode.call_tools(turn))

    t = await run(Confused())
    assert t.is_failed and "`wait` is for plain methods, which run in a thread; in an async method, use await" in t.error


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ({"run": "done"}, "the scheduler's run returned 'done'; return a StopReason"),
        (
            {"check_finished": "yes"},
            "the scheduler's check_finished returned 'yes'; return a StopReason, True, False or None",
        ),
        ({"step": 3}, "step returned 3; return None, a text, a message, a list of messages, or a Reply"),
    ],
)
async def test_wrong_return_value_is_named(returned: dict[str, Any], says: str) -> None:
    ((name, answer),) = returned.items()
    made = type("Odd", (MultiTurnScheduler,), {name: lambda self, *args: answer})
    made.__dict__[name].__name__ = name
    t = await run(made())
    assert t.is_failed and says in t.error
