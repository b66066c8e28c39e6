"""`env: harbor:./tasks`: Harbor's task folders, acted on with bash and file tools in a sandbox an episode.

    set-up       the sandbox is started, a step's files are copied in, its health check passes
    agent        the default loop, until the model makes no call or `agent.timeout_sec` has passed
    verifier     what the agent left running is killed, tests/ is copied to /tests, test.sh runs and writes the reward
    next step    in the same sandbox and conversation, if the reward is enough

Each of the first three has a deadline of its own. An agent that is late is verified all the same; a verifier that is late,
that leaves no reward or cannot be run gives no reward at all, and the trajectory is dropped: a broken test is no 0.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.env import Env
from polyturn.core.errors import ConfigError, DataError, RewardError, SchedulerError, did_you_mean
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.protocols import Tool
from polyturn.core.task import Task
from polyturn.environments.base import Adapter, env_task
from polyturn.environments.harbor_task import HarborHealthCheck, HarborStep, HarborTask, read_tasks
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.scheduler import GivenReward, MultiTurnScheduler
from polyturn.sandbox import (
    BaseSandbox,
    EpisodeSandboxes,
    SandboxFileError,
    SandboxSetupError,
    SandboxSpec,
    check_spec,
    read_spec,
)
from polyturn.tools.sandbox_tools import make_tools

HARBOR = "harbor"
"""The key under which a task keeps its folder."""
LOGS = "/logs/verifier"
CONTROL_S = 60.0
"""Seconds for what is done in a sandbox between the phases."""
_SETTINGS = ("eval", "host_programs", "keep_processes", "reward_key", "sandbox", "skip_unsupported", "tools")
_PREPARE = f"rm -rf /tests {LOGS} && mkdir -p {LOGS} /logs/agent /logs/artifacts && chmod 777 {LOGS}"
_READ = """for name in reward.json reward.txt; do
  if [ -f $name ]; then echo $name; head -c 65536 $name; exit 0; fi
done
tail -c 300 test-stdout.txt
exit 1"""


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
        self._tools = make_tools(self.kwargs.get("tools", {}), self.boxes, None)
        self._splits = {"train": self._read(id), "eval": self._read(self.kwargs["eval"]) if "eval" in self.kwargs else []}
        self._by_folder = {str(task.folder): task for tasks in self._splits.values() for task in tasks}

    def make(self) -> Env:
        """Refuse: it acts through tools; its scheduler drives it."""
        raise SchedulerError(f"env {self.name!r} acts through tools; run it under the scheduler that it brings")

    def tools(self) -> Sequence[Tool]:
        """Return bash and the file tools."""
        return self._tools

    def scheduler(self) -> MultiTurnScheduler:
        """Return the default loop, between the set-up of a sandbox and the verifier."""
        return HarborScheduler(self)

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
class HarborScheduler(MultiTurnScheduler):
    """The default loop in a sandbox, verified at its end."""

    gives_reward = True

    def __init__(self, adapter: Harbor) -> None:
        self._adapter = adapter
        self._rewards: list[dict[str, float]] = []
        """Of each step that was verified."""
        self._is_joined = False

    def check_task(self, task: Task) -> None:
        """Refuse a task whose folder is not of this run."""
        self._adapter.task_of(task)

    async def on_trajectory_start(self, episode: Episode) -> None:
        """Start the sandbox and set up the first step."""
        self._task, self._index, self._rewards = self._adapter.task_of(episode.task), 0, []
        self._adapter.boxes.join(episode.id, self._adapter.spec_of(self._task))
        self._is_joined = True
        box = await self._adapter.boxes.of(episode.id)
        environment = self._task.folder / "environment"
        if box.spec.build is None and environment.is_dir():
            await _set_up(box, box.upload(environment, box.workdir, leaves_out=("Dockerfile",)))
        await self._begin_step(box, self._task.file.environment.healthcheck)

    async def run(self, episode: Episode) -> StopReason:
        """Run the default loop, then verify the step that it ended in."""
        try:
            async with asyncio.timeout(self._step.agent.timeout_sec) as self._deadline:
                reason = await super().run(episode)
        except TimeoutError:
            if not self._deadline.expired():
                raise
            reason = StopReason.TIMEOUT
        if reason.is_failure:
            return reason
        if len(self._rewards) == self._index:
            await self._verify(episode)
        episode.given_reward = GivenReward(score=self._score(), info={"steps": self._rewards})
        return reason

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        """Answer tool calls; a turn without any ends the step, and the next one's instruction follows."""
        if turn.message.tool_calls:
            return await episode.call_tools(turn)
        if self._index + 1 == len(self._task.steps):
            return None
        self._deadline.reschedule(None)
        rewards, least = await self._verify(episode), self._step.min_reward
        if any(rewards.get(key, 0.0) < value for key, value in least.items()):
            return None
        self._index += 1
        await self._begin_step(await self._adapter.boxes.of(episode.id), None)
        if (limit_s := self._step.agent.timeout_sec) is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time() + limit_s)
        return self._step.instruction

    async def on_trajectory_end(self, episode: Episode) -> None:
        """Close the sandbox."""
        if self._is_joined:
            self._is_joined = False
            await self._adapter.boxes.leave(episode.id)

    @property
    def _step(self) -> HarborStep:
        return self._task.steps[self._index]

    async def _begin_step(self, box: BaseSandbox, check: HarborHealthCheck | None) -> None:
        """Copy a step's files in, run its set-up, and wait until its health check passes."""
        step = self._step
        if step.workdir is not None:
            await _set_up(box, box.upload(step.workdir, box.workdir))
            if (step.workdir / "setup.sh").is_file():
                result = await box.exec("sh setup.sh", user="root", timeout_s=box.spec.start_timeout_s)
                if result.exit_code != 0:
                    raise SandboxSetupError(f"task {self._task.name!r}: setup.sh failed: {result.stderr[-300:]}")
        for one in (check, step.healthcheck):
            if one is not None:
                await _await_health(box, one, task=self._task.name)

    async def _verify(self, episode: Episode) -> dict[str, float]:
        """Return the rewards of the current step.

        Raises:
            RewardError: there are none.
        """
        box, step = await self._adapter.boxes.of(episode.id), self._step
        rewards = await verify(box, self._task, step, keep_processes=self._adapter.keep_processes)
        self._rewards.append(rewards)
        return rewards

    def _score(self) -> float:
        """Return the reward of the episode: of the last step that was verified, or the mean of all such."""
        key, of = self._adapter.reward_key, self._rewards
        if not any(key in rewards for rewards in of):
            names = sorted({name for rewards in of for name in rewards})
            raise RewardError(f"task {self._task.name!r}: the verifier gave {names} and no {key!r} (env.kwargs.reward_key)")
        if self._task.file.multi_step_reward_strategy == "final":
            of = of[-1:]
        return math.fsum(rewards.get(key, 0.0) for rewards in of) / len(of)


