"""Env: an environment that the model acts in with text, as the `gym` scheduler drives it.

    class Counter:
        def __init__(self, goal: int = 3): ...                  the arguments are the row's `env_config`
        def reset(self, *, seed): return "Count to three."      what the model is shown first
        def step(self, action): return "Go on.", 0.0, False, {} observation, reward, whether it is done, info
        def close(self): ...                                    exactly once, whatever ends the episode

One object serves one episode. Each method may be plain or async; a plain one runs in a thread and blocks no other episode.
An observation is a text, a message, or a list of messages; messages may show images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from polyturn.core.errors import SchedulerError
from polyturn.core.messages import Message
from polyturn.core.registry import Registry


@runtime_checkable
class Env(Protocol):
    """An environment for one episode."""

    def reset(self, *, seed: int) -> Any:
        """Begin, and return what the model is shown first.

        A text is added to the row's last message; messages replace the prompt; None leaves it as it is.

        Args:
            seed: The same for every trajectory of a task, unless the row's `env_config` has a `seed` of its own.
        """
        ...

    def step(self, action: str) -> tuple[Any, float, bool, Mapping[str, Any]]:
        """Take what the model wrote; return (observation, reward of this turn, whether it is done, info)."""
        ...

    def close(self) -> Any:
        """Let go of everything. Called exactly once."""
        ...


envs: Registry[Callable[..., Env]] = Registry("envs")
"""Environments by name: classes, or functions that make one."""


class EnvStep(NamedTuple):
    """What an environment answered, checked."""

    observation: tuple[Message, ...]
    reward: float
    is_done: bool
    info: Mapping[str, Any]

    @classmethod
    def of(cls, returned: Any, *, name: str) -> EnvStep:
        """Read what `step` returned.

        Raises:
            SchedulerError: it is not (observation, reward, done, info), or the reward is no finite number.
        """
        if not isinstance(returned, tuple | list) or len(returned) != 4:
            raise SchedulerError(
                f"the environment {name!r}: step returned {returned!r:.200}; return (observation, reward, done, info)"
            )
        observation, reward, is_done, info = returned
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise SchedulerError(
                f"the environment {name!r}: step gave the reward {reward!r:.100}; it must be a finite number"
            )
        if info is not None and not isinstance(info, Mapping):
            raise SchedulerError(f"the environment {name!r}: step gave the info {info!r:.100}; it must be a mapping or None")
        return cls(observed(observation, name=name), float(reward), bool(is_done), dict(info or {}))


def observed(observation: Any, *, name: str) -> tuple[Message, ...]:
    """Return an observation as messages; a text is a user's.

    Raises:
        SchedulerError: it is neither a text nor messages.
    """
    if observation is None:
        return ()
    if isinstance(observation, str):
        return (Message(role="user", content=observation),)
    if isinstance(observation, Message | Mapping):
        return (Message.from_openai(observation),)
    if isinstance(observation, Sequence) and all(isinstance(m, Message | Mapping) for m in observation):
        return tuple(Message.from_openai(m) for m in observation)
    raise SchedulerError(f"the environment {name!r} showed {observation!r:.200}; return a text, a message, or messages")
