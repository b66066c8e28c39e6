"""Reads sandbox settings from a configuration and starts one sandbox per episode.

    read_spec({"backend": "podman", "image": "python:3.12"}, where="env.kwargs.sandbox")  ->  SandboxSpec(...)
    boxes.join("train-7/2") … await boxes.of("train-7/2") … await boxes.leave("train-7/2")     the last `leave` closes it

An episode's tools share one sandbox. The first call that needs the sandbox starts it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.infra.aio import PerLoop
from polyturn.infra.deadline import Stretch
from polyturn.sandbox.apptainer import ApptainerSandbox, check_apptainer
from polyturn.sandbox.base import Backend, BaseSandbox, ExecResult, SandboxError, SandboxSpec
from polyturn.sandbox.bubblewrap import BubblewrapSandbox, check_bubblewrap
from polyturn.sandbox.containers import ContainerSandbox, check_containers
from polyturn.sandbox.e2b import E2BSandbox, check_e2b
from polyturn.sandbox.warm import take_warm

_KINDS: Mapping[str, type[BaseSandbox]] = {
    "apptainer": ApptainerSandbox,
    "bubblewrap": BubblewrapSandbox,
    "e2b": E2BSandbox,
}
_CHECKS = {"apptainer": check_apptainer, "bubblewrap": check_bubblewrap, "e2b": check_e2b}
FIELDS = tuple(field.name for field in dataclasses.fields(SandboxSpec))
MAX_WARM = 256
"""Largest value of `warm`."""
_POSITIVE = ("cpus", "memory_mb", "processes", "disk_mb", "start_timeout_s", "build_timeout_s")
_TEXT, _NUMBER, _LIST = "write a text", "write a number above 0", "write a list of texts, such as [--shm-size, 1g]"
_ADVICE = {
    **dict.fromkeys(("image", "build", "workdir", "user"), _TEXT),
    **dict.fromkeys(_POSITIVE, _NUMBER),
    **dict.fromkeys(("run_args", "build_args"), _LIST),
    "backend": f"write one of {', '.join(get_args(Backend))}",
    "env": "write a mapping of names to texts",
    "network": "write true or false",
    "max_alive": "write how many sandboxes may live at once, 1 or more",
    "warm": f"write how many sandboxes are kept started, 0 to {MAX_WARM}",
}
"""Key of a sandbox's settings -> advice on its values, for error messages."""


