"""`env: trl:game.py:Game`: a class for TRL's `environment_factory`; its public methods are the model's tools.

    class Game:
        def reset(self, **row): return "Guess."          before the first turn; the text is added to the last message
        def guess(self, letter: str) -> str:             a tool, whose schema is its signature and its docstring
            \"\"\"Guess a letter.

            Args:
                letter: The letter.
            \"\"\"
        def get_reward(self) -> float: ...               optional: called once, after the last turn

Each episode has one object. Its methods run one after another, in the order of the model's calls. If the class has no
`get_reward`, the run's reward functions score the episode.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import ConfigError, PolyturnError, SchedulerError, one_line
from polyturn.core.lifecycle import StopReason
from polyturn.core.protocols import Tool
from polyturn.core.task import Task
from polyturn.environments.base import ENV, Adapter, check_kwargs
from polyturn.infra.plugin_shape import takes_any_keyword
from polyturn.infra.plugins import import_attr
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.env import Env
from polyturn.rollout.scheduler import GivenReward, MultiTurnScheduler
from polyturn.tools.function import FunctionTool
from polyturn.tools.result_shape import ToolOutcome, finite, normalize

if TYPE_CHECKING:
    from polyturn.rollout.episode import Episode

_NO_TOOLS = ("reset", "get_reward")


@dataclass(slots=True, eq=False)
class _LiveEnv:
    """The environment of a running episode."""

    env: Any
    turn_taking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Trl(Adapter):
    """Makes objects of a class with `reset`, whose other public methods are tools."""

    takes_rows = True

    def __init__(self, name: str, id: str, kwargs: Mapping[str, Any], *, base: Path | None = None) -> None:
        super().__init__(name, id, kwargs, base=base)
        factory = import_attr(id, base=base)
        if not callable(factory):
            raise ConfigError(f"env {name!r} is {factory!r:.100}; use a class, or a function that returns an environment")
        self._factory: Callable[..., Any] = factory
        self.live: dict[str, _LiveEnv] = {}
        """Tool instance id -> the environment of a running episode."""
        probe = check_kwargs(self.new, name=name, kwargs=self.kwargs)
        functions = dict(inspect.getmembers(type(probe), inspect.isfunction))
        methods = [m for m in functions if not isinstance(inspect.getattr_static(probe, m), staticmethod)]
        if "reset" not in methods:
            raise ConfigError(f"env {name!r}: {type(probe).__name__} has no method reset, which begins every episode")
        self.has_reward = "get_reward" in methods
        self._tools = [self._tool(probe, m) for m in methods if m not in _NO_TOOLS and not m.startswith("_")]
        if not self._tools:
            raise ConfigError(
                f"env {name!r}: {type(probe).__name__} has no public method besides reset, so the model has no tools; "
                "add public methods"
            )

    def new(self) -> Any:
        """Return a new object of the class."""
        return self._factory(**self.kwargs)

    def make(self) -> Env:
        """Refuse: actions are tool calls, so only the adapter's own scheduler can run it."""
        raise SchedulerError(f"env {self.name!r} acts through tools; run it with its own scheduler")

    def tools(self) -> Sequence[Tool]:
        """Return the public methods of the class as tools."""
        return self._tools

    def scheduler(self) -> MultiTurnScheduler:
        """Return a scheduler that runs the default loop with an object of the class."""
        return TrlScheduler(self)

    def _tool(self, probe: Any, name: str) -> _MethodTool:
        try:
            return _MethodTool(inspect.getattr_static(probe, name).__get__(probe), self.live)
        except PolyturnError as problem:
            where = f"{type(probe).__name__}.{name}"
            raise ConfigError(f"env {self.name!r}: the method {where} is not a tool: {one_line(problem)}") from problem


class _MethodTool(FunctionTool):
    """A tool that calls a method of the episode's object."""

    def __init__(self, method: Callable[..., Any], live: Mapping[str, _LiveEnv]) -> None:
        super().__init__(method)
        self._called = method.__func__  # type: ignore[attr-defined]  # a bound method's function
        self._live = live

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolOutcome:
        """Call the method, after earlier calls of the episode have finished."""
        if instance_id not in self._live:
            raise SchedulerError(f"tool {self.name!r}: there is no environment for the episode {instance_id!r}")
        arguments, live = self.read_arguments(parameters), self._live[instance_id]
        async with live.turn_taking:
            if inspect.iscoroutinefunction(self._called):
                reply = await self._called(live.env, **arguments)
            else:
                reply = await self.threads.run(functools.partial(self._called, live.env, **arguments))
        return normalize(reply if isinstance(reply, dict | str) else str(reply))


@keeps_deadlines
class TrlScheduler(MultiTurnScheduler):
    """Runs the default loop with an object of the class."""

    def __init__(self, adapter: Trl) -> None:
        self._adapter = adapter
        self.gives_reward = adapter.has_reward

    async def on_trajectory_start(self, episode: Episode) -> None:
        """Create the object, reset it with the row, and show its first observation."""
        of = f"the environment {self._adapter.name!r}:"
        env = await episode.call(self, self._adapter.new, of=of)
        self._adapter.live[episode.id] = _LiveEnv(env)
        observed = await episode.call(self, env.reset, of=of, **_row(episode.task, env.reset))
        if observed is not None:
            episode.rewrite(_with(episode.messages[-1].to_openai(), observed, before=episode.messages[:-1], of=of))

    async def run(self, episode: Episode) -> StopReason:
        """Run the default loop, then get the reward from the object."""
        reason = await super().run(episode)
        if self._adapter.has_reward and episode.id in self._adapter.live:
            of = f"the environment {self._adapter.name!r}:"
            score = await episode.call(self, self._adapter.live[episode.id].env.get_reward, of=of)
            episode.given_reward = GivenReward(score=finite(score, what=f"{of} get_reward"))
        return reason

    async def on_trajectory_end(self, episode: Episode) -> None:
        """Release the object."""
        self._adapter.live.pop(episode.id, None)


def _row(task: Task, reset: Callable[..., Any]) -> dict[str, Any]:
    """Return those columns of the row that `reset` takes as parameters."""
    row = {k: v for k, v in task.extra.items() if k != ENV}
    row["prompt"] = [message.to_openai() for message in task.prompt]
    row.update({k: v for k, v in (("ground_truth", task.ground_truth), ("data_source", task.data_source)) if v is not None})
    if ENV in task.extra:
        row.setdefault("seed", task.extra[ENV]["seed"])
    if takes_any_keyword(reset):
        return row
    return {k: v for k, v in row.items() if k in inspect.signature(reset).parameters}


def _with(last: Mapping[str, Any], observed: Any, *, before: Sequence[Any], of: str) -> list[Any]:
    """Return the prompt with the result of `reset` added to its last message."""
    content = last["content"]
    if isinstance(observed, str) and isinstance(content, str):
        joined: Any = f"{content}\n{observed}" if content.strip() else observed
    elif isinstance(observed, str | list):
        parts = [content if isinstance(content, list) else [{"type": "text", "text": content}]]
        parts.append(observed if isinstance(observed, list) else [{"type": "text", "text": observed}])
        joined = [part for some in parts for part in some]
    else:
        raise SchedulerError(f"{of} reset returned {observed!r:.200}; return None, a text, or a list of content parts")
    return [*before, {**last, "content": joined}]
