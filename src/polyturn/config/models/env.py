"""The section `env`: environments, each of which brings its tasks, what acts on them and their score.

    env: textarena:GuessTheNumber-v0
    env: {name: gymnasium:FrozenLake-v1, tasks: 256, kwargs: {is_slippery: false}}

It stands in place of `data`, `rollout.scheduler` and a reward.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from polyturn.config.parts import Section
from polyturn.core.live import NameOrObject


class EnvConfig(Section):
    """An environment: where tasks come from, what acts on them and what scores them, all in one."""

    PART: ClassVar[str] = "any environment"

    name: NameOrObject
    """`prefix:id`, for instance `textarena:GuessTheNumber-v0`; or `package.module:Class` or `file.py:Class` of one's own."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment."""
    tasks: int = Field(1024, ge=1)
    """Tasks to train on: one for each seed from `seed` on."""
    eval_tasks: int = Field(64, ge=0)
    """Tasks to evaluate with, of the seeds after those; 0 means no evaluation."""
    seed: int = Field(0, ge=0)
    """The first seed."""
    prompt: str | None = None
    """The text before the environment's first observation; null for that of the environment's adapter."""
    system: str | None = None
    """A system message."""
    action: str | None = None
    """A regular expression that finds the action in what the model wrote: the last match, its first group if it has one.
    Null gives the environment all but the reasoning."""
    score: Literal["sum", "last"] | None = None
    """The reward of an episode: the sum of its rewards or the last one; null for what suits the environment."""
    seats: list[NameOrObject | dict[str, Any] | list[NameOrObject | dict[str, Any]]] = []
    """The player of each seat of a game: policy, random, one of `policies` by its name or as {policy: …, temperature: …},
    `file.py:function`, {url: …, model: …}; or a list, of which one is drawn for each task. Empty: the policy, each."""
    eval_seats: list[NameOrObject | dict[str, Any] | list[NameOrObject | dict[str, Any]]] = []
    """The same in evaluation; empty: as in training."""
    rotate: bool = True
    """Let the players change seats from task to task."""
    forfeit: float | None = None
    """The reward of a player whom a limit stops before the environment is done; null is 0, and -1 in a game of several."""

    @field_validator("action")
    @classmethod
    def _compiles(cls, action: str | None) -> str | None:
        try:
            re.compile(action or "")
        except re.error as problem:
            raise ValueError(f"{action!r} is not a regular expression ({problem})") from problem
        return action
