"""`env: verifiers:my_env`: an environment of verifiers, whose own rollouts ask our endpoint.

    verifiers before 0.4   my_env.load_environment(**env.kwargs); its dataset, its loop and its rubric
    verifiers from 0.4 on  the taskset that my_env exports, with env.kwargs; its tasks, its agent's harness and its rewards

It is loaded once a run, in a process of its own. Its tasks are used where the config names none; each episode asks the
endpoint, which keeps the tokens. So the loop, the tools and the reward are the environment's, and the sampled tokens are the
ones that are trained. The process runs in the interpreter `env.kwargs.python`, which needs verifiers and the environment's
module; `path` is a folder to find it in.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.env import Env
from polyturn.core.errors import ConfigError, DataError, SchedulerError
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.environments.base import ENV, Adapter, env_task
from polyturn.environments.json_subprocess import JsonSubprocess, WorkerRefusal
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.serving.openai.scheduler import BlackBox

INSTALL = "verifiers"
LEGACY = "'verifiers<0.4'"
START_S = 300.0
"""Seconds that the environment may take to load, its dataset included."""
ROLLOUT_S = 1800.0
"""Seconds that a rollout may take in all, where `env.kwargs.timeout_s` does not say."""
INPUT = "verifiers_input"
"""The key under which a task keeps the row of the environment's dataset."""


class Verifiers(Adapter):
    """An environment of verifiers, in a process of its own."""

    takes_rows = True

    def __init__(self, name: str, id: str, kwargs: Mapping[str, Any], *, base: Path | None = None) -> None:
        super().__init__(name, id, kwargs, base=base)
        python = os.path.expanduser(str(self.kwargs.pop("python", sys.executable)))
        self._timeout_s = self.kwargs.pop("timeout_s", ROLLOUT_S)
        if not isinstance(self._timeout_s, int | float) or self._timeout_s <= 0:
            raise ConfigError(f"env {name!r}: timeout_s is {self._timeout_s!r}; give seconds")
        path = str((self.base / self.kwargs.pop("path", ".")).resolve())
        names = self.kwargs.pop("variables", [])
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise ConfigError(f"env {name!r}: variables is {names!r}; list the names of variables of this environment")
        if missing := [n for n in names if n not in os.environ]:
            raise ConfigError(f"env {name!r}: the variable {missing[0]!r} is to be passed on and is not set; set it")
        if shutil.which(python) is None:
            raise ConfigError(f"env {name!r}: there is no interpreter {python!r}; see env.kwargs.python")
        arguments = self.kwargs
        self._worker = JsonSubprocess(
            (python, str(Path(__file__).with_name("verifiers_worker.py"))),
            name=f"the environment {name!r}",
            variables={**{n: os.environ[n] for n in names}, "VF_LOG_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"},
            greet=lambda ask: ask("load", env=id, arguments=arguments, path=path, timeout_s=START_S),
        )
        try:
            self._worker.start()
        except WorkerRefusal as problem:
            self._worker.close()
            raise ConfigError(f"env {name!r} cannot be loaded: {_advice(problem, python, path)}") from problem
        except SchedulerError as problem:
            self._worker.close()
            raise ConfigError(f"env {name!r} cannot be loaded: {problem}") from problem

    @property
    def pid(self) -> int | None:
        """The id of its process; None while there is none."""
        return self._worker.pid

    def make(self) -> Env:
        """Refuse: it runs its own loop; its scheduler drives it."""
        raise SchedulerError(f"env {self.name!r} runs its own loop; run it under the scheduler that it brings")

    def tasks(self, *, split: str, seeds: range, prompt: str | None = None) -> Sequence[Task]:
        """Return the first rows of its dataset, or of the one that it keeps for evaluation."""
        try:
            rows = self._worker.ask("rows", split=split, num=len(seeds), timeout_s=START_S)
        except WorkerRefusal as problem:
            raise DataError(f"env {self.name!r} has no {split} dataset: {_advice(problem, '', '')}") from problem
        return [self._task(row, split, index) for index, row in enumerate(rows)]

    def scheduler(self) -> MultiTurnScheduler:
        """Return the scheduler that lets the environment run its own loop."""
        return BlackBox(agent=self.rollout)

    async def rollout(self, base_url: str, api_key: str, task: Task, model: str) -> dict[str, Any]:
        """Let the environment run and score one rollout, on the model behind `base_url`.

        Raises:
            SchedulerError: it failed, and not by what the model wrote.
        """
        row = task.extra.get(INPUT) or _row(task)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._worker.call("rollout", input=row, base_url=base_url, api_key=api_key, model=model)
        except TimeoutError as problem:
            raise SchedulerError(
                f"the environment {self.name!r} took longer than {self._timeout_s:g} s for a rollout (env.kwargs.timeout_s)"
            ) from problem
        if answer["error"] is not None:
            raise SchedulerError(f"the environment {self.name!r} failed in a rollout: {answer['error']}")
        return {**answer["metrics"], "reward": answer["reward"], "stop_condition": answer["stop_condition"]}

    def close(self) -> None:
        """End its process."""
        self._worker.close()

    def _task(self, row: Mapping[str, Any], split: str, index: int) -> Task:
        prompt = row.get("prompt")
        prompt_messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
        messages = [Message.from_openai({k: v for k, v in m.items() if v is not None}) for m in prompt_messages]
        extra = {INPUT: dict(row), "split": split}
        return env_task(self.name, seed=index, prompt=messages, ground_truth=row.get("answer"), extra=extra)


def _row(task: Task) -> dict[str, Any]:
    """Return a row of the config's own data as the environment's rows are."""
    own = {k: v for k, v in task.extra.items() if k != ENV}
    prompt = [message.to_openai() for message in task.prompt]
    return {"example_id": 0, "answer": "" if task.ground_truth is None else str(task.ground_truth), **own, "prompt": prompt}


def _advice(problem: WorkerRefusal, python: str, path: str) -> str:
    reason = str(problem)
    if problem.is_download:
        return f"{reason}; it downloads something, so run it once where there is a network, or give it data of your own"
    if "'verifiers' is not installed" in reason:
        return f"{reason}; pip install {INSTALL} there, or name an interpreter that has it in env.kwargs.python"
    if "tried to import" in reason:
        where = f"It is looked for in {path} (env.kwargs.path) and in {python} (env.kwargs.python)"
        return f"{reason} {where}; a module with load_environment needs {LEGACY} there"
    if "Could not import" in reason:
        return f"{reason} It is looked for in {path} (env.kwargs.path) and in {python} (env.kwargs.python)"
    return reason
