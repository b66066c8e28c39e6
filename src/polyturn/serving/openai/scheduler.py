"""`rollout.scheduler: black_box`: an agent written without polyturn drives each episode over HTTP.

    # agent.py
    async def agent(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        answer = await client.chat.completions.create(model="polyturn", messages=[{"role": "user", "content": …}])
        return float(task.ground_truth in answer.choices[0].message.content)

`SessionScheduler` runs an episode whose turns another program requests, with the same loop as every other scheduler.
`BlackBox` starts that program: a coroutine function, a plain function (in a thread), a command (in its own process), or a
command-line agent of `agents.py`. Commands and command-line agents can run in a sandbox.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import ConfigError, PolyturnError, SchedulerError, UnknownNameError, did_you_mean
from polyturn.core.lifecycle import StopReason
from polyturn.core.task import Task
from polyturn.infra.plugins import import_attr
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.sandbox import BaseSandbox, SandboxSpec, open_sandbox, read_spec
from polyturn.sandbox.reach import reach
from polyturn.serving.auth import ServerRules, is_loopback
from polyturn.serving.openai.agent_process import run_command
from polyturn.serving.openai.agents import AGENTS, CommandLineAgent, check_installed, instruction_of, run_here, run_inside
from polyturn.serving.openai.chat_request import BadRequest
from polyturn.serving.openai.endpoint import MAX_REQUESTS, Address, EndpointOptions, ModelEndpoint
from polyturn.serving.openai.http import read_reward
from polyturn.serving.openai.session import AgentSession, SessionRules

if TYPE_CHECKING:
    from polyturn.rollout.episode import Episode
    from polyturn.rollout.open_turn import OpenTurn

logger = logging.getLogger(__name__)

AGENT_ARGUMENTS = ("base_url", "anthropic_base_url", "api_key", "reward_key", "task", "model", "episode_id")
"""The parameters that an agent's function may have."""
REWARDS = ("returned", "posted", "final")


@keeps_deadlines
class SessionScheduler(MultiTurnScheduler):
    """Runs an episode whose turns another program requests; a subclass starts the program."""

    gives_reward = True
    offers_tools = False
    rules = SessionRules()
    no_request_error = (
        "the agent returned without a single request; give its client the base_url and api_key that the agent gets"
    )
    """The error of an episode without a request."""
    session: AgentSession

    async def run(self, episode: Episode) -> StopReason:
        """Open a session on the episode and run its agent.

        Raises:
            SchedulerError: the agent failed, or sent no request.
        """
        self.session = session = AgentSession(self, episode, self.rules)
        reason = await session.run(lambda: self.run_agent(episode, session))
        if not session.has_requests:
            raise SchedulerError(self.no_request_error)
        return reason

    async def run_agent(self, episode: Episode, session: AgentSession) -> None:
        """Run the agent, or wait until it has sent its requests."""
        raise NotImplementedError

    async def step(self, episode: Episode, turn: OpenTurn) -> Reply:
        """Send the completion to the agent and return its next request as the reply."""
        return await self.session.answered(episode, turn)

    async def check_finished(self, episode: Episode, turn: OpenTurn) -> None:
        """Do nothing: the agent sees that the completion was cut, and decides."""