async def verify(box: BaseSandbox, task: HarborTask, step: HarborStep, *, keep_processes: bool = False) -> dict[str, float]:
    """Run a step's verifier in the sandbox that the agent worked in, and return the rewards by name.

    Args:
        box: The sandbox.
        task: The task.
        step: The step.
        keep_processes: Whether what the agent started goes on meanwhile, for tests that talk to it.

    Raises:
        RewardError: the verifier is late, cannot be run, or leaves no reward that can be read.
        SandboxError: the sandbox failed.
    """
    verifier, where = step.verifier, f"task {task.name!r}: the verifier"
    user = None if verifier.user is None else str(verifier.user)
    user = user or (None if box.spec.user is None else "root")
    if not keep_processes:
        await box.kill_all()
    try:
        prepared = await box.exec(_PREPARE, cwd="/", user="root", timeout_s=CONTROL_S)
        if prepared.exit_code != 0:
            raise RewardError(f"{where} cannot be prepared: {prepared.stderr[-300:]}")
        for one in verifier.collect:
            await box.exec(one.command, user=None if one.user is None else str(one.user), timeout_s=one.timeout_sec)
        await box.upload(step.tests, "/tests")
        if not os.access(step.tests / "test.sh", os.X_OK):
            await box.exec("chmod +x /tests/test.sh", cwd="/", user="root", timeout_s=CONTROL_S)
        command = f"/tests/test.sh > {LOGS}/test-stdout.txt 2>&1"
        result = await box.exec(command, user=user, env=task.variables(verifier.env), timeout_s=verifier.timeout_sec)
        if result.is_timeout:
            raise RewardError(f"{where} took longer than {verifier.timeout_sec:g} s (verifier.timeout_sec)")
        return await _rewards(box, where=where, exit_code=result.exit_code)
    except SandboxFileError as problem:
        raise RewardError(f"{where} cannot be run: {problem}") from problem


async def _rewards(box: BaseSandbox, *, where: str, exit_code: int) -> dict[str, float]:
    """The rewards that the verifier wrote; its own exit code says nothing."""
    result = await box.exec(_READ, cwd=LOGS, user="root", timeout_s=CONTROL_S)
    if result.exit_code != 0:
        tail = result.stdout[-300:]
        raise RewardError(f"{where} wrote neither reward.json nor reward.txt (exit code {exit_code}): {tail!r}")
    name, _, text = result.stdout.partition("\n")
    if not text.strip():
        raise RewardError(f"{where} left {name} empty")
    try:
        rewards = json.loads(text) if name == "reward.json" else {"reward": float(text)}
    except ValueError:
        rewards = None
    if not isinstance(rewards, dict) or not rewards or not all(_is_reward(value) for value in rewards.values()):
        form = "an object of finite numbers" if name == "reward.json" else "a finite number"
        raise RewardError(f"{where} wrote {text!r:.200} to {name}; it must be {form}")
    return {key: float(value) for key, value in rewards.items()}


def _is_reward(value: Any) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)


async def _set_up(box: BaseSandbox, copying: Any) -> None:
    """Wait for files that are copied in, within the deadline of the sandbox's start.

    Raises:
        SandboxSetupError: they cannot be written.
    """
    try:
        async with asyncio.timeout(box.spec.start_timeout_s):
            await copying
    except (SandboxFileError, TimeoutError) as problem:
        why = str(problem) or "it takes too long"
        raise SandboxSetupError(f"the task's files cannot be copied into the sandbox: {why}") from problem


async def _await_health(box: BaseSandbox, check: HarborHealthCheck, *, task: str) -> None:
    """Wait until a health check passes; failures of the start period do not count.

    Raises:
        SandboxSetupError: it failed too often.
    """
    now = asyncio.get_running_loop().time
    begin, failures = now(), 0
    while (result := await box.exec(check.command, timeout_s=check.timeout_sec)).exit_code != 0:
        is_starting = now() - begin < check.start_period_sec
        failures += not is_starting
        if failures >= check.retries:
            raise SandboxSetupError(
                f"task {task!r}: the health check failed {failures} times: {(result.stderr or result.stdout)[-300:]}"
            )
        await asyncio.sleep(check.start_interval_sec if is_starting else check.interval_sec)
