"""`rollout.scheduler: black_box`: an agent that knows nothing of polyturn drives each episode through HTTP.

    # agent.py
    async def agent(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        answer = await client.chat.completions.create(model="polyturn", messages=[{"role": "user", "content": …}])
        return float(task.ground_truth in answer.choices[0].message.content)

`SessionScheduler` is the common part: an episode whose turns another program asks for, still driven by the one loop.
`BlackBox` calls that program: a coroutine function, a plain one (in a thread), a command (in a process of its own), or a
command-line agent of `agents.py`; a sandbox holds the latter two.
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
from polyturn.core.plugins import import_attr
from polyturn.core.task import Task
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

TOLD = ("base_url", "anthropic_base_url", "api_key", "reward_key", "task", "model", "episode_id")
"""The parameters that an agent may ask for."""
REWARDS = ("returned", "posted", "final")


@keeps_deadlines
class SessionScheduler(MultiTurnScheduler):
    """An episode that another program asks for turn by turn; a subclass says which."""

    gives_reward = True
    rules = SessionRules()
    never_asked = (
        "the agent returned without a single request; give its client the base_url and the api_key that it is passed"
    )
    """The error of an episode without a request."""
    session: AgentSession

    async def run(self, episode: Episode) -> StopReason:
        """Open a session on the episode and let its agent use it.

        Raises:
            SchedulerError: the agent failed, or never asked.
        """
        self.session = session = AgentSession(self, episode, self.rules)
        reason = await session.run(lambda: self.let_ask(episode, session))
        if session.num_calls == 0:
            raise SchedulerError(self.never_asked)
        return reason

    async def let_ask(self, episode: Episode, session: AgentSession) -> None:
        """Make the session's requests, or wait until they are made."""
        raise NotImplementedError

    async def step(self, episode: Episode, turn: OpenTurn) -> Reply:
        """Tell the agent what was said; its next request is the answer."""
        return await self.session.answered(episode, turn)

    async def check_finished(self, episode: Episode, turn: OpenTurn) -> None:
        """Let the agent decide: it learns that the completion was cut."""


