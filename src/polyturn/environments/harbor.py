"""`env: harbor:./tasks`: Harbor's task folders, each episode in a sandbox of its own.

    set-up       the sandbox is started, a step's files are copied in, its health check passes
    agent        the run's own loop with bash and file tools, or a command-line agent (`env.kwargs.agent`)
    verifier     what the agent left running is killed, tests/ is copied to /tests, test.sh runs and writes the reward
    next step    in the same sandbox, if the reward is enough

Each of the first three has a deadline of its own. A late agent is verified all the same. `harbor_phases.py` has what
surrounds the agent.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.env import Env
from polyturn.core.errors import ConfigError, DataError, SchedulerError, did_you_mean
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.protocols import Tool
from polyturn.core.task import Task
from polyturn.environments.base import Adapter, env_task
from polyturn.environments.harbor_phases import HarborPhases
from polyturn.environments.harbor_task import HarborTask, read_tasks
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.scheduler import GivenReward, MultiTurnScheduler
from polyturn.sandbox import EpisodeSandboxes, SandboxSpec, check_spec, read_spec, try_sandbox
from polyturn.serving.openai.scheduler import BlackBox
from polyturn.serving.openai.session import AgentSession
from polyturn.tools.sandbox_tools import make_tools

HARBOR = "harbor"
"""The key under which a task keeps its folder."""
_SETTINGS = (
    "agent", "eval", "host_programs", "keep_processes", "reward_key", "sandbox", "skip_unsupported", "tools",
)  # fmt: skip
_AGENT_SETTINGS = ("agent", "host", "ignore", "kwargs", "max_calls", "models", "port", "reach_as", "sampling")
"""Settings of `black_box` that hold for a command-line agent in a task's sandbox, too."""


