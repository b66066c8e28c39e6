"""`env: harbor:./tasks`: Harbor's task folders, each episode in its own sandbox.

    set-up       the sandbox is started, a step's files are copied in, its health check passes
    agent        the run's own loop with bash and file tools, or a command-line agent (`env.kwargs.agent`)
    verifier     the agent's remaining processes are killed, tests/ is copied to /tests, test.sh runs and writes the reward
    next step    in the same sandbox, if the reward is high enough

Set-up, agent and verifier each have a deadline. If an agent exceeds its deadline, its work is still verified.
`harbor_phases.py` implements the phases around the agent.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, DataError, SchedulerError, did_you_mean
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.protocols import Tool
from polyturn.core.reward import brief
from polyturn.core.task import Task
from polyturn.environments.base import Adapter, env_task
from polyturn.environments.harbor_phases import HarborPhases
from polyturn.environments.harbor_task import HarborTask, read_tasks
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.env import Env
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.scheduler import GivenReward, MultiTurnScheduler
from polyturn.sandbox import EpisodeSandboxes, SandboxSpec, check_spec, read_spec, try_sandbox
from polyturn.serving.openai.scheduler import BlackBox
from polyturn.serving.openai.session import AgentSession
from polyturn.tools.sandbox_tools import make_tools

HARBOR = "harbor"
"""The key of `Task.extra` under which the task's folder is stored."""
_SETTINGS = (
    "agent", "eval", "host_programs", "keep_processes", "reward_key", "sandbox", "skip_unsupported", "tools",
)  # fmt: skip
_AGENT_SETTINGS = ("agent", "host", "ignore", "kwargs", "max_calls", "models", "port", "reach_as", "sampling")
"""Settings of `black_box` that also apply to a command-line agent in a task's sandbox."""


class Harbor(Adapter):
    """Makes tasks from Harbor's task folders."""

    def __init__(self, name: str, id: str, kwargs: Mapping[str, Any], *, base: Path | None = None) -> None:
        super().__init__(name, id, kwargs, base=base)
        for key in self.kwargs:
            if key not in _SETTINGS:
                raise ConfigError(f"env {name!r} has no kwarg {key!r}.{did_you_mean(str(key), _SETTINGS)}")
        self.spec = read_spec(self.kwargs.get("sandbox", {}), where="env.kwargs.sandbox", base=base)
        self.host_programs: bool = self.kwargs.get("host_programs", False)
        self.keep_processes: bool = self.kwargs.get("keep_processes", False)
        self.reward_key: str = self.kwargs.get("reward_key", "reward")
        self.boxes = EpisodeSandboxes()
        self._agent = self._agent_options()
        self._tools = [] if self._agent else make_tools(self.kwargs.get("tools", {}), self.boxes, None)
        evaluation = self.kwargs.get("eval")
        if not isinstance(evaluation, str | Path | None):
            raise ConfigError(f"env {name!r}: env.kwargs.eval is {brief(evaluation)}; name one folder of tasks")
        self._splits = {"train": self._read(id), "eval": self._read(evaluation) if evaluation is not None else []}
        self._by_folder = {str(task.folder): task for tasks in self._splits.values() for task in tasks}

    def make(self) -> Env:
        """Refuse: actions are tool calls, so only the adapter's own scheduler can run it."""
        raise SchedulerError(f"env {self.name!r} acts through tools; run it with its own scheduler")

    def tools(self) -> Sequence[Tool]:
        """Return bash and the file tools; () for a command-line agent, which has its own."""
        return self._tools

    def scheduler(self) -> MultiTurnScheduler:
        """Return the scheduler of the run's own loop, or of the command-line agent that the configuration names."""
        return HarborAgentScheduler(self, self._agent) if self._agent else HarborScheduler(self)

    def tasks(self, *, split: str, seeds: range, prompt: str | None = None) -> Sequence[Task]:
        """Return the first tasks of the split's folder; `prompt` goes before each instruction."""
        return [self._task(task, index, prompt) for index, task in enumerate(self._splits[split][: len(seeds)])]

    def task_of(self, task: Task) -> HarborTask:
        """Return the Harbor task of a task.

        Raises:
            DataError: the task's folder is not part of this run.
        """
        folder = task.extra.get(HARBOR)
        if folder not in self._by_folder:
            raise DataError(f"task {task.id!r} has the Harbor folder {folder!r}, which env {self.name!r} does not contain")
        return self._by_folder[folder]

    def spec_of(self, task: HarborTask) -> SandboxSpec:
        """Return the spec of the sandboxes of a task's episodes."""
        return task.spec(self.spec, host_programs=self.host_programs)

    def phases_of(self, task: Task) -> HarborPhases:
        """Return the phases for a new episode of a task."""
        harbor_task = self.task_of(task)
        return HarborPhases(
            harbor_task,
            self.spec_of(harbor_task),
            self.boxes,
            reward_key=self.reward_key,
            keep_processes=self.keep_processes,
        )

    def _agent_options(self) -> dict[str, Any]:
        """Return the settings of the command-line agent; {} if the run's own loop is the agent.

        Raises:
            ConfigError: a setting is unknown, or conflicts with a command-line agent.
        """
        agent = self.kwargs.get("agent")
        if agent is None:
            return {}
        options = dict(agent) if isinstance(agent, Mapping) else {"agent": agent}
        for key in options:
            if key not in _AGENT_SETTINGS:
                raise ConfigError(
                    f"env {self.name!r}: env.kwargs.agent has the unknown key {key!r}."
                    f"{did_you_mean(str(key), _AGENT_SETTINGS)}"
                )
        if not isinstance(options.get("agent"), str):
            raise ConfigError(
                f"env {self.name!r}: env.kwargs.agent is {agent!r:.100}; name a command-line agent, such as claude_code, or "
                "write {agent: claude_code} with further settings"
            )
        if "tools" in self.kwargs:
            raise ConfigError(
                f"env {self.name!r}: the agent {options['agent']!r} has its own tools, so env.kwargs.tools would have no "
                "effect; remove one of the two"
            )
        return options

    def _task(self, task: HarborTask, index: int, prompt: str | None) -> Task:
        text = task.steps[0].instruction if not prompt else f"{prompt}\n\n{task.steps[0].instruction}"
        env_row = env_task(
            self.name, seed=index, prompt=[Message(role="user", content=text)], extra={HARBOR: str(task.folder)}
        )
        return dataclasses.replace(env_row, id=f"{HARBOR}-{task.name}")

    def _read(self, folder: str | Path) -> list[HarborTask]:
        """Return the tasks of a folder that this run supports.

        Raises:
            ConfigError: a task is unsupported and may not be skipped, or all are unsupported.
        """
        try:
            tasks = read_tasks(self.base / folder)
            refused = {task.name: list(task.refusals(self.spec, host_programs=self.host_programs)) for task in tasks}
            kept = [task for task in tasks if not refused[task.name]]
            if len(kept) < len(tasks) and not (self.kwargs.get("skip_unsupported") and kept):
                name = next(name for name, reasons in refused.items() if reasons)
                raise ConfigError(
                    f"env {self.name!r}: the task {name!r} is not supported: {'; '.join(refused[name])}. "
                    "`polyturn data harbor` lists all such tasks; env.kwargs.skip_unsupported: true leaves them out"
                )
            for task in kept:
                check_spec(self.spec_of(task))
        except DataError as problem:
            raise ConfigError(f"env {self.name!r}: {problem}") from problem
        return kept


