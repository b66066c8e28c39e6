"""EnvironmentLoop: every turn is an action in an environment, which answers, scores and decides when it is done.

    reset -> prompt;  turn -> step -> observation -> turn …        one environment per trajectory

`Gym` is the loop for environments that rows name:

    {"prompt": "Walk to the goal.", "env_config": {"name": "frozen_lake", "size": 4, "seed": 7}}      a row

`env_config` names the environment and gives its arguments; the scheduler's `env_config` provides defaults. The reward of
each step is the turn's score "env"; the reward of a row without a data_source is their sum. A completion that a
limit cut is still taken as an action, but the episode ends after it, even if the environment is not done. An environment
that returns `truncated` ends the episode as `max_turns` does; its last reward counts.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, DataError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message, Origin
from polyturn.core.seeds import derive_seed
from polyturn.core.task import Task
from polyturn.infra.plugin_shape import check_class
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.env import ENV, Env, EnvStep, envs, observed
from polyturn.rollout.env_session import EnvSession
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import OpenTurn, Reply
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.schedulers.registry import schedulers


@keeps_deadlines
class EnvironmentLoop(MultiTurnScheduler):
    """Drives one environment per trajectory; a subclass chooses the environment in `begin`."""

    scores_turns = True

    _session: EnvSession | None = None
    _answer = EnvStep((), 0.0, False, {})

    def begin(self, episode: Episode) -> tuple[EnvSession, int]:
        """Return a session for the episode's environment, which is not made yet, and the seed for its reset."""
        raise NotImplementedError

    def actions(self, episode: Episode, state: Mapping[str, Any]) -> Sequence[str]:
        """Return all actions before the snapshot `state`, for an environment that is replayed."""
        return [turn.text for turn in episode.turns]

    async def on_trajectory_start(self, episode: Episode) -> None:
        """Make the environment and add its first observation to the prompt."""
        self._session, seed = self.begin(episode)
        await self.open(episode, await self._session.reset(seed=seed), name=self._session.name)

    async def open(self, episode: Episode, first_observation: Any, *, name: str) -> None:
        """Show the first observation of the environment `name`: append a text to the prompt, or replace it by messages."""
        if isinstance(first_observation, str):
            episode.rewrite(with_text(episode.messages, first_observation))
        elif messages := observed(first_observation, name=name):
            episode.rewrite(messages)

    async def on_turn_end(self, episode: Episode, turn: OpenTurn) -> Any:
        """Take the turn as an action; end the episode if the environment is done."""
        ended = await self.act(turn.text)
        self.score(turn)
        if ended is not None:
            turn.observation += self._answer.observation
        return ended

    async def act(self, action: str) -> StopReason | None:
        """Take an action; return the stop reason if the environment is done, else None.

        A limit of the environment counts as truncation, like the run's own limit on turns.
        """
        assert self._session is not None
        self._answer = await self._session.step(action)
        if not self._answer.is_done:
            return None
        return StopReason.MAX_TURNS if self._answer.is_truncated else StopReason.ENV_DONE

    def score(self, turn: OpenTurn) -> None:
        """Add the reward and the info of the last action to the turn."""
        turn.scores["env"] = turn.scores.get("env", 0.0) + self._answer.reward
        turn.info.update(self._answer.info)

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        """Show the environment's observation; after an empty one, the model acts again without a new message."""
        return Reply(messages=self._answer.observation, goes_on=not self._answer.observation)

    async def snapshot(self, episode: Episode) -> Any:
        assert self._session is not None
        return await self._session.snapshot()

    async def restore(self, episode: Episode, state: Any) -> None:
        """Make the environment again, in the state of the snapshot."""
        self._session, seed = self.begin(episode)
        await self._session.restore(state, seed=seed, actions=self.actions(episode, state))

    async def on_trajectory_end(self, episode: Episode) -> None:
        if self._session is not None:
            await self._session.close()


@schedulers.register("gym")
class Gym(EnvironmentLoop):
    """Drives the environment that the task's row names."""

    def __init__(
        self, *, env: str | None = None, env_config: Mapping[str, Any] | None = None, base: Path | None = None
    ) -> None:
        self._default = {**({} if env is None else {"name": env}), **(env_config or {})}
        self._base = base
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

    def begin(self, episode: Episode) -> tuple[EnvSession, int]:
        """Return the environment of the row's `env_config`."""
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
                f"task {task.id!r} has no environment; set `name` in its env_config, or rollout.scheduler_kwargs.env"
            )
        return config

    def _class(self, name: str) -> Callable[..., Env]:
        cls = envs.resolve(name, base=self._base)
        if not callable(cls):
            raise ConfigError(f"the environment {name!r} is {cls!r:.100}; it must be a class with reset, step and close")
        if isinstance(cls, type):
            check_class(cls, ENV, where=f"the environment {name!r}")
        return cls


def with_text(prompt: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Append `text` to the last message of a prompt, or add a user message if that is not a user's text.

    The message with `text` counts as the environment's.
    """
    last = prompt[-1]
    if last.role != "user" or not isinstance(last.content, str):
        return (*prompt, Message(role="user", content=text, origin=Origin.ENVIRONMENT))
    joined = f"{last.content}\n{text}" if last.content.strip() else text
    return (*prompt[:-1], dataclasses.replace(last, content=joined, origin=Origin.ENVIRONMENT))
