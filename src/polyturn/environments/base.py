"""Adapter: one `env:` line of a configuration, made once for a run; its environments live for an episode each.

    class Mine(Adapter):                                   mine:Count        mine = "my_package.module:Mine" (an entry point)
        def make(self):
            return MyEnv(**self.kwargs)                    reset(seed=…) -> what is shown   step(text) -> …   close()

Separate from the environments because some questions come before any episode: is the package there, is the id known, which
tasks are there. What `make` returns is a `polyturn.core.env.Env`; it is called in a thread, with a deadline, and every
environment that it made is closed once.
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

from polyturn.core.env import Env
from polyturn.core.errors import ConfigError, MissingModuleError, SchedulerError, UnknownNameError, did_you_mean, one_line
from polyturn.core.interrupts import PLUGIN_RAISES, pass_interrupt
from polyturn.core.messages import Message
from polyturn.core.protocols import Tool
from polyturn.core.task import Task
from polyturn.data.sequences import TaskSequence
from polyturn.rollout.scheduler import MultiTurnScheduler

ENV = "env"
"""The key under which a task names its environment: `task.extra["env"] = {"name": "textarena:Nim-v0", "seed": 7}`.
A run adds its `split` and how the rewards become one, its `score`."""


class Adapter:
    """Makes the environments that one name stands for."""

    num_seats: int = 1
    """Number of players. With more than one, environments answer with `Seated`."""
    instructions: str = ""
    """The text of a task's prompt before the first observation; what a package's own text leaves open, such as how to
    write an action."""
    reads_reasoning: bool = False
    """Whether an action is all that the model wrote, for environments that score its form; else it has no reasoning."""
    takes_rows: bool = False
    """Whether an environment is made of a row, so that tasks come from data.train and not from seeds."""
    replays: bool = False
    """Whether the same seed and the same actions always draw the same answers, and cost nothing but time: a conversation in
    flight then goes on after a restart, its environment reset and acted in again. An environment may say it as well."""
    score: str = "sum"
    """The reward of an episode where the config does not say: the `sum` of the rewards, or the `last` one."""

    def __init__(self, name: str, id: str, kwargs: Mapping[str, Any], *, base: Path | None = None) -> None:
        """Check that it can work: the package is there, the id is known, the arguments fit.

        Args:
            name: The whole name, "textarena:Nim-v0", for messages and records.
            id: What stands behind the colon.
            kwargs: Arguments of the environment, from the config.
            base: The folder that relative file paths start from.

        Raises:
            ConfigError: it cannot.
        """
        self.name = name
        self.id = id
        self.kwargs = dict(kwargs)
        self.base = base or Path()

    def make(self) -> Env:
        """Return a new environment, for one episode. Called in a thread."""
        raise NotImplementedError

    def make_for(self, task: Task) -> Env:
        """Return a new environment for an episode of `task`: for packages whose environments are made of a row."""
        return self.make()

    def tools(self) -> Sequence[Tool]:
        """Return tools that the run has because of this environment; () where it is acted on with text alone."""
        return ()

    def tasks(self, *, split: str, seeds: range, prompt: str | None = None) -> Sequence[Task]:
        """Return the tasks of a split ("train" or "eval"); the default is one for each seed.

        A package with rows of its own returns those of its split, at most `len(seeds)`, in whatever way it knows.

        Args:
            split: Which.
            seeds: As many as tasks are wanted; those of other splits differ.
            prompt: The prompt's text; None for the adapter's `instructions`.
        """
        return SeedTasks(self.name, seeds, prompt=self.instructions if prompt is None else prompt)

    def of_rows(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """Return rows of the user's own as tasks of this environment, where it `takes_rows`.

        A row keeps a data_source that it has, which leads to a reward of the run's own; without one the environment scores.
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
        """Return the scheduler that drives the episodes, for an agent that owns its loop; None for the `env` scheduler."""
        return None

    def close(self) -> None:
        """Let go of what the run shares, such as a server. Called once, when the run ends."""


