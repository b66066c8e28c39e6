"""Adapter: one `env:` line of a configuration, made once per run; each of its environments lives for one episode.

    class Mine(Adapter):                            `env: mine:Count`, with the entry point mine = "my_package.module:Mine"
        def make(self):
            return MyEnv(**self.kwargs)             reset(seed=…) -> observation   step(text) -> …   close()

The adapter checks before any episode that the package is installed and the id exists, and lists the tasks. `make` returns a
`polyturn.rollout.env.Env`; it runs in a thread, with a deadline. Every environment is closed exactly once.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from polyturn.core.errors import (
    PLUGIN_RAISES,
    ConfigError,
    MissingModuleError,
    SchedulerError,
    UnknownNameError,
    did_you_mean,
    one_line,
    raised_at,
)
from polyturn.core.messages import Message
from polyturn.core.protocols import Tool
from polyturn.core.task import Task
from polyturn.data.sequences import TaskSequence
from polyturn.rollout.env import Env
from polyturn.rollout.scheduler import MultiTurnScheduler

ENV = "env"
"""The key under which a task names its environment: `task.extra["env"] = {"name": "textarena:Nim-v0", "seed": 7}`.
A run adds two keys: `split`, and `score`, which says how the rewards become one number."""


class Adapter:
    """Makes the environments that one `env` name stands for."""

    num_seats: int = 1
    """Number of players. If there are several, environments answer with `Seated`."""
    instructions: str = ""
    """The text of a task's prompt before the first observation. It adds what the package's own text leaves out, such as how
    to write an action."""
    reads_reasoning: bool = False
    """Whether an action includes the model's reasoning, for environments that score its form."""
    takes_rows: bool = False
    """Whether an environment is made from a row, so that tasks come from data.train and not from seeds."""
    replays: bool = False
    """Whether the same seed and actions always give the same answers, without side effects. A running episode can then
    continue after a restart: its environment is reset and its actions are repeated. A single environment may also set
    `replays`."""
    score: str = "sum"
    """The default reward of an episode: the `sum` of the rewards, or the `last` one."""

    def __init__(self, name: str, id: str, kwargs: Mapping[str, Any], *, base: Path | None = None) -> None:
        """Check that the package is installed, the id exists and the arguments fit.

        Args:
            name: The whole name, "textarena:Nim-v0", for messages and records.
            id: The part of the name after the colon.
            kwargs: Arguments of the environment, from the config.
            base: The folder that relative file paths are resolved against.

        Raises:
            ConfigError: one of these checks fails.
        """
        self.name = name
        self.id = id
        self.kwargs = dict(kwargs)
        self.base = base or Path()

    def make(self) -> Env:
        """Return a new environment, for one episode. Called in a thread."""
        raise NotImplementedError

    def make_for(self, task: Task) -> Env:
        """Return a new environment for an episode of `task`; override it if environments are made from a row."""
        return self.make()

    def tools(self) -> Sequence[Tool]:
        """Return the tools that this environment adds to the run; () if its actions are plain text."""
        return ()

    def tasks(self, *, split: str, seeds: range, prompt: str | None = None) -> Sequence[Task]:
        """Return the tasks of a split; the default is one per seed.

        The adapter of a package with its own rows returns the first `len(seeds)` rows of the split.

        Args:
            split: "train" or "eval".
            seeds: One seed per task; the seeds of different splits differ.
            prompt: The prompt's text; None uses the adapter's `instructions`.
        """
        return SeedTasks(self.name, seeds, prompt=self.instructions if prompt is None else prompt)

    def of_rows(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """Return the user's rows as tasks of this environment, if it `takes_rows`.

        A row's data_source selects a reward of the run; a row without one is scored by the environment.
        """
        return [
            dataclasses.replace(
                task,
                data_source=task.data_source or f"env/{self.name}",
                extra={**task.extra, ENV: {"name": self.name, "seed": index}},
            )
            for index, task in enumerate(tasks)
        ]

    def scheduler(self) -> MultiTurnScheduler | None:
        """Return the scheduler that drives the episodes, or None for the `env` scheduler."""
        return None

    def close(self) -> None:
        """Release what the episodes share, such as a server. Called once, when the run ends."""


class SeedTasks(TaskSequence):
    """One task per seed, created on access."""

    def __init__(self, name: str, seeds: Sequence[int], *, prompt: str = "") -> None:
        self._name = name
        self._seeds = seeds
        self._prompt = (Message(role="user", content=prompt),)

    def __len__(self) -> int:
        return len(self._seeds)

    def _task(self, index: int) -> Task:
        return env_task(self._name, seed=self._seeds[index], prompt=self._prompt)


def env_task(name: str, *, seed: int, prompt: Sequence[Message], **fields: Any) -> Task:
    """Return a task of the environment `name`, reset with `seed`."""
    extra = {**fields.pop("extra", {}), ENV: {"name": name, "seed": seed}}
    return Task(id=f"{name}-{seed}", prompt=tuple(prompt), data_source=f"env/{name}", extra=extra, **fields)


def at_stage(*, split: str, score: str) -> Callable[[Task], Task]:
    """Return a function that adds a split and a score (`sum` or `last`) to a task."""

    def mark(task: Task) -> Task:
        if ENV not in task.extra:  # a task for the adapter's own scheduler may lack this key
            return task
        row_env = {**task.extra[ENV], "split": split, "score": score}
        return dataclasses.replace(task, extra={**task.extra, ENV: row_env})

    return mark


def require(module: str, *, install: str, needed_by: str) -> ModuleType:
    """Import a package.

    Args:
        module: Its import name.
        install: The argument of pip install, for instance "textarena".
        needed_by: The whole name of the environment.

    Raises:
        MissingModuleError: the package is missing, or its import fails; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] != module.partition(".")[0]:
            raise MissingModuleError(
                f"env {needed_by!r}: the package {module!r} needs {problem.name!r}, which is not installed; "
                f"pip install {install}"
            ) from problem
        raise MissingModuleError(
            f"env {needed_by!r} needs the package {module!r}, which is not installed; pip install {install}"
        ) from problem
    except PLUGIN_RAISES as problem:  # importing a package can raise anything
        raise MissingModuleError(
            f"env {needed_by!r}: importing the package {module!r} fails ({one_line(problem)}); install it again: "
            f"pip install {install}"
        ) from problem


def known_id(id: str, known: Iterable[str], *, name: str) -> str:
    """Return `id` if it is among `known`.

    Raises:
        UnknownNameError: `id` is unknown; the message has the closest known one.
    """
    names = list(known)
    if id not in names:
        raise UnknownNameError(f"env {name!r}: there is no {id!r}.{did_you_mean(id, names)}")
    return id


def check_kwargs(make: Callable[[], Any], *, name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the result of `make`, which creates an object from the config's arguments.

    Raises:
        ConfigError: `make` raised an error.
    """
    try:
        return make()
    except ConfigError:
        raise
    except PLUGIN_RAISES as problem:  # a package may raise anything for arguments that it does not accept
        details = (
            f" with kwargs {dict(kwargs)!r:.200}: {one_line(problem)}; change env.kwargs{raised_at(problem)}"
            if kwargs
            else f": {one_line(problem)}{raised_at(problem)}"
        )
        raise ConfigError(f"env {name!r} cannot be made{details}") from problem


_GLOBAL_RANDOM = threading.Lock()
HELD_S = 60.0
"""Seconds that an environment waits for another one's call to end."""


class OwnRandom:
    """A separate random state for an environment that draws from `random` or `numpy.random`, which all threads share.

    with self._random.held():      one environment at a time runs such a block, with its own state
        self._env.reset(seed=3)    so concurrent episodes draw the same numbers as each would alone
    """

    def __init__(self) -> None:
        self._state: Any = None

    @contextmanager
    def held(self, *, seed: int | None = None) -> Iterator[None]:
        """Draw from this environment's state inside the block; `seed` seeds the module `random`.

        Raises:
            SchedulerError: another environment's call does not end.
        """
        if not _GLOBAL_RANDOM.acquire(timeout=HELD_S):
            raise SchedulerError(
                f"an environment has held the process's random generators for {HELD_S:g} s: its step hangs, and other "
                "environments that draw from them cannot run"
            )
        try:
            outside = random.getstate(), np.random.get_state()
            if self._state is not None:
                random.setstate(self._state[0])
                np.random.set_state(self._state[1])
            if seed is not None:
                random.seed(seed)
            try:
                yield
            finally:
                self._state = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])
        finally:
            _GLOBAL_RANDOM.release()
