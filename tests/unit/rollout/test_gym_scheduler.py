"""Environments in an episode: prompts, scores, one close each, and replays that must answer alike."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from polyturn.core.errors import DataError, NoSnapshotError, SnapshotError, UnknownNameError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.env import envs
from polyturn.rollout.env_session import EnvSession
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.schedulers import Gym
from polyturn.testing.episodes import scripted_context, task

CLOSED: list[Any] = []
STEPPED: list[Any] = []
EVERYBODY = threading.Barrier(16)
GATE = threading.Event()
"""Holds a thread inside an environment."""


@envs.register("test_counter")
class Counter:
    """Counts the actions, up to a goal."""

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
        if self.fails == "hang":
            STEPPED.append(self)
            GATE.wait(60)
        if self.fails == "meet":
            EVERYBODY.wait()
        if self.returns is not None:
            return self.returns
        return f"{len(self.said)} so far.", 0.5, len(self.said) == self.goal, {"count": len(self.said)}

    def close(self) -> None:
        CLOSED.append(self)
        if self.fails == "close":
            raise OSError("thin ice")


class AsyncCounter(Counter):
    async def reset(self, *, seed: int) -> Any:
        await asyncio.sleep(0)
        return super().reset(seed=seed)

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        return super().step(action)


class SlowCounter(Counter):
    """Takes long to be made."""

    def __init__(self) -> None:
        STEPPED.append(self)
        GATE.wait(60)
        super().__init__()

    async def close(self) -> None:  # type: ignore[override]
        super().close()


envs.register("test_async_counter")(AsyncCounter)
envs.register("test_slow_counter")(SlowCounter)


def context(says: Any = ("one", "two", "three"), *, limits: Limits | None = None, **kwargs: Any) -> Any:
    CLOSED.clear()
    made = scripted_context(list(says), scheduler=Gym(**{"env": "test_counter", **kwargs}), limits=limits)
    made.rewarder = RewardRouter({}, scheduler=made.scheduler)
    return made


def row(**config: Any) -> Any:
    return task("Play.", data_source=None, extra={"env_config": config})


@pytest.mark.parametrize("name", ["test_counter", "test_async_counter"])
async def test_environment_answers_scores_and_ends_the_episode(name: str) -> None:
    t = await run_episode(context(), row(name=name), id="e")
    assert t.stop_reason is StopReason.ENV_DONE
    assert t.reward.total == t.reward.components["turns"] == 1.0
    assert [m.text for m in t.messages] == ["Play.\nCount.", "one", "1 so far.", "two", "2 so far."]
    assert t.turn_scores == (0.5, 0.5)
    assert t.turns[1].info == {"count": 2}
    assert len(CLOSED) == 1


@pytest.mark.parametrize(
    ("is_goal", "is_limit", "reason"), [(False, True, StopReason.MAX_TURNS), (True, True, StopReason.ENV_DONE)]
)
async def test_limit_of_the_environment_is_a_truncation(is_goal: bool, is_limit: bool, reason: StopReason) -> None:
    t = await run_episode(context(), row(returns=("Over.", 0.5, is_goal, is_limit, {})), id="e")
    assert t.stop_reason is reason and t.stop_reason.is_truncation is not is_goal
    assert len(t.turns) == 1 and t.reward.total == 0.5
    assert t.messages[-1].text == "Over."


async def test_row_names_environment_arguments_and_seed() -> None:
    one = context(env="test_async_counter", env_config={"goal": 1})
    t = await run_episode(one, row(), id="e")
    assert len(t.turns) == 1 and isinstance(CLOSED[0], AsyncCounter)
    own = CLOSED[0].seed
    await run_episode(one, row(name="test_counter", goal=3, seed=7), id="e1")
    assert type(CLOSED[1]) is Counter
    assert CLOSED[1].seed == 7
    assert len(CLOSED[1].said) == 3
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
async def test_reset_adds_to_the_prompt_or_replaces_it(shows: Any, said: list[str]) -> None:
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
async def test_limit_ends_the_episode_and_closes_the_environment(limits: Limits, reason: StopReason, turns: int) -> None:
    t = await run_episode(context(["a long answer"], limits=limits), row(goal=99), id="e")
    assert t.stop_reason is reason
    assert len(t.turns) == turns
    assert len(CLOSED) == 1
    assert all(turn.scores == {"env": 0.5} for turn in t.turns)  # the last turn is scored as well


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"fails": "step"}, "step raised OSError: the ice broke"),
        ({"fails": "reset"}, "reset raised OSError: no map"),
        ({"returns": 3}, "step returned 3"),
        ({"returns": ("x", "much", False, {})}, "reward 'much'"),
        ({"returns": ("x", float("nan"), False, {})}, "reward nan"),
        ({"returns": ("x", 0.0, False, 5)}, "info 5"),
        ({"returns": ("x", 0.0, "false", {})}, "'false'"),
        ({"returns": ("x", 0.0, False, {}, {})}, "{}"),
        ({"returns": ("x", 0.0, [[0, 1]], {})}, "[[0, 1]]"),
        ({"returns": (5, 0.0, False, {})}, "showed 5"),
        ({"returns": ({"role": "user", "content": 5}, 0.0, False, {})}, "the content of a message is 5"),
        ({"returns": ([{"content": "x"}], 0.0, False, {})}, "a message needs a 'role'"),
        ({"shows": {"role": "user", "content": 5}}, "the content of a message is 5"),
    ],
)
async def test_broken_environment_fails_its_trajectory_and_is_closed(config: Any, key: str) -> None:
    t = await run_episode(context(), row(**config), id="e")
    assert t.is_failed
    assert "'test_counter'" in (t.error or "")
    assert key in (t.error or "")
    assert len(CLOSED) == 1


async def test_environment_that_fails_to_close_is_reported_the_first_and_the_tenth_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = context()
    for number in range(11):
        assert (await run_episode(made, row(fails="close"), id=f"e{number}")).error is None
    first, tenth = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert first.startswith("e0: on_trajectory_end failed: ") and "close raised OSError: thin ice (test_gym_sch" in first
    assert tenth.startswith("e9: ") and tenth.endswith(" (10 trajectories so far)")


@pytest.mark.parametrize(("name", "config"), [("test_counter", {"fails": "hang"}), ("test_slow_counter", {})])
async def test_cancelled_episode_closes_its_environment(name: str, config: Any) -> None:
    STEPPED.clear()
    GATE.clear()
    running = asyncio.create_task(run_episode(context(env=name), row(**config), id="e"))
    while not STEPPED:  # noqa: ASYNC110 (a thread appends to it)
        await asyncio.sleep(0.01)
    running.cancel()
    GATE.set() if config else None
    with pytest.raises(asyncio.CancelledError):
        await running
    GATE.set()
    while not CLOSED:  # noqa: ASYNC110 (the thread that made it closes it)
        await asyncio.sleep(0.01)
    assert len(CLOSED) == 1


async def test_environments_do_not_wait_for_one_another() -> None:
    shared = context()
    found = await asyncio.gather(*(run_episode(shared, row(fails="meet", goal=1), id=f"e{i}") for i in range(16)))
    assert [t.error for t in found] == [None] * 16
    assert len(CLOSED) == 16


@pytest.mark.parametrize(
    ("env", "extra", "error", "key"),
    [
        ("test_counter", {"env_config": {"size": 4}}, DataError, "'t0'.*'size'"),
        ("test_counter", {"env_config": 3}, DataError, "'t0'.*env_config is 3"),
        (None, {}, DataError, "'t0'.*`name`"),
        ("test_countr", {}, UnknownNameError, "'test_countr'.*'test_counter'"),
    ],
)
def test_row_that_cannot_be_played_is_refused(env: str | None, extra: Any, error: type[Exception], key: str) -> None:
    with pytest.raises(error, match=key):
        Gym(env=env).check_task(task(extra=extra))


class Counts:
    """Answers each action with its number; `changed` are the answers of a later version of it."""

    replays = True

    def __init__(self, **changed: Any) -> None:
        self.answer = {"shown": "begin", "says": "1", "pays": 0.5, "ends": False} | changed

    def reset(self, *, seed: int) -> str:
        return f"{self.answer['shown']} {seed}"

    def step(self, action: str) -> Any:
        return self.answer["says"] + action, self.answer["pays"], self.answer["ends"], {"info": id(self)}

    def close(self) -> None:
        pass


async def direct(method: Callable[..., Any], *args: Any, of: str, **kwargs: Any) -> Any:
    answer = method(*args, **kwargs)
    return await answer if isinstance(answer, Awaitable) else answer


def session(**changed: Any) -> EnvSession:
    return EnvSession("counts", Counts, changed, call=direct)


async def kept() -> Any:
    first = session()
    await first.reset(seed=7)
    await first.step("a")
    return await first.snapshot()


async def test_replayed_environment_goes_on_where_it_stood():
    again = session()
    await again.restore(await kept(), seed=7, actions=["a"])
    assert (await again.step("b")).observation[0].text == "1b"


@pytest.mark.parametrize("changed", [{"shown": "x"}, {"says": "2"}, {"pays": 0.25}, {"ends": True}])
async def test_environment_that_answers_differently_is_refused(changed: dict[str, Any]):
    with pytest.raises(SnapshotError, match="'counts'"):
        await session(**changed).restore(await kept(), seed=7, actions=["a"])


@pytest.mark.parametrize(("seed", "actions"), [(8, ["a"]), (7, []), (7, ["b"]), (7, ["a", "a"])])
async def test_other_seed_or_actions_are_refused(seed: int, actions: list[str]):
    with pytest.raises(SnapshotError, match="'counts'"):
        await session().restore(await kept(), seed=seed, actions=actions)


async def test_environment_without_replay_keeps_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Counts, "replays", False)
    first = session()
    await first.reset(seed=7)
    with pytest.raises(NoSnapshotError):
        await first.snapshot()
