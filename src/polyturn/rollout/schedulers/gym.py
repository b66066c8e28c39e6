"""Gym: every turn is an action in an environment, which answers, scores and says when it is over.

    {"prompt": "Walk to the goal.", "env_config": {"name": "frozen_lake", "size": 4, "seed": 7}}      a row

`env_config` names the environment and gives its arguments; what it leaves out comes from the scheduler's own. Each turn's
reward is the turn's score "env"; a row without a data_source is rewarded with their sum. A cut completion is an action as
well, and ends the episode all the same: an environment does not overrule a limit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import ConfigError, DataError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.rollout.context import derive_seed
from polyturn.rollout.env import Env, EnvStep, envs, observed
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.rollout.schedulers.registry import schedulers

if TYPE_CHECKING:
    from polyturn.rollout.episode import Episode
    from polyturn.rollout.live_turn import LiveTurn


@schedulers.register("gym")
class Gym(MultiTurnScheduler):
    """Drives one environment per trajectory."""

    scores_turns = True

    def __init__(
        self, *, env: str | None = None, env_config: Mapping[str, Any] | None = None, base: Path | None = None
    ) -> None:
        self._default = {**({} if env is None else {"name": env}), **(env_config or {})}
        self._base = base
        self._open: list[Env] = []
        """The environment, as long as it is to be closed."""
        self._is_over = False
        self._name = ""
        self._answer: EnvStep | None = None
        if "name" in self._default:
            self._class(self._default["name"])

    def check_task(self, task: Task) -> None:
        """Refuse a task whose environment is unknown or does not take its arguments."""
        config = self._config(task)
        name = config.pop("name")
        config.pop("seed", None)
        try:
            inspect.signature(self._class(name)).bind(**config)
        except TypeError as problem:
            raise DataError(
                f"task {task.id!r}: the environment {name!r} does not take its env_config: {problem}"
            ) from problem

    async def on_trajectory_start(self, episode: Episode) -> None:
        """Make the environment and show what it shows."""
        config = self._config(episode.task)
        self._name = config.pop("name")
        seed = config.pop("seed", derive_seed(episode.task.id))
        self._open = []  # the copy of this trajectory has its own
        env = await self._ask(episode, self._made, self._class(self._name), config)
        shown = await self._ask(episode, env.reset, seed=seed)
        if isinstance(shown, str):
            episode.rewrite(_with_text(episode.messages, shown))
        elif messages := observed(shown, name=self._name):
            episode.rewrite(messages)

    async def on_turn_end(self, episode: Episode, turn: LiveTurn) -> Any:
        """Act; end the episode where the environment is done."""
        answer = EnvStep.of(await self._ask(episode, self._open[0].step, turn.text), name=self._name)
        turn.scores["env"] = answer.reward
        turn.info.update(answer.info)
        self._answer = answer
        if answer.is_done:
            turn.observation += answer.observation
            return StopReason.ENV_DONE
        return None

    async def step(self, episode: Episode, turn: LiveTurn) -> Reply:
        """Show what the environment answered."""
        assert self._answer is not None
        return Reply(messages=self._answer.observation, goes_on=not self._answer.observation)

    async def on_trajectory_end(self, episode: Episode) -> None:
        """Close the environment."""
        self._is_over = True
        if (env := self._taken()) is not None:
            await self._ask(episode, env.close)

    def _made(self, make: Callable[..., Env], config: Mapping[str, Any]) -> Env:
        """Make the environment, in a thread; one that comes when its trajectory is over already is closed here."""
        env = make(**config)
        self._open.append(env)
        if self._is_over and self._taken() is not None and inspect.isawaitable(closing := env.close()):
            asyncio.run(_finish(closing))
        return env

    def _taken(self) -> Env | None:
        """Return the environment to whoever is to close it, once."""
        try:
            return self._open.pop()
        except IndexError:
            return None

    async def _ask(self, episode: Episode, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await episode.call(self, method, *args, of=f"the environment {self._name!r}:", **kwargs)

    def _config(self, task: Task) -> dict[str, Any]:
        own = task.extra.get("env_config") or {}
        if not isinstance(own, Mapping):
            raise DataError(
                f"task {task.id!r}: env_config is {own!r:.100}; it must be an object with the environment's arguments"
            )
        config = {**self._default, **own}
        if not isinstance(config.get("name"), str):
            raise DataError(
                f"task {task.id!r} names no environment; put `name` into its env_config, or set scheduler_kwargs.env"
            )
        return config

    def _class(self, name: str) -> Callable[..., Env]:
        found = envs.resolve(name, base=self._base)
        if not callable(found):
            raise ConfigError(f"the environment {name!r} is {found!r:.100}; it must be a class with reset, step and close")
        return found


async def _finish(awaitable: Awaitable[Any]) -> None:
    await awaitable


def _with_text(prompt: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Return a prompt whose last message, a user's, ends with `text`."""
    last = prompt[-1]
    if last.role != "user" or not isinstance(last.content, str):
        return (*prompt, Message(role="user", content=text))
    return (*prompt[:-1], dataclasses.replace(last, content=f"{last.content}\n{text}" if last.content.strip() else text))
