"""ContainerSandbox: a container of podman or docker, run through their command lines.

    podman run -d --network none --memory 2048m … IMAGE     once
    podman exec NAME timeout -k 2 60 bash -c …              each command
    podman rm -f -t 0 NAME                                  at the end

Every container has a label of this process. A small process waits for this one to end, for whatever reason, and then removes
the containers with the label, so a killed run leaves none behind.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyturn.core.errors import ConfigError
from polyturn.infra.aio import PerLoop
from polyturn.sandbox.base import SLEEP, BaseSandbox, SandboxError, SandboxSetupError, SandboxSpec
from polyturn.sandbox.command import ProgramEnd, last_lines, sweep_at_end

LABEL = "polyturn.run"
CONTROL_S = 120.0
"""Seconds for a command of the engine other than `run`, `build` and `exec`."""
_SWEEP = f'ids=$("$2" ps -aq --filter "label={LABEL}=$1"); [ -z "$ids" ] || (shift; "$@" $ids)'
"""Shell script that removes the containers with a label. Arguments: the label's value, and the command that removes
containers by id."""


def check_containers(spec: SandboxSpec) -> None:
    """Check that the engine is installed and that the spec has an image.

    Raises:
        ConfigError: the engine, the image or its Dockerfile is missing.
    """
    if shutil.which(spec.backend) is None:
        raise ConfigError(
            f"the sandbox's backend is {spec.backend!r}, which is not installed; install it, or set backend: bubblewrap"
        )
    if spec.image is None and spec.build is None:
        raise ConfigError(f"a {spec.backend} sandbox needs an image; set image, or build to a folder with a Dockerfile")
    if spec.build is not None and not (Path(spec.build) / "Dockerfile").is_file():
        raise ConfigError(f"the sandbox's build is {spec.build!r}, but that folder has no Dockerfile")


class ContainerSandbox(BaseSandbox):
    """A sandbox in a container of podman or docker."""

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._name = f"polyturn-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._image = spec.image

    async def is_alive(self) -> bool:
        """Return whether the container runs."""
        try:
            output = await self._engine("inspect", "-f", "{{.State.Running}}", self._name)
        except SandboxError:
            return False
        return output.exit_code == 0 and output.stdout.strip() == b"true"

    async def pid(self) -> int:
        """Return the id of the container's first process.

        Raises:
            SandboxError: the container has ended.
        """
        output = await self._engine("inspect", "-f", "{{.State.Pid}}", self._name)
        number = output.stdout.decode().strip()
        if not number.isdigit() or number == "0":
            raise SandboxError(f"the container {self._name} has no process: {last_lines(output)}")
        return int(number)

    async def snapshot(self) -> str:
        """Return the name of a new image with the container's files."""
        tag = f"localhost/polyturn-snapshot:{uuid.uuid4().hex[:12]}"
        output = await self._engine("commit", self._name, tag, timeout_s=600)
        if output.exit_code != 0:
            raise SandboxError(f"{self.spec.backend} commit failed: {last_lines(output)}")
        return tag

    async def _prepare(self) -> None:
        check_containers(self.spec)
        if self.spec.build is None:
            return
        folder = Path(self.spec.build)
        tag = f"localhost/polyturn:{await asyncio.to_thread(_digest, folder, self.spec.build_args)}"
        async with _building(os.getpid())().setdefault(tag, asyncio.Lock()):
            if (await self._engine("image", "inspect", tag)).exit_code != 0:
                command = ("build", "-t", tag, *self.spec.build_args, self.spec.build)
                output = await self._engine(*command, timeout_s=self.spec.build_timeout_s)
                if output.is_late:
                    limit = f"{self.spec.build_timeout_s:g} s"
                    raise SandboxSetupError(f"the image of {folder} was not built within {limit} (build_timeout_s)")
                if output.exit_code != 0:
                    raise SandboxSetupError(f"the image of {folder} cannot be built: {last_lines(output)}")
        self._image = tag

    async def _begin(self) -> None:
        spec, sweeper = self.spec, sweep_at_end(os.getpid(), _SWEEP, *_remover(self.spec.backend))
        output = await self._engine(
            "run", "-d", "--name", self._name, "--label", f"{LABEL}={sweeper.mark}",
            *([] if spec.network else ["--network", "none"]), *spec.limit_options(unit="m"),
            *(["-w", spec.workdir] if spec.workdir else []), *spec.run_args, "--entrypoint", "sh", str(self._image),
            "-c", SLEEP, timeout_s=spec.start_timeout_s, keeps_children=True,
        )  # fmt: skip
        if output.exit_code != 0:
            raise SandboxSetupError(f"{spec.backend} run {self._image} failed: {last_lines(output)}")

    def _command(self, argv: Sequence[str], *, cwd: str, env: Mapping[str, str], user: str | None) -> list[str]:
        command = [self.spec.backend, "exec", "-i"]
        command += ["-u", user] if user else []
        command += ["-w", cwd] if cwd else []
        for name, value in env.items():
            command += ["-e", f"{name}={value}"]
        return [*command, self._name, *argv]

    async def _end(self) -> None:
        await self._on_host([*_remover(self.spec.backend), self._name], timeout_s=CONTROL_S)

    async def _engine(self, *arguments: str, timeout_s: float = CONTROL_S, keeps_children: bool = False) -> ProgramEnd:
        return await self._on_host([self.spec.backend, *arguments], timeout_s=timeout_s, keeps_children=keeps_children)


def _remover(program: str) -> list[str]:
    """Return the command that removes containers without waiting; their names are to be appended."""
    return [program, "rm", "-f", *(["-t", "0"] if program == "podman" else [])]


@functools.cache
def _building(pid: int) -> PerLoop[dict[str, asyncio.Lock]]:
    """Return the locks of images that are being built, by image name."""
    return PerLoop(dict)


def _digest(folder: Path, arguments: Sequence[str]) -> str:
    """Return a digest of a folder's files (contents, names, executable bits) and of the arguments of the build."""
    digest = hashlib.sha256(repr(tuple(arguments)).encode())
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            content = os.readlink(path).encode() if path.is_symlink() else b""
        else:
            content = path.read_bytes()
        is_program = path.is_file() and os.access(path, os.X_OK)
        for part in (str(path.relative_to(folder)).encode(), b"x" if is_program else b"-", content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]