class SeedTasks(TaskSequence):
    """A task for each seed, made when asked for."""

    def __init__(self, name: str, seeds: Sequence[int], *, prompt: str = "") -> None:
        self._name = name
        self._seeds = seeds
        self._prompt = (Message(role="user", content=prompt),)

    def __len__(self) -> int:
        return len(self._seeds)

    def _task(self, index: int) -> Task:
        return env_task(self._name, seed=self._seeds[index], prompt=self._prompt)


def env_task(name: str, *, seed: int, prompt: Sequence[Message], **fields: Any) -> Task:
    """Return a task that is acted out in the environment `name`, reset with `seed`."""
    extra = {**fields.pop("extra", {}), ENV: {"name": name, "seed": seed}}
    return Task(id=f"{name}-{seed}", prompt=tuple(prompt), data_source=f"env/{name}", extra=extra, **fields)


def at_stage(*, split: str, score: str) -> Callable[[Task], Task]:
    """Return a function that marks a task with its split and the way its rewards become one score."""

    def mark(task: Task) -> Task:
        if ENV not in task.extra:  # its scheduler knows it by other means
            return task
        row_env = {**task.extra[ENV], "split": split, "score": score}
        return dataclasses.replace(task, extra={**task.extra, ENV: row_env})

    return mark


def require(module: str, *, install: str, needed_by: str) -> ModuleType:
    """Import a package.

    Args:
        module: Its import name.
        install: What pip installs, for instance "textarena".
        needed_by: The whole name of the environment.

    Raises:
        MissingModuleError: it is not there, or fails when it is imported; the message has the line that installs it.
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
    except PLUGIN_RAISES as problem:  # whatever a package does when it is imported
        pass_interrupt(problem)
        raise MissingModuleError(
            f"env {needed_by!r}: the package {module!r} fails when it is imported ({one_line(problem)}); install it again: "
            f"pip install {install}"
        ) from problem


def known_id(id: str, known: Iterable[str], *, name: str) -> str:
    """Return `id`, which must be among `known`.

    Raises:
        UnknownNameError: it is not; the message has the nearest.
    """
    names = list(known)
    if id not in names:
        raise UnknownNameError(f"env {name!r}: there is no {id!r}.{did_you_mean(id, names)}")
    return id


def check_kwargs(make: Callable[[], Any], *, name: str, kwargs: Mapping[str, Any]) -> Any:
    """Call `make`, which makes an object from the config's arguments, and return the object.

    Raises:
        ConfigError: it raised.
    """
    try:
        return make()
    except ConfigError:
        raise
    except PLUGIN_RAISES as problem:  # whatever a package raises for arguments that it does not like
        pass_interrupt(problem)
        details = (
            f" with kwargs {dict(kwargs)!r:.200}: {one_line(problem)}; change env.kwargs"
            if kwargs
            else f": {one_line(problem)}"
        )
        raise ConfigError(f"env {name!r} cannot be made{details}") from problem


_GLOBAL_RANDOM = threading.Lock()
HELD_S = 60.0
"""Seconds that one environment waits for another's call to end."""


class OwnRandom:
    """A random state of its own for an environment that draws from `random` or `numpy.random`, which all threads share.

    with self._random.held():      at most one environment at a time is in such a block, each in its own state
        self._env.reset(seed=3)    so that episodes that run at once draw what each would draw alone
    """

    def __init__(self) -> None:
        self._state: Any = None

    @contextmanager
    def held(self, *, seed: int | None = None) -> Iterator[None]:
        """Draw from the own state inside the block; `seed` begins that of the module `random`.

        Raises:
            SchedulerError: another environment's call has not ended.
        """
        if not _GLOBAL_RANDOM.acquire(timeout=HELD_S):
            raise SchedulerError(
                f"an environment that draws from the process's random generators has kept them for {HELD_S:g} s: its step "
                "hangs, and no other of that kind can run beside it"
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
