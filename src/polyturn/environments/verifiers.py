"""`env: verifiers:my_env`: an environment of verifiers, whose own rollouts call polyturn's endpoint.

    verifiers before 0.4   my_env.load_environment(**env.kwargs): a dataset, a loop and a rubric
    verifiers since 0.4    the taskset that my_env exports, with env.kwargs: tasks, an agent's harness and rewards

The environment is loaded once per run, in a separate process. Its tasks are used if the config names no data. The loop, the
tools and the reward are the environment's; the endpoint keeps the sampled tokens for training. The process runs in the
interpreter `env.kwargs.python`, which needs verifiers and the environment's module; `path` is a folder with that module.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, DataError, SchedulerError
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.environments.base import ENV, Adapter, env_task
from polyturn.environments.json_subprocess import JsonSubprocess, WorkerRefusal
from polyturn.rollout.env import Env
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.serving.openai.scheduler import BlackBox

logger = logging.getLogger(__name__)

INSTALL = "verifiers"
LEGACY = "'verifiers<0.4'"
START_S = 300.0
"""Seconds within which the environment and its dataset must load."""
ROLLOUT_S = 1800.0
"""Default of `env.kwargs.timeout_s`: seconds that a whole rollout may take."""
INPUT = "verifiers_input"
"""The key of `Task.extra` under which the row of the environment's dataset is stored."""


class Verifiers(Adapter):
    """Runs an environment of verifiers in a separate process."""

    takes_rows = True

    def __init__(self, name: str, id: str, kwargs: Mapping[str, Any], *, base: Path | None = None) -> None:
        super().__init__(name, id, kwargs, base=base)
        python = os.path.expanduser(str(self.kwargs.pop("python", sys.executable)))
        self._timeout_s = self.kwargs.pop("timeout_s", ROLLOUT_S)
        if not isinstance(self._timeout_s, int | float) or self._timeout_s <= 0:
            raise ConfigError(f"env {name!r}: timeout_s is {self._timeout_s!r}; use a positive number of seconds")
        path = str((self.base / self.kwargs.pop("path", ".")).resolve())
        names = self.kwargs.pop("variables", [])
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise ConfigError(f"env {name!r}: variables is {names!r}; use a list of names of environment variables")
        if missing := [n for n in names if n not in os.environ]:
            raise ConfigError(
                f"env {name!r}: the environment variable {missing[0]!r} of env.kwargs.variables is not set; set it"
            )
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
        """The id of the process; None if it is not running."""
        return self._worker.pid

    def make(self) -> Env:
        """Refuse: the environment runs its own loop, so only the adapter's own scheduler can run it."""
        raise SchedulerError(f"env {self.name!r} runs its own loop; run it with its own scheduler")

    def tasks(self, *, split: str, seeds: range, prompt: str | None = None) -> Sequence[Task]:
        """Return the first rows of the environment's dataset for the split.

        A taskset has one list for both splits: training takes the first tasks, and evaluation the tasks from the first seed
        on.
        """
        try:
            answer = self._worker.ask("rows", split=split, first=seeds.start, num=len(seeds), timeout_s=START_S)
        except WorkerRefusal as problem:
            raise DataError(f"env {self.name!r} has no {split} dataset: {_advice(problem, '', '')}") from problem
        if answer["is_trained"]:
            logger.warning(
                "env %r has no task from number %d on, so evaluation uses tasks of training; lower env.tasks to leave some "
                "for evaluation, or set env.eval_tasks: 0",
                self.name,
                seeds.start,
            )
        return [self._task(row, split, index) for index, row in enumerate(answer["rows"], answer["first"])]

    def scheduler(self) -> MultiTurnScheduler:
        """Return the scheduler that runs the environment's own loop."""
        return BlackBox(agent=self.rollout)

    async def rollout(self, base_url: str, api_key: str, task: Task, model: str) -> dict[str, Any]:
        """Let the environment run and score one rollout with the model at `base_url`.

        Raises:
            SchedulerError: the rollout failed for a reason other than the model's text.
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
        """End the environment's process."""
        self._worker.close()

    def _task(self, row: Mapping[str, Any], split: str, index: int) -> Task:
        prompt = row.get("prompt")
        prompt_messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
        messages = [Message.from_openai({k: v for k, v in m.items() if v is not None}) for m in prompt_messages]
        extra = {INPUT: dict(row), "split": split}
        return env_task(self.name, seed=index, prompt=messages, ground_truth=row.get("answer"), extra=extra)


def _row(task: Task) -> dict[str, Any]:
    """Return a task of the config's data as a row in the environment's form."""
    own = {k: v for k, v in task.extra.items() if k != ENV}
    prompt = [message.to_openai() for message in task.prompt]
    return {"example_id": 0, "answer": "" if task.ground_truth is None else str(task.ground_truth), **own, "prompt": prompt}


def _advice(problem: WorkerRefusal, python: str, path: str) -> str:
    reason = str(problem)
    if problem.is_download:
        return f"{reason}; it downloads something, so run it once with network access, or use your own data"
    if "'verifiers' is not installed" in reason:
        return f"{reason}; pip install {INSTALL} there, or set env.kwargs.python to an interpreter that has it"
    if "tried to import" in reason:
        where = f"The module was looked for in {path} (env.kwargs.path) and in {python} (env.kwargs.python)"
        return f"{reason} {where}; a module with load_environment needs {LEGACY} there"
    if "Could not import" in reason:
        return f"{reason} The module was looked for in {path} (env.kwargs.path) and in {python} (env.kwargs.python)"
    return reason
