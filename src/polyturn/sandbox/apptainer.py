"""ApptainerSandbox: an instance of Apptainer, for clusters without docker, run through its command line.

    apptainer instance start --containall --fakeroot --writable-tmpfs --net --network none … IMAGE NAME     once
    apptainer exec --cleanenv --cwd /app instance://NAME env A=1 bash -c …                                  each command
    apptainer instance stop --force NAME                                                                    at the end

`--containall` hides this machine's files, processes and variables. With `--fakeroot`, the user who started the run is root
inside the instance, and root is the only user there. Written files are kept in memory. As for containers, a small process
waits for this one to end and then stops its instances.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from polyturn.core.errors import ConfigError
from polyturn.sandbox.base import BaseSandbox, SandboxError, SandboxSetupError, SandboxSpec
from polyturn.sandbox.command import last_lines, sweep_at_end

CONTROL_S = 120.0
"""Seconds for a command of Apptainer other than `instance start` and `exec`."""
_SWEEP = 'apptainer instance stop --force "$1-*"'
"""Stops the instances whose names begin with a mark."""
_CONTAIN = ("--cleanenv", "--containall", "--no-mount", "hostfs,bind-paths", "--no-eval", "--fakeroot", "--writable-tmpfs")


def check_apptainer(spec: SandboxSpec) -> None:
    """Check that Apptainer is installed and supports a spec.

    Raises:
        ConfigError: Apptainer is missing, or does not support the spec.
    """
    if shutil.which("apptainer") is None:
        raise ConfigError(
            "the sandbox's backend is 'apptainer', which is not installed; install it, or set backend: bubblewrap"
        )
    if spec.build is not None:
        raise ConfigError(
            f"apptainer cannot build the Dockerfile in {spec.build}; build it with podman or docker, and set image to the "
            "result, such as docker-archive:image.tar"
        )
    if spec.image is None:
        raise ConfigError("an apptainer sandbox needs an image; set image to a .sif file or to a name such as python:3.12")
    if spec.user not in (None, "root", "0"):
        raise ConfigError(f"the sandbox's user is {spec.user!r}, but with apptainer root is the only user: remove user")


class ApptainerSandbox(BaseSandbox):
    """A sandbox in an instance of Apptainer."""

    default_workdir: ClassVar[str] = "/app"

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._name = f"{sweep_at_end(os.getpid(), _SWEEP).mark}-{uuid.uuid4().hex[:12]}"

    async def is_alive(self) -> bool:
        """Return whether Apptainer lists the instance."""
        try:
            return await self._listed() is not None
        except SandboxError:
            return False

    async def pid(self) -> int:
        """Return the id of the instance's first process.

        Raises:
            SandboxError: the instance has ended.
        """
        if (entry := await self._listed()) is None:
            raise SandboxError(f"the apptainer instance {self._name} has no process")
        return int(entry["pid"])

    async def _begin(self) -> None:
        check_apptainer(self.spec)
        spec, options = self.spec, [] if self.spec.network else ["--net", "--network", "none"]
        command = [
            "apptainer", "instance", "start", *_CONTAIN, *options, *spec.limit_options(unit="M"), *spec.run_args,
            _source(str(spec.image)), self._name,
        ]  # fmt: skip
        output = await self._on_host(command, timeout_s=spec.start_timeout_s, keeps_children=True)
        if output.exit_code != 0:
            raise SandboxSetupError(f"apptainer instance start {spec.image} failed: {last_lines(output)}")

    def _command(self, argv: Sequence[str], *, cwd: str, env: Mapping[str, str], user: str | None) -> list[str]:
        # `--env` splits its value at commas, so the variables go through the program env.
        variables = ["env", *(f"{name}={value}" for name, value in env.items())] if env else []
        return [
            *("apptainer", "exec", "--cleanenv", "--no-eval", "--cwd", cwd or "/", f"instance://{self._name}"),
            *(*variables, *argv),
        ]

    async def _end(self) -> None:
        await self._on_host(["apptainer", "instance", "stop", "--force", self._name], timeout_s=CONTROL_S)

    async def _listed(self) -> Mapping[str, Any] | None:
        """Return the instance's entry in Apptainer's list, or None."""
        output = await self._on_host(["apptainer", "instance", "list", "--json", self._name], timeout_s=CONTROL_S)
        try:
            instances: list[Mapping[str, Any]] = json.loads(output.stdout)["instances"]
        except (ValueError, KeyError) as problem:
            raise SandboxError(f"the output of apptainer instance list is invalid: {last_lines(output)!r}") from problem
        return next((entry for entry in instances if entry["instance"] == self._name), None)


def _source(image: str) -> str:
    """Return an image in Apptainer's notation; a name that is not a path or an address is looked up in docker's registry."""
    return image if ":/" in image or image.startswith("docker-archive:") or Path(image).exists() else f"docker://{image}"