@keeps_deadlines
@dataclass(kw_only=True, eq=False, repr=False)
class BlackBox(SessionScheduler):
    """Runs an agent for every episode and serves the model to it under a separate address.

    Raises:
        ConfigError: there is no such agent, or its function has a parameter without a value.
    """

    agent: str | Any = None
    """A command-line agent (a name of `agents.AGENTS`, or `file.py:value`) or a function (`file.py:function`,
    `package.module:function`, or the function itself). A function gets the `AGENT_ARGUMENTS` for which it has
    parameters. It returns a reward (a number, or a mapping with "reward" and further values to record), or None if the run's
    reward functions score the episode."""
    command: Sequence[str] | None = None
    """Alternative to `agent`: a command to start for each episode. Its environment has the addresses and the key under the
    names that clients read; its standard input has the task as a JSON object."""
    kwargs: Mapping[str, Any] | None = None
    """Further arguments of the function, or environment variables of the agent or command. On this machine the environment
    also has the variables of `core.secrets.PASSED_ON`; in a sandbox it has none of this machine's."""
    sandbox: Mapping[str, Any] | None = None
    """The sandbox in which each episode's agent or command runs (the fields of `SandboxSpec`). The model stays reachable
    when `network` is false. None runs the agent on this machine."""
    max_calls: int = 1000
    """Largest number of completions of an episode, over all its conversations."""
    ignore: Sequence[str] = ()
    """Unsupported parameters of requests to ignore instead of refusing them."""
    models: Sequence[str] = ()
    """Model names that requests may use; empty allows any."""
    sampling: str = "run"
    """"run": temperature, top_p and top_k are the run's, which the trainer's logprobs assume. "request": they are the
    request's, for evaluation."""
    reward: str | None = None
    """Source of an episode's reward; without a reward from it, the run's reward functions decide. "returned": the
    function's return value. "posted": also a reward posted with the reward key, which a function gets as a parameter and a
    command on a file descriptor. "final": the reward functions only. None means "returned" for a function, and "final" for
    a command, because the model's code may read a command's environment."""
    host: str = "127.0.0.1"
    """The address to listen on; change it for agents on other machines or in containers. Every episode has its own key."""
    port: int = 0
    """The port; 0 takes a free one."""
    reach_as: str | None = None
    """The host in the addresses that agents get, if not `host`."""
    base: Path | None = None
    """The folder that relative paths are resolved against."""

    def __post_init__(self) -> None:
        agent, command, host = self.agent, self.command, self.host
        if (agent is None) == (command is None):
            wrong = (
                "needs an agent (a name, file.py:function) or a command" if agent is None else "has an agent and a command"
            )
            raise ConfigError(f"black_box {wrong}; set one of the two in rollout.scheduler_kwargs (agent: null removes it)")
        if self.sampling not in ("run", "request"):
            raise ConfigError(f"black_box: sampling is {self.sampling!r}; use 'run' or 'request'")
        if command is not None and (isinstance(command, str) or not command):
            raise ConfigError(f"black_box: command is {command!r}; write it as a list, [python, agent.py]")
        for name in ("models", "ignore"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"black_box: {name} is {getattr(self, name)!r}; use a list of names")
        self._kwargs = dict(self.kwargs or {})
        self._spec = None if self.sandbox is None else read_spec(self.sandbox, where="sandbox", base=self.base)
        target = _target(agent, command, base=self.base)
        self._program = target if isinstance(target, CommandLineAgent) else None
        self._function = None if self._program is not None else target
        self._is_checked = self._is_late = False
        if self._function is not None and self._spec is not None:
            raise ConfigError(
                f"black_box: the agent {agent!r} is a function, which runs in this process and not in a sandbox; remove "
                "sandbox, or use a command"
            )
        allowed = REWARDS if self._function is not None else REWARDS[1:] if self._runs_by_base else REWARDS[2:]
        reward = self.reward
        if reward is None:
            self.reward = allowed[0] if self._function is not None else "final"
        if self.reward not in allowed:
            raise ConfigError(f"black_box: reward is {reward!r}; use {' or '.join(map(repr, allowed))}")
        self.gives_reward = self.reward != "final"
        if host in ("0.0.0.0", "::") and self.reach_as is None:
            raise ConfigError(
                f"black_box: host is {host!r}, which agents cannot connect to; set reach_as to a name that they can reach"
            )
        for name, numbers in (("max_calls", range(1, 1 << 31)), ("port", range(1 << 16))):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number not in numbers:
                limits = f"from {numbers[0]} to {numbers[-1]}"
                raise ConfigError(f"black_box: {name} is {number!r}; use a whole number {limits}")
        function = self._function
        self._arguments = () if function is None else _arguments_of(function, self._kwargs, str(agent))
        if function is not None and "reward_key" in self._arguments and self.reward != "posted":
            if inspect.signature(function).parameters.get("reward_key") is not None:
                raise ConfigError(
                    f"black_box: the agent {agent!r} has a parameter 'reward_key', but reward is {self.reward!r}, so "
                    "posted rewards are refused; set reward: posted in rollout.scheduler_kwargs"
                )
            self._arguments = tuple(name for name in self._arguments if name != "reward_key")
        self.rules = SessionRules(samples_as_asked=self.sampling == "request", max_calls=self.max_calls)
        options = EndpointOptions(
            host=host,
            port=self.port,
            reach_as=self.reach_as,
            models=tuple(self.models) or ("polyturn",),
            any_model=not self.models,
            ignore=frozenset(self.ignore),
            rules=ServerRules(is_loopback=is_loopback(host), max_requests=MAX_REQUESTS),
        )
        self._endpoint = ModelEndpoint(options)

    @property
    def _runs_by_base(self) -> bool:
        """Whether the agent is a user's command that runs on this machine, in the configuration's folder."""
        return self.command is not None and self._spec is None

    def check_task(self, task: Task) -> None:
        """Refuse a task without text for a command-line agent; the first call also checks that the agent is installed.

        Raises:
            DataError: the task's prompt cannot be passed to the agent.
            ConfigError: the agent is not installed where it runs.
        """
        if self._program is None:
            return
        if self._runs_by_base:
            self._check_command(self._program.command[0])
            return
        if not self._program.reads_task:
            instruction_of(task)
        self.check_agent_installed(self._spec)

    def check_agent_installed(self, spec: SandboxSpec | None) -> None:
        """Check that a command-line agent is installed where it runs; only the first call does anything.

        Raises:
            ConfigError: the agent is not installed, or the sandbox does not start.
        """
        if self._program is not None and not self._is_checked:
            name = self.agent if isinstance(self.agent, str) else self._program.command[0]
            check_installed(self._program, name, env=self._kwargs, spec=spec)
            self._is_checked = True

    def _check_command(self, program: str) -> None:
        path = self._kwargs.get("PATH") or os.environ.get("PATH")
        located = (self.base or Path()) / program if os.sep in program else program
        if shutil.which(located, path=path) is None:
            raise ConfigError(
                f"black_box: the program of command, {program!r}, is not on this machine; install it, or give its path"
            )

    async def run(self, episode: Episode) -> StopReason:
        """Open a session on the episode and run its agent; the stop reason is TIMEOUT if the agent exceeds its time limit.

        Raises:
            SchedulerError: the agent failed, or sent no request.
        """
        reason = await super().run(episode)
        return StopReason.TIMEOUT if self._is_late and reason is StopReason.STOP else reason

    async def run_agent(self, episode: Episode, session: AgentSession) -> None:
        """Run the agent and store the reward that it returns.

        Raises:
            SchedulerError: the agent raised, or returned a value that is not a reward, or any value with reward "final".
        """
        async with AsyncExitStack() as opened:
            box = None if self._spec is None else await opened.enter_async_context(await open_sandbox(self._spec))
            address = await opened.enter_async_context(self.address_of(session, box))
            returned = await self._call(episode, address, box)
        if returned is not None:
            if self.reward == "final":
                raise SchedulerError(
                    f"the agent returned {returned!r:.100}, but with reward: final only the run's reward functions "
                    "score an episode; return None, or remove the setting"
                )
            try:
                session.give_reward(*read_reward(returned))
            except BadRequest as problem:
                raise SchedulerError(f"the agent returned {returned!r:.100}: {problem.message}") from problem

    @asynccontextmanager
    async def address_of(self, session: AgentSession, box: BaseSandbox | None) -> AsyncIterator[Address]:
        """Serve a session while the context is open; yield its address as seen by the agent, here or in `box`."""
        async with self._endpoint.serving() as origin, AsyncExitStack() as opened:
            if box is not None and self.reach_as is None:
                origin = await opened.enter_async_context(reach(box, origin))
            name, address = self._endpoint.admit(session, origin=origin, posts_reward=self.reward == "posted")
            try:
                yield address
            finally:
                self._endpoint.dismiss(name, "its agent has finished")

    async def run_program(
        self, box: BaseSandbox | None, task: Task, *, address: Address, id: str, timeout_s: float | None = None
    ) -> None:
        """Run the command-line agent to its end, and record whether it exceeded its time limit.

        Args:
            box: The sandbox to run in; None is this machine.
            task: The task for the agent.
            address: The address of the model.
            id: The episode's id.
            timeout_s: Seconds after which the agent is ended; None uses the agent's own `timeout_s`.

        Raises:
            SchedulerError: the agent cannot be started, or fails.
        """
        assert self._program is not None
        program = self._program if timeout_s is None else dataclasses.replace(self._program, timeout_s=timeout_s)
        run: Any = run_here if box is None else functools.partial(run_inside, box)
        model = self._endpoint.options.models[0]
        self._is_late = not await run(program, address=address, model=model, task=task, env=self._kwargs, id=id)

    async def _call(self, episode: Episode, address: Address, box: BaseSandbox | None) -> Any:
        if self._runs_by_base:
            assert self._program is not None
            command, task = self._program.command, episode.task
            await run_command(command, address=address, task=task, env=self._kwargs, cwd=self.base, id=episode.id)
            return None
        if self._program is not None:
            await self.run_program(box, episode.task, address=address, id=episode.id)
            return None
        body = {
            "base_url": address.base_url,
            "anthropic_base_url": address.anthropic_base_url,
            "api_key": address.api_key,
            "reward_key": address.reward_key,
            "task": episode.task,
            "model": self._endpoint.options.models[0],
            "episode_id": episode.id,
        }
        arguments = {name: body[name] for name in self._arguments} | self._kwargs
        try:
            return await episode.call(self, self._function, has_deadline=False, of="the agent", **arguments)
        except SchedulerError:
            raise
        except PolyturnError as problem:
            raise SchedulerError(f"the agent raised {problem}") from problem