def read_spec(options: Any, *, where: str, base: Path | None = None) -> SandboxSpec:
    """Return the sandbox that a mapping in a configuration describes.

    Args:
        options: Its keys are the fields of `SandboxSpec`.
        where: The mapping's key, for messages.
        base: The folder that `build`, and an image that is a folder, are resolved against.

    Raises:
        ConfigError: a key is unknown, or a value is invalid.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where} is {options!r:.100}; write a mapping with {', '.join(FIELDS[:3])}, …")
    for name in options:
        if name not in FIELDS:
            raise ConfigError(f"{where} has the unknown key {name!r}.{did_you_mean(str(name), FIELDS)}")
    for name, value in options.items():
        if isinstance(value, bool) and name != "network":
            raise ConfigError(f"{where}.{name} is {value}; {_ADVICE[name]}")
    try:
        spec = TypeAdapter(SandboxSpec).validate_python(dict(options))
    except ValidationError as problem:
        first = problem.errors()[0]
        key = ".".join([where, *map(str, first["loc"])])
        wanted = _ADVICE.get(str(first["loc"][0])) or re.sub(r"^Input should be", "it must be", first["msg"])
        nearest = did_you_mean(str(first["input"]), get_args(Backend)) if key == f"{where}.backend" else ""
        raise ConfigError(f"{key} is {first['input']!r:.100}; {wanted}.{nearest}") from problem
    for name in _POSITIVE:
        value = getattr(spec, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{where}.{name} is {value}; {_ADVICE[name]}")
    if spec.max_alive is not None and spec.max_alive < 1:
        raise ConfigError(f"{where}.max_alive is {spec.max_alive}; {_ADVICE['max_alive']}")
    if spec.max_alive is not None and spec.max_alive <= spec.warm:
        raise ConfigError(
            f"{where}.max_alive is {spec.max_alive} and warm is {spec.warm}; max_alive must be larger, because warm "
            "sandboxes count as well"
        )
    if not 0 <= spec.warm <= MAX_WARM:
        raise ConfigError(f"{where}.warm is {spec.warm}; {_ADVICE['warm']}")
    start = base or Path()
    if spec.build is not None:  # absolute, because programs run in another folder
        spec = dataclasses.replace(spec, build=str((start / spec.build).resolve()))
    if spec.image is not None and spec.backend == "bubblewrap":
        spec = dataclasses.replace(spec, image=str((start / spec.image).resolve()))
    if spec.image is not None and spec.backend == "apptainer" and (start / spec.image).exists():
        spec = dataclasses.replace(spec, image=str((start / spec.image).resolve()))
    return spec


def check_spec(spec: SandboxSpec) -> None:
    """Check that this machine can run sandboxes of a spec, without starting one.

    Raises:
        ConfigError: this machine lacks something.
    """
    _CHECKS.get(spec.backend, check_containers)(spec)


def try_sandbox(
    spec: SandboxSpec, *, where: str, command: str = "true", env: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> ExecResult:
    """Start a sandbox before the run, run one command in it, and close it.

    Args:
        spec: The sandbox.
        where: The setting that the sandbox belongs to, for messages.
        command: A shell command.
        env: Environment variables of the command.
        timeout_s: Time limit of the command in seconds.

    Raises:
        ConfigError: this machine cannot run the sandbox, or it does not start.
    """

    async def tried() -> ExecResult:
        async with await open_sandbox(dataclasses.replace(spec, warm=0)) as box:
            return await box.exec(command, env=env, timeout_s=timeout_s)

    check_spec(spec)
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
            return thread.submit(asyncio.run, tried()).result()
    except SandboxError as problem:
        raise ConfigError(f"{where}: a {spec.backend} sandbox cannot be used: {problem}") from problem


async def open_sandbox(spec: SandboxSpec) -> BaseSandbox:
    """Return a started sandbox, if possible a warm one; the caller closes it.

    Raises:
        SandboxSetupError: the sandbox did not start in time.
    """
    return await (take_warm(spec, _start) if spec.warm else _start(spec))


async def _start(spec: SandboxSpec) -> BaseSandbox:
    """Start a sandbox as soon as `max_alive` allows it."""
    sandbox = _KINDS.get(spec.backend, ContainerSandbox)(spec)
    if spec.max_alive is not None:
        room = _rooms(os.getpid())().setdefault(spec.max_alive, asyncio.Semaphore(spec.max_alive))
        await room.acquire()
        sandbox.on_close.callback(room.release)
    try:
        await sandbox.start()
    except BaseException:
        sandbox.on_close.close()
        raise
    return sandbox


@functools.cache
def _rooms(pid: int) -> PerLoop[dict[int, asyncio.Semaphore]]:
    """Return the semaphores that limit this process's sandboxes, by `max_alive`."""
    return PerLoop(dict)


class EpisodeSandboxes:
    """The sandboxes of live episodes, by episode id."""

    def __init__(self) -> None:
        self._users: dict[str, int] = {}
        self._specs: dict[str, SandboxSpec] = {}
        self._opening: dict[str, asyncio.Task[BaseSandbox]] = {}

    def join(self, episode_id: str, spec: SandboxSpec | None = None) -> None:
        """Add a user of the episode's sandbox; the first `spec` determines the sandbox."""
        self._users[episode_id] = self._users.get(episode_id, 0) + 1
        if spec is not None:
            self._specs.setdefault(episode_id, spec)

    async def of(self, episode_id: str) -> BaseSandbox:
        """Return the episode's sandbox; the first call starts it.

        Raises:
            SandboxSetupError: the sandbox did not start; later calls raise the same error.
        """
        if episode_id not in self._opening and episode_id not in self._specs:
            raise SandboxError(f"the episode {episode_id!r} has no sandbox: the episode has ended, or no tool has a spec")
        if episode_id not in self._opening:
            self._opening[episode_id] = asyncio.create_task(open_sandbox(self._specs[episode_id]))
        with Stretch.paused():  # the start has its own deadline, and may have to wait for `max_alive`
            return await asyncio.shield(self._opening[episode_id])

    async def leave(self, episode_id: str) -> None:
        """Remove a user of the sandbox; the last one closes it."""
        self._users[episode_id] -= 1
        if self._users[episode_id]:
            return
        del self._users[episode_id]
        self._specs.pop(episode_id, None)
        opening = self._opening.pop(episode_id, None)
        if opening is None:
            return
        opening.cancel()  # no effect if the sandbox is open
        (sandbox,) = await asyncio.gather(opening, return_exceptions=True)
        if isinstance(sandbox, BaseSandbox):
            await sandbox.close()
