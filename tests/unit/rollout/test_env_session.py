"""A replayed environment must answer as it did: its prompt, observations, rewards and end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from polyturn.core.errors import NoSnapshotError, SnapshotError
from polyturn.rollout.env_session import EnvSession


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