def _target(agent: Any, command: Sequence[str] | None, *, base: Path | None) -> Any:
    """Return the command-line agent or the function that a configuration names.

    Raises:
        ConfigError: the name does not exist.
    """
    if command is not None:
        return CommandLineAgent(command=tuple(map(str, command)), reads_task=True, timeout_s=None)
    if not isinstance(agent, str):
        return agent
    if agent in AGENTS:
        return AGENTS[agent]
    if ":" not in agent and "." not in agent:
        raise UnknownNameError(
            f"black_box: there is no command-line agent {agent!r}.{did_you_mean(agent, AGENTS)} Name your own "
            "function or agent as file.py:name"
        )
    return import_attr(agent, base=base)


def _arguments_of(function: Any, kwargs: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the names of `AGENT_ARGUMENTS` that a function has parameters for.

    Raises:
        ConfigError: the value is not a function, or has a parameter without a value.
    """
    if not inspect.isroutine(function):
        kind = type(function).__name__
        raise ConfigError(f"black_box: the agent {name!r} is a {kind}; name a function or a CommandLineAgent")
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return tuple(t for t in AGENT_ARGUMENTS if t not in kwargs)
    for parameter in parameters.values():
        is_filled = parameter.name in AGENT_ARGUMENTS or parameter.name in kwargs or parameter.default is not parameter.empty
        if not is_filled or parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"black_box: the agent {name!r} has a parameter {parameter.name!r}, which gets no value; use "
                f"{', '.join(AGENT_ARGUMENTS)}, or set the parameter in scheduler_kwargs.kwargs"
            )
    for key in kwargs:
        if key not in parameters:
            raise ConfigError(f"black_box: the agent {name!r} has no parameter {key!r}, which kwargs names")
    return tuple(t for t in AGENT_ARGUMENTS if t in parameters and t not in kwargs)
