"""The phases of a Harbor task around the agent: set-up, verification of each step, and the reward.

    phases = HarborPhases(task, boxes, …)
    await phases.begin(episode_id)       the sandbox is started, files are copied in, the health check passes
    …the agent acts…
    await phases.verify()                the agent's processes are killed, tests/ is copied to /tests, test.sh runs
    await phases.next_step()             sets up the next step if the reward is high enough; returns whether there is one
    phases.score()                       the reward of the episode

The agent between the phases is the run's own loop or a command-line agent. If a verifier times out, cannot run or writes no
reward, the trajectory is dropped: a broken test does not score 0.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Coroutine
from typing import Any

from polyturn.core.errors import RewardError
from polyturn.environments.harbor_task import HarborHealthCheck, HarborStep, HarborTask
from polyturn.sandbox import BaseSandbox, EpisodeSandboxes, SandboxFileError, SandboxSetupError, SandboxSpec

LOGS = "/logs/verifier"
CONTROL_S = 60.0
"""Seconds for each command between the phases."""
_PREPARE = f"rm -rf /tests {LOGS} && mkdir -p {LOGS} /logs/agent /logs/artifacts && chmod 777 {LOGS}"
_READ = """for name in reward.json reward.txt; do
  if [ -f $name ]; then echo $name; head -c 65536 $name; exit 0; fi
done
tail -c 300 test-stdout.txt
exit 1"""


class HarborPhases:
    """The phases of one episode of a task."""

    def __init__(
        self, task: HarborTask, spec: SandboxSpec, boxes: EpisodeSandboxes, *, reward_key: str, keep_processes: bool
    ) -> None:
        """Create the phases of one episode; `begin` starts them.

        Args:
            task: The task.
            spec: The spec of its sandbox.
            boxes: The sandboxes of live episodes, shared with the tools.
            reward_key: The key of the reward in the verifier's output.
            keep_processes: Whether the agent's processes keep running during verification.
        """
        self.task = task
        self.rewards: list[dict[str, float]] = []
        """Rewards by name, one mapping per verified step."""
        self._spec, self._boxes = spec, boxes
        self._reward_key, self._keep_processes = reward_key, keep_processes
        self._index = 0
        self._episode_id: str | None = None

    @property
    def step(self) -> HarborStep:
        """The current step."""
        return self.task.steps[self._index]

    @property
    def is_verified(self) -> bool:
        """Whether the current step is verified."""
        return len(self.rewards) > self._index

    async def box(self) -> BaseSandbox:
        """Return the episode's sandbox."""
        assert self._episode_id is not None
        return await self._boxes.of(self._episode_id)

    async def begin(self, episode_id: str) -> None:
        """Start the sandbox and set up the first step.

        Raises:
            SandboxError: the sandbox did not start, or the task cannot be set up in it.
        """
        self._boxes.join(episode_id, self._spec)
        self._episode_id = episode_id
        box, environment = await self.box(), self.task.folder / "environment"
        if box.spec.build is None and environment.is_dir():
            await _set_up(box, box.upload(environment, box.workdir, leaves_out=("Dockerfile",)))
        await self._begin_step(box, self.task.file.environment.healthcheck)

    async def verify(self) -> None:
        """Run the current step's verifier and store its rewards.

        Raises:
            RewardError: the verifier wrote no reward.
        """
        box = await self.box()
        self.rewards.append(await verify(box, self.task, self.step, keep_processes=self._keep_processes))

    async def next_step(self) -> bool:
        """Set up the next step if the verified one earned enough; return whether there is one."""
        least, rewards = self.step.min_reward, self.rewards[-1]
        if self._index + 1 == len(self.task.steps) or any(rewards.get(key, 0.0) < value for key, value in least.items()):
            return False
        self._index += 1
        await self._begin_step(await self.box(), None)
        return True

    def score(self) -> float:
        """Return the reward of the episode: the last verified step's, or the mean of all verified steps.

        Raises:
            RewardError: the verifier's output lacks the key.
        """
        key, verified = self._reward_key, self.rewards
        if not any(key in rewards for rewards in verified):
            names = sorted({name for rewards in verified for name in rewards})
            raise RewardError(f"task {self.task.name!r}: the verifier wrote {names} but not {key!r} (env.kwargs.reward_key)")
        if self.task.file.multi_step_reward_strategy == "final":
            verified = verified[-1:]
        return math.fsum(rewards.get(key, 0.0) for rewards in verified) / len(verified)

    async def end(self) -> None:
        """Close the sandbox."""
        if self._episode_id is not None:
            episode_id, self._episode_id = self._episode_id, None
            await self._boxes.leave(episode_id)

    async def _begin_step(self, box: BaseSandbox, check: HarborHealthCheck | None) -> None:
        """Copy a step's files into the sandbox, run its set-up, and wait until its health check passes."""
        step = self.step
        if step.workdir is not None:
            await _set_up(box, box.upload(step.workdir, box.workdir))
            if (step.workdir / "setup.sh").is_file():
                result = await box.exec("sh setup.sh", user="root", timeout_s=box.spec.start_timeout_s)
                if result.exit_code != 0:
                    raise SandboxSetupError(f"task {self.task.name!r}: setup.sh failed: {result.stderr[-300:]}")
        for one in (check, step.healthcheck):
            if one is not None:
                await _await_health(box, one, task=self.task.name)


async def verify(box: BaseSandbox, task: HarborTask, step: HarborStep, *, keep_processes: bool = False) -> dict[str, float]:
    """Run a step's verifier in the agent's sandbox and return the rewards by name.

    Args:
        box: The sandbox.
        task: The task.
        step: The step.
        keep_processes: Whether the agent's processes keep running, for tests that need them.

    Raises:
        RewardError: the verifier times out, cannot run, or writes no valid reward.
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
    """Return the rewards that the verifier wrote; its exit code does not matter."""
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


async def _set_up(box: BaseSandbox, copying: Coroutine[Any, Any, None]) -> None:
    """Copy files into the sandbox, within the deadline of the sandbox's start.

    Raises:
        SandboxSetupError: the files cannot be written in time.
    """
    try:
        async with asyncio.timeout(box.spec.start_timeout_s):
            await copying
    except (SandboxFileError, TimeoutError) as problem:
        why = str(problem) or "it takes too long"
        raise SandboxSetupError(f"the task's files cannot be copied into the sandbox: {why}") from problem


async def _await_health(box: BaseSandbox, check: HarborHealthCheck, *, task: str) -> None:
    """Wait until a health check passes; failures during the start period do not count.

    Raises:
        SandboxSetupError: the check failed `retries` times.
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