@keeps_deadlines
@dataclass(kw_only=True, eq=False, repr=False)
class BlackBox(SessionScheduler):
    """Calls an agent for every episode and serves it the model under an address of its own.

    Raises:
        ConfigError: there is no such agent, or it asks for what it is not told.
    """

    agent: str | Any = None
    """A command-line agent: a name of `agents.AGENTS`, or `file.py:value`. Or a function: `file.py:function`,
    `package.module:function`, or itself. It is passed those of `TOLD` that it has parameters for, and returns a reward (a
    number, or a mapping with "reward" and what else is to be recorded), or None where the run's reward functions score the
    episode."""
    command: Sequence[str] | None = None
    """Instead, a command of yours to start for each episode. The addresses and the key are in its environment under the
    names that the clients read, the task is a JSON object on its standard input."""
    kwargs: Mapping[str, Any] | None = None
    """Further arguments of the function, or variables of the agent's or command's environment, which has beside them only
    those of `core.secrets.PASSED_ON`, and none of this machine's in a sandbox."""
    sandbox: Mapping[str, Any] | None = None
    """The sandbox of each episode that the agent or command runs in (the fields of `SandboxSpec`); there, it reaches the
    model also where `network` is false. None runs it on this machine."""
    max_calls: int = 1000
    """Completions that an episode may have, over all its conversations."""
    ignore: Sequence[str] = ()
    """Parameters of requests that cannot be done here and are ignored instead of refused."""
    models: Sequence[str] = ()
    """Names that requests may use; () lets them use any."""
    sampling: str = "run"
    """"run": temperature, top_p and top_k are the run's, as the trainer's logprobs are; "request": those of the requests,
    for evaluation."""
    reward: str | None = None
    """The source of an episode's reward, before the run's reward functions. "returned": the function, by what it
    returns; "posted": also by posting one with the reward key, which a function has as a parameter and a command on a
    file descriptor; "final": neither, the reward functions alone decide. None is "returned" for a function and "final"
    for a command, whose environment code of the model's may read."""
    host: str = "127.0.0.1"
    """The address to listen on, for agents on other machines or in containers; every episode has its own key."""
    port: int = 0
    """The port; 0 takes a free one."""
    reach_as: str | None = None
    """The host in the addresses that agents get, if it is not `host`."""
    base: Path | None = None
    """The folder that relative paths start from."""

    def __post_init__(self) -> None:
        agent, command, host = self.agent, self.command, self.host
        if (agent is None) == (command is None):
            wrong = (
                "needs an agent (a name, file.py:function) or a command" if agent is None else "has an agent and a command"
            )
            raise ConfigError(f"black_box {wrong}; give one of the two in rollout.scheduler_kwargs (agent: null drops it)")
        if self.sampling not in ("run", "request"):
            raise ConfigError(f"black_box: sampling is {self.sampling!r}; use 'run' or 'request'")
        if command is not None and (isinstance(command, str) or not command):
            raise ConfigError(f"black_box: command is {command!r}; write it as a list, [python, agent.py]")
        for name in ("models", "ignore"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"black_box: {name} is {getattr(self, name)!r}; give a list of names")
        self._kwargs = dict(self.kwargs or {})
        self._spec = None if self.sandbox is None else read_spec(self.sandbox, where="sandbox", base=self.base)
        target = _target(agent, command, base=self.base)
        self._program = target if isinstance(target, CommandLineAgent) else None
        self._function = None if self._program is not None else target
        self._is_checked = self._is_late = False
        if self._function is not None and self._spec is not None:
            raise ConfigError(
                f"black_box: the agent {agent!r} is a function, which runs in this process and in no sandbox; drop "
                "sandbox, or name a command"
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
                f"black_box: host is {host!r}, which no agent can call; say in reach_as under which name it can"
            )
        if self.max_calls < 1:
            raise ConfigError(f"black_box: max_calls is {self.max_calls}; use at least 1")
        function = self._function
        self._wanted = () if function is None else _wanted(function, self._kwargs, str(agent))
        if function is not None and "reward_key" in self._wanted and self.reward != "posted":
            if inspect.signature(function).parameters.get("reward_key") is not None:
                raise ConfigError(
                    f"black_box: the agent {agent!r} has a parameter 'reward_key', and reward is {self.reward!r}: nothing "
                    "that is posted counts; set reward: posted in rollout.scheduler_kwargs"
                )
            self._wanted = tuple(name for name in self._wanted if name != "reward_key")
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
        """Whether it is a user's command on this machine, in the configuration's folder."""
        return self.command is not None and self._spec is None

    def check_task(self, task: Task) -> None:
        """Refuse a task without text for a command-line agent, and, once, an agent that is not installed.

        Raises:
            DataError: the task has nothing that the agent can be told.
            ConfigError: the agent is not installed where it runs.
        """
        if self._program is None:
            return
        if self._runs_by_base:
            self._check_command(self._program.command[0])
            return
        if not self._program.reads_task:
            instruction_of(task)
        self.look_for_agent(self._spec)

    def look_for_agent(self, spec: SandboxSpec | None) -> None:
        """Refuse, once, a command-line agent that is not installed where it runs.

        Raises:
            ConfigError: it is not, or the sandbox does not start.
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
        """Open a session on the episode and let its agent use it; a late agent ends it with a time-out.

        Raises:
            SchedulerError: the agent failed, or never asked.
        """
        reason = await super().run(episode)
        return StopReason.TIMEOUT if self._is_late and reason is StopReason.STOP else reason

    async def let_ask(self, episode: Episode, session: AgentSession) -> None:
        """Call the agent, and keep the reward that it returns.

        Raises:
            SchedulerError: the agent raised, or returned no reward.
        """
        async with AsyncExitStack() as opened:
            box = None if self._spec is None else await opened.enter_async_context(await open_sandbox(self._spec))
            address = await opened.enter_async_context(self.address_of(session, box))
            returned = await self._call(episode, address, box)
        if returned is not None:
            if self.reward == "final":
                raise SchedulerError(
                    f"the agent returned {returned!r:.100}, and reward: final leaves what an episode is worth to the "
                    "run's reward functions; return None, or drop the setting"
                )
            try:
                session.give_reward(*read_reward(returned))
            except BadRequest as problem:
                raise SchedulerError(f"the agent returned {returned!r:.100}: {problem.message}") from problem

    @asynccontextmanager
    async def address_of(self, session: AgentSession, box: BaseSandbox | None) -> AsyncIterator[Address]:
        """Serve a session inside the block; gives the address under which its agent, here or in `box`, finds it."""
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
        """Run the command-line agent to its end, and note whether it was late.

        Args:
            box: The sandbox that it runs in; None is this machine.
            task: The task that it gets.
            address: Of its model.
            id: Of the episode.
            timeout_s: Seconds after which it is ended; None is the agent's own `timeout_s`.

        Raises:
            SchedulerError: it cannot be started, or fails.
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
        arguments = {name: body[name] for name in self._wanted} | self._kwargs
        try:
            return await episode.call(self, self._function, has_deadline=False, of="the agent", **arguments)
        except SchedulerError:
            raise
        except PolyturnError as problem:
            raise SchedulerError(f"the agent raised {problem}") from problem


def _target(agent: Any, command: Sequence[str] | None, *, base: Path | None) -> Any:
    """Return the command-line agent, or the function, that a configuration names.

    Raises:
        ConfigError: there is none.
    """
    if command is not None:
        return CommandLineAgent(command=tuple(map(str, command)), reads_task=True, timeout_s=None)
    if not isinstance(agent, str):
        return agent
    if agent in AGENTS:
        return AGENTS[agent]
    if ":" not in agent and "." not in agent:
        raise UnknownNameError(
            f"black_box: there is no command-line agent {agent!r}.{did_you_mean(agent, AGENTS)} Name a function or an "
            "agent of yours as file.py:name"
        )
    return import_attr(agent, base=base)


def _wanted(function: Any, kwargs: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return which of `TOLD` a function has parameters for.

    Raises:
        ConfigError: it is not a function, or has a parameter that nothing fills.
    """
    if not inspect.isroutine(function):
        kind = type(function).__name__
        raise ConfigError(f"black_box: the agent {name!r} is a {kind}; name a function or a CommandLineAgent")
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return tuple(t for t in TOLD if t not in kwargs)
    for parameter in parameters.values():
        is_filled = parameter.name in TOLD or parameter.name in kwargs or parameter.default is not parameter.empty
        if not is_filled or parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"black_box: the agent {name!r} has a parameter {parameter.name!r}, which nothing fills; it may take "
                f"{', '.join(TOLD)}, and what scheduler_kwargs.kwargs names"
            )
    for row in kwargs:
        if row not in parameters:
            raise ConfigError(f"black_box: the agent {name!r} has no parameter {row!r}, which kwargs names")
    return tuple(t for t in TOLD if t in parameters and t not in kwargs)
