"""Env: an environment that the model acts in with text, as the `gym` scheduler drives it.

    class Counter:
        def __init__(self, goal: int = 3): ...                  the arguments are the row's `env_config`
        def reset(self, *, seed): return "Count to three."      the first observation
        def step(self, action): return "Go on.", 0.0, False, {} observation, reward, whether it is done, info
        def close(self): ...                                    called once on every end, also on errors

One object serves one episode. Each method may be plain or async; a plain method runs in a thread and does not block other
episodes. An observation is a text, a message, or a list of messages; messages may show images. `step` may also return
(observation, reward, terminated, truncated, info). In a game for several players, both methods return `Seated`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from polyturn.core.errors import DataError, SchedulerError
from polyturn.core.messages import Message
from polyturn.core.reward import MAX_REWARD, as_flag, as_score, brief
from polyturn.infra.plugin_shape import CallShape, Shape
from polyturn.infra.plugins import Registry


@runtime_checkable
class Env(Protocol):
    """An environment for one episode."""

    def reset(self, *, seed: int) -> Any:
        """Start the episode and return the first observation.

        A text is added to the last message of the row; messages replace the prompt; None keeps the prompt. A pair
        (observation, info) works, too, but the info is not recorded, because there is no turn yet.

        Args:
            seed: The same for every trajectory of a task; a `seed` in the row's `env_config` takes precedence.
        """
        ...

    def step(self, action: str) -> Any:
        """Apply the text of the model; return (observation, reward of this turn, whether the episode is done, info).

        Or return (observation, reward, terminated, truncated, info), where `truncated` means that a limit of the
        environment ended the episode; or a `Seated`.
        """
        ...

    def close(self) -> Any:
        """Release all resources. Called exactly once."""
        ...


ENV = Shape(
    what="an environment",
    needs=(("reset",), ("step",), ("close",)),
    bases=(Env,),
    calls={
        "reset": CallShape(num=0, names=("seed",), write="def reset(self, *, seed)"),
        "step": CallShape(num=1, write="def step(self, action)"),
        "close": CallShape(num=0, write="def close(self)"),
    },
)
"""The methods of an environment's class."""

envs: Registry[Callable[..., Env]] = Registry("envs")
"""Environments by name: classes, or functions that make one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seated:
    """The result of `reset` and of every `step` in a game for several players."""

    seat: int
    """The player who acts next, from 0."""
    observation: Any = None
    """Everything that this player has not been shown yet."""
    rewards: Mapping[int, float] = field(default_factory=dict)
    """Seat -> reward of this step; players without an entry earned nothing."""
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class EnvStep(NamedTuple):
    """The checked result of an environment's `step`."""

    observation: tuple[Message, ...]
    reward: float
    is_done: bool
    info: Mapping[str, Any]
    is_truncated: bool = False
    """Whether the episode ended only because of a limit of the environment."""
    seat: int = 0
    """The player who acts next."""
    rewards: Mapping[int, float] = {}
    """Seat -> reward of this step; empty with a single player, whose reward is `reward`."""

    @classmethod
    def of(cls, returned: Any, *, name: str) -> EnvStep:
        """Check and convert the result of `step`.

        Raises:
            SchedulerError: the result has an unknown form, or a reward is not a finite number.
        """
        if isinstance(returned, EnvStep):
            return returned
        seat = 0
        rewards: dict[int, float] = {}
        if isinstance(returned, Seated):
            observation, reward, info, seat = returned.observation, 0.0, returned.info, returned.seat
            is_done, truncated = returned.terminated, [returned.truncated]
            rewards = {player: _reward(value, name=name) for player, value in returned.rewards.items()}
        elif isinstance(returned, tuple | list) and len(returned) in (4, 5):
            observation, reward, is_done, *truncated, info = returned
        else:
            raise SchedulerError(
                f"the environment {name!r}: step returned {brief(returned, 200)}; return (observation, reward, done, info), "
                "or (observation, reward, terminated, truncated, info)"
            )
        # A step that is both terminated and truncated counts as terminated.
        is_over = _flag(is_done, name=name)
        is_truncated = not is_over and any(_flag(flag, name=name) for flag in truncated)
        return cls(
            observed(observation, name=name),
            _reward(reward, name=name),
            is_over or is_truncated,
            _info(info, name=name),
            is_truncated,
            seat,
            rewards,
        )


def _reward(value: Any, *, name: str) -> float:
    number = as_score(value)
    if number is None:
        raise SchedulerError(
            f"the environment {name!r}: step returned the reward {brief(value)}; return a finite number of at most "
            f"{MAX_REWARD:g}"
        )
    return number


def _flag(value: Any, *, name: str) -> bool:
    """Read a flag of an environment's result as a bool."""
    if (flag := as_flag(value)) is None:
        raise SchedulerError(
            f"the environment {name!r}: step returned {brief(value)} as the flag that ends the episode; return True or False"
        )
    return flag


def _info(info: Any, *, name: str) -> dict[str, Any]:
    if info is not None and not isinstance(info, Mapping):
        raise SchedulerError(f"the environment {name!r}: step returned the info {brief(info)}; return a mapping or None")
    return dict(info or {})


def first_observation(returned: Any) -> Any:
    """Return the observation in the result of `reset`, which may be a pair (observation, info)."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping) and "role" not in returned[1]:
        return returned[0]
    return returned


def observed(observation: Any, *, name: str) -> tuple[Message, ...]:
    """Return an observation as messages; a text becomes a user message.

    Raises:
        SchedulerError: the observation is neither a text nor messages, or a message is invalid.
    """
    if observation is None:
        return ()
    if isinstance(observation, str):
        return (Message(role="user", content=observation),)
    messages = (observation,) if isinstance(observation, Message | Mapping) else observation
    if not isinstance(messages, Sequence) or not all(isinstance(m, Message | Mapping) for m in messages):
        raise SchedulerError(
            f"the environment {name!r} showed {brief(observation, 200)}; return a text, a message, or messages"
        )
    try:
        return tuple(Message.from_openai(m) for m in messages)
    except DataError as problem:
        raise SchedulerError(f"the environment {name!r} showed an invalid message: {problem}") from problem