@keeps_deadlines
class _InPhases(MultiTurnScheduler):
    """Runs the phases of an episode around its agent; the base of both schedulers."""

    _adapter: Harbor
    _phases: HarborPhases | None = None

    async def on_trajectory_start(self, episode: Episode) -> None:
        """Start the sandbox and set up the first step."""
        self._phases = self._adapter.phases_of(episode.task)
        await self._phases.begin(episode.id)

    async def on_trajectory_end(self, episode: Episode) -> None:
        """Close the sandbox."""
        if self._phases is not None:
            await self._phases.end()

    async def _reward(self, episode: Episode, reason: StopReason) -> StopReason:
        """Verify the current step if necessary, set the episode's reward, and return the stop reason."""
        phases = self._phases
        if phases is not None and not reason.is_failure:
            if not phases.is_verified:
                await phases.verify()
            episode.given_reward = GivenReward(score=phases.score(), info={"steps": phases.rewards})
        return reason


@keeps_deadlines
class HarborScheduler(_InPhases):
    """Runs the default loop in a sandbox and verifies the result."""

    gives_reward = True

    def __init__(self, adapter: Harbor) -> None:
        self._adapter = adapter
        self._is_tried = False

    def check_task(self, task: Task) -> None:
        """Refuse a task whose folder is not part of this run; the first call also checks that a sandbox starts."""
        harbor_task = self._adapter.task_of(task)
        if not self._is_tried:
            try_sandbox(self._adapter.spec_of(harbor_task), where=f"task {task.id!r}")
            self._is_tried = True

    async def run(self, episode: Episode) -> StopReason:
        """Run the default loop, then verify its last step."""
        assert self._phases is not None  # `on_trajectory_start` comes first
        try:
            async with asyncio.timeout(self._phases.step.agent.timeout_sec) as self._deadline:
                reason = await super().run(episode)
        except TimeoutError:
            if not self._deadline.expired():
                raise
            reason = StopReason.TIMEOUT
        return await self._reward(episode, reason)

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        """Answer tool calls. A turn without calls ends the step and is answered with the next step's instruction."""
        phases = self._phases
        assert phases is not None
        if turn.message.tool_calls:
            return await episode.call_tools(turn)
        self._deadline.reschedule(None)
        await phases.verify()
        if not await phases.next_step():
            return None
        if (limit_s := phases.step.agent.timeout_sec) is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time() + limit_s)
        return phases.step.instruction


@keeps_deadlines
class HarborAgentScheduler(_InPhases, BlackBox):
    """Runs a command-line agent in the task's sandbox: once per step, followed by the verifier."""

    def __init__(self, adapter: Harbor, options: Mapping[str, Any]) -> None:
        super().__init__(**options, sandbox=adapter.kwargs.get("sandbox", {}), base=adapter.base)
        self._adapter = adapter
        self.gives_reward = True

    def check_task(self, task: Task) -> None:
        """Refuse a task whose folder is not part of this run; the first call checks that the agent is installed."""
        self.check_agent_installed(self._adapter.spec_of(self._adapter.task_of(task)))

    async def run(self, episode: Episode) -> StopReason:
        """Run the agent, then verify its last step."""
        return await self._reward(episode, await super().run(episode))

    async def run_agent(self, episode: Episode, session: AgentSession) -> None:
        """Run the agent on each step, until it exceeds its time limit, earns too little, or has finished the last step.

        Raises:
            SchedulerError: the agent failed.
            RewardError: a step cannot be verified.
        """
        phases, task = self._phases, episode.task
        assert phases is not None  # `on_trajectory_start` comes first
        box = await phases.box()
        async with self.address_of(session, box) as address:
            while True:
                await self.run_program(box, task, address=address, id=episode.id, timeout_s=phases.step.agent.timeout_sec)
                await phases.verify()
                if self._is_late or not await phases.next_step():
                    return
                task = dataclasses.replace(task, prompt=(Message(role="user", content=phases.step.instruction),))
