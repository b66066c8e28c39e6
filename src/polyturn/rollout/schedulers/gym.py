"""Gym: every turn is an action in an environment, which answers, scores and says when it is over.

    {"prompt": "Walk to the goal.", "env_config": {"name": "frozen_lake", "size": 4, "seed": 7}}      a row

`env_config` names the environment and gives its arguments; what it leaves out comes from the scheduler's own. Each turn's
reward is the turn's score "env"; a row without a data_source is rewarded with their sum. A cut completion is an action as
well, and ends the episode all the same: an environment does not overrule a limit.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import ConfigError, DataError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message, Origin
from polyturn.core.plugin_class import check_class
from polyturn.core.seeds import derive_seed
from polyturn.core.task import Task
from polyturn.rollout.env import ENV, Env, EnvStep, envs, observed
from polyturn.rollout.env_session import EnvSession
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.rollout.schedulers.registry import schedulers

if TYPE_CHECKING:
    from polyturn.rollout.episode import Episode
    from polyturn.rollout.open_turn import OpenTurn


@schedulers.register("gym")
class Gym(MultiTurnScheduler):
    """Drives one environment per trajectory."""

    scores_turns = True

    def __init__(
        self, *, env: str | None = None, env_config: Mapping[str, Any] | None = None, base: Path | None = None
    ) -> None:
        self._default = {**({} if env is None else {"name": env}), **(env_config or {})}
        self._base = base
        self._session: EnvSession | None = None
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
        self._session, seed = self._new_session(episode)
        shown = await self._session.reset(seed=seed)
        if isinstance(shown, str):
            episode.rewrite(with_text(episode.messages, shown))
        elif messages := observed(shown, name=self._session.name):
            episode.rewrite(messages)

    async def on_turn_end(self, episode: Episode, turn: OpenTurn) -> Any:
        """Act; end the episode where the environment is done."""
        assert self._session is not None
        self._answer = await self._session.step(turn.text)
        turn.scores["env"] = self._answer.reward
        turn.info.update(self._answer.info)
        if self._answer.is_done:
            turn.observation += self._answer.observation
            return StopReason.ENV_DONE
        return None

    async def step(self, episode: Episode, turn: OpenTurn) -> Reply:
        """Show what the environment answered."""
        assert self._answer is not None
        return Reply(messages=self._answer.observation, goes_on=not self._answer.observation)

    async def snapshot(self, episode: Episode) -> Any:
        """Return what the environment keeps, or its trace."""
        assert self._session is not None
        return await self._session.snapshot()

    async def restore(self, episode: Episode, state: Any) -> None:
        """Make the environment again, where `state` left it."""
        self._session, seed = self._new_session(episode)
        await self._session.restore(state, seed=seed, actions=[turn.text for turn in episode.turns])

    async def on_trajectory_end(self, episode: Episode) -> None:
        """Close the environment."""
        if self._session is not None:
            await self._session.close()

    def _new_session(self, episode: Episode) -> tuple[EnvSession, int]:
        """Return the episode's environment, not made yet, and the seed that it is reset with."""
        config = self._config(episode.task)
        name, seed = config.pop("name"), config.pop("seed", derive_seed(episode.task.id))
        return EnvSession(name, self._class(name), config, call=functools.partial(episode.call, self)), seed

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
        if isinstance(found, type):
            check_class(found, ENV, where=f"the environment {name!r}")
        return found


def with_text(prompt: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Return a prompt whose last message, a user's, ends with `text`, and is trusted like it."""
    last = prompt[-1]
    if last.role != "user" or not isinstance(last.content, str):
        return (*prompt, Message(role="user", content=text, origin=Origin.ENVIRONMENT))
    joined = f"{last.content}\n{text}" if last.content.strip() else text
    return (*prompt[:-1], dataclasses.replace(last, content=joined, origin=Origin.ENVIRONMENT))