class Harbor(Adapter):
    """Folders of Harbor's tasks."""

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
        self._splits = {"train": self._read(id), "eval": self._read(self.kwargs["eval"]) if "eval" in self.kwargs else []}
        self._by_folder = {str(task.folder): task for tasks in self._splits.values() for task in tasks}

    def make(self) -> Env:
        """Refuse: it acts through tools; its scheduler drives it."""
        raise SchedulerError(f"env {self.name!r} acts through tools; run it under the scheduler that it brings")

    def tools(self) -> Sequence[Tool]:
        """Return bash and the file tools; none for a command-line agent, which has its own."""
        return self._tools

    def scheduler(self) -> MultiTurnScheduler:
        """Return the scheduler of the run's own loop, or of the command-line agent that the configuration names."""
        return HarborAgentScheduler(self, self._agent) if self._agent else HarborScheduler(self)

    def tasks(self, *, split: str, seeds: range, prompt: str | None = None) -> Sequence[Task]:
        """Return the first tasks of the split's folder; `prompt` stands before each instruction."""
        return [self._task(task, index, prompt) for index, task in enumerate(self._splits[split][: len(seeds)])]

    def task_of(self, task: Task) -> HarborTask:
        """Return the folder of a task, read.

        Raises:
            DataError: it is none of this run's.
        """
        folder = task.extra.get(HARBOR)
        if folder not in self._by_folder:
            raise DataError(f"task {task.id!r} has the Harbor folder {folder!r}, which env {self.name!r} does not hold")
        return self._by_folder[folder]

    def spec_of(self, task: HarborTask) -> SandboxSpec:
        """Return the sandbox of a task's episodes."""
        return task.spec(self.spec, host_programs=self.host_programs)

    def phases_of(self, task: Task) -> HarborPhases:
        """Return the phases of a new episode of a task."""
        harbor_task = self.task_of(task)
        return HarborPhases(
            harbor_task,
            self.spec_of(harbor_task),
            self.boxes,
            reward_key=self.reward_key,
            keep_processes=self.keep_processes,
        )

    def _agent_options(self) -> dict[str, Any]:
        """Return the settings of the command-line agent; {} where the run's own loop is the agent.

        Raises:
            ConfigError: a setting is unknown, or does not go with an agent.
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
                "write {agent: claude_code} with further settings of it"
            )
        if "tools" in self.kwargs:
            raise ConfigError(
                f"env {self.name!r}: the agent {options['agent']!r} brings its own tools, so env.kwargs.tools would have no "
                "effect; drop one of the two"
            )
        return options

    def _task(self, task: HarborTask, index: int, prompt: str | None) -> Task:
        text = task.steps[0].instruction if not prompt else f"{prompt}\n\n{task.steps[0].instruction}"
        env_row = env_task(
            self.name, seed=index, prompt=[Message(role="user", content=text)], extra={HARBOR: str(task.folder)}
        )
        return dataclasses.replace(env_row, id=f"{HARBOR}-{task.name}")

    def _read(self, folder: str) -> list[HarborTask]:
        """Return the tasks of a folder that this run can do.

        Raises:
            ConfigError: one cannot be done, or none can.
        """
        try:
            tasks = read_tasks(self.base / folder)
            refused = {task.name: list(task.refusals(self.spec, host_programs=self.host_programs)) for task in tasks}
            kept = [task for task in tasks if not refused[task.name]]
            if len(kept) < len(tasks) and not (self.kwargs.get("skip_unsupported") and kept):
                name = next(name for name, reasons in refused.items() if reasons)
                raise ConfigError(
                    f"env {self.name!r}: the task {name!r} cannot be done: {'; '.join(refused[name])}. "
                    "`polyturn data harbor` lists all; env.kwargs.skip_unsupported: true leaves them out"
                )
            for task in kept:
                check_spec(self.spec_of(task))
        except DataError as problem:
            raise ConfigError(f"env {self.name!r}: {problem}") from problem
        return kept


@keeps_deadlines
class _InPhases(MultiTurnScheduler):
    """The common part of the two schedulers: the phases of an episode around its agent."""

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
        """Verify the current step unless it is, give the episode its reward, and return why it ended."""
        phases = self._phases
        if phases is not None and not reason.is_failure:
            if not phases.is_verified:
                await phases.verify()
            episode.given_reward = GivenReward(score=phases.score(), info={"steps": phases.rewards})
        return reason


@keeps_deadlines
class HarborScheduler(_InPhases):
    """The run's own loop in a sandbox, verified at its end."""

    gives_reward = True

    def __init__(self, adapter: Harbor) -> None:
        self._adapter = adapter
        self._is_tried = False

    def check_task(self, task: Task) -> None:
        """Refuse a task whose folder is not of this run, and, once, a sandbox that does not start."""
        harbor_task = self._adapter.task_of(task)
        if not self._is_tried:
            try_sandbox(self._adapter.spec_of(harbor_task), where=f"task {task.id!r}")
            self._is_tried = True

    async def run(self, episode: Episode) -> StopReason:
        """Run the default loop, then verify the step that it ended in."""
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
        """Answer tool calls; a turn without any ends the step, and the next one's instruction follows."""
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
    """A command-line agent in the task's sandbox, started for each step, which is then verified."""

    def __init__(self, adapter: Harbor, options: Mapping[str, Any]) -> None:
        super().__init__(**options, sandbox=adapter.kwargs.get("sandbox", {}), base=adapter.base)
        self._adapter = adapter
        self.gives_reward = True

    def check_task(self, task: Task) -> None:
        """Refuse a task whose folder is not of this run, and look for the agent in the sandbox of the first task."""
        self.look_for_agent(self._adapter.spec_of(self._adapter.task_of(task)))

    async def run(self, episode: Episode) -> StopReason:
        """Let the agent act, and verify the step that it ended in."""
        return await self._reward(episode, await super().run(episode))

    async def let_ask(self, episode: Episode, session: AgentSession) -> None:
        """Run the agent on each step, until it is late, earns too little, or has done the last.

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
