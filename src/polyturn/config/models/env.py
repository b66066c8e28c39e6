"""The section `env`: environments, each with its tasks, observations and rewards.

    env: textarena:GuessTheNumber-v0
    env: {name: gymnasium:FrozenLake-v1, tasks: 256, kwargs: {is_slippery: false}}

An environment replaces `data`, `rollout.scheduler` and a reward.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from polyturn.config.parts import Section
from polyturn.infra.live import NameOrObject


class EnvConfig(Section):
    """An environment, which provides tasks, observations and rewards."""

    PART: ClassVar[str] = "any environment"

    name: NameOrObject
    """`prefix:id`, for instance `textarena:GuessTheNumber-v0`; or `package.module:Class` or `file.py:Class`."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment."""
    tasks: int = Field(1024, ge=1)
    """Number of training tasks, one per seed from `seed` on."""
    eval_tasks: int = Field(64, ge=0)
    """Number of evaluation tasks, with the following seeds; 0 means no evaluation."""
    seed: int = Field(0, ge=0)
    """The first seed."""
    prompt: str | None = None
    """Text before the environment's first observation; null takes the adapter's text."""
    system: str | None = None
    """A system message."""
    action: str | None = None
    """Regular expression for the action in the model's answer: the last match, or its first group. Null passes the whole
    answer except the reasoning."""
    score: Literal["sum", "last"] | None = None
    """The reward of an episode: the sum of its rewards or the last one; null takes the environment's default."""
    seats: list[NameOrObject | dict[str, Any] | list[NameOrObject | dict[str, Any]]] = []
    """The player of each seat of a game: policy, random, a name in `policies` or {policy: …, temperature: …},
    `file.py:function`, {url: …, model: …}; or a list, from which one is drawn per task. Empty: the policy plays all
    seats."""
    eval_seats: list[NameOrObject | dict[str, Any] | list[NameOrObject | dict[str, Any]]] = []
    """The players in evaluation; empty: as in training."""
    rotate: bool = True
    """Rotate the players through the seats from task to task."""
    forfeit: float | None = None
    """Reward of a player that a limit stops before the environment is done; null is 0, or -1 in a game of several
    players."""

    @field_validator("action")
    @classmethod
    def _compiles(cls, action: str | None) -> str | None:
        try:
            re.compile(action or "")
        except re.error as problem:
            raise ValueError(f"{action!r} is not a regular expression ({problem})") from problem
        return action
