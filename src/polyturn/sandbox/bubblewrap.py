"""BubblewrapSandbox: namespaces of this machine, without a container engine; as root also images and limits.

    bwrap ── first process (sh), which only waits ── commands, which the program enter.py runs in its namespaces

The machine's /usr is mounted read-only; everything else belongs to the sandbox. An `image` is a folder with a root file
system, under an overlay for written files. Written files are kept in memory, in a mount that ends with the sandbox; the
sandbox ends with this process. A killed run leaves an empty control group, which the next run removes.

As root there is no user namespace: root inside is the machine's root without the capabilities that allow an escape. Without
root there is a user namespace whose only user is root, and images, snapshots and limits are not available.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from polyturn.core.errors import ConfigError
from polyturn.infra.process import ManagedProcess
from polyturn.sandbox.base import SLEEP, BaseSandbox, SandboxError, SandboxSetupError, SandboxSpec
from polyturn.sandbox.python.cgroup import ControlGroup, make_group, sweep
from polyturn.sandbox.python.isolation import Isolation, find_isolation, system_folders

AT = "/run/polyturn-sandbox"
"""Mount point of each sandbox, in a mount namespace of its own."""
NO_LIMIT_MB, NO_LIMIT_PROCESSES = 1 << 22, 1 << 15
_FROM_ETC = ("ld.so.cache", "alternatives", "localtime", "mime.types", "ssl", "passwd", "group", "nsswitch.conf")
_OF_NETWORK = ("resolv.conf", "hosts")
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_MOUNTS = """set -e
at=$1 size=$2 image=$3; shift 3
while [ "$1" != -- ]; do echo $$ > "$1"; shift; done; shift
mount -t tmpfs -o "mode=0755$size" tmpfs "$at"
mkdir "$at/upper" "$at/work" "$at/root"
[ -z "$image" ] || mount -t overlay overlay -o "lowerdir=$image,upperdir=$at/upper,workdir=$at/work" "$at/root"
exec "$@"
"""


def check_bubblewrap(spec: SandboxSpec) -> None:
    """Check that this machine can start a sandbox of a spec.

    Raises:
        ConfigError: this machine cannot.
    """
    isolation, why = find_isolation()
    if isolation is Isolation.NONE:
        raise ConfigError(f"the bubblewrap sandbox cannot be used here: {why}")
    if spec.build is not None:
        raise ConfigError(f"bubblewrap cannot build the Dockerfile in {spec.build}; use podman or docker, or set image")
    if spec.image is not None:
        if isolation is Isolation.USER:
            raise ConfigError(f"the sandbox's image is {spec.image!r}; bubblewrap supports images only as root")
        if not Path(spec.image).is_dir() or {":", ","} & set(spec.image):
            raise ConfigError(
                f"the sandbox's image is {spec.image!r}; bubblewrap needs a folder with a root file system, without ':' and "
                "',' in its path. Use podman or docker for images by name"
            )


class BubblewrapSandbox(BaseSandbox):
    """A sandbox in bubblewrap's namespaces."""

    default_workdir: ClassVar[str] = "/app"

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._is_root = os.geteuid() == 0
        self._process: ManagedProcess | None = None
        self._group: ControlGroup | None = None
        self._pid = 0
        """Id, on this machine, of the sandbox's first process."""

    async def is_alive(self) -> bool:
        """Return whether the sandbox's first process runs."""
        return self._process is not None and self._process.is_alive

    async def pid(self) -> int:
        """Return the id of the sandbox's first process."""
        return self._pid

    async def snapshot(self) -> str:
        """Return a new folder with a copy of the files, an `image` for further sandboxes; only as root."""
        if not self._is_root or self._process is None:
            raise SandboxError("a bubblewrap sandbox can be copied only as root and while it is alive")
        folder = tempfile.mkdtemp(prefix="polyturn-image-")
        copy = ["nsenter", "-t", str(self._process.pid), "-m", "cp", "-a", f"{AT}/root/.", folder]
        output = await self._on_host(copy, timeout_s=600)
        if output.exit_code != 0:
            raise SandboxError(f"the sandbox cannot be copied: {output.stderr.decode('utf-8', 'replace')[-300:]}")
        return folder

    async def _begin(self) -> None:
        check_bubblewrap(self.spec)
        await self._threads.run(self._start, is_owed=True, on_late=lambda _: self._remove())

    def _start(self) -> None:
        reader, writer = os.pipe()
        try:
            self._process = ManagedProcess(self._bwrap(writer), pipes=True, pass_fds=(writer,))
        except OSError as problem:
            os.close(reader)
            raise SandboxSetupError(f"bubblewrap cannot be started: {problem}") from problem
        finally:
            os.close(writer)
        with os.fdopen(reader, "rb") as info:
            text = info.read()
        assert self._process.stdout is not None
        is_ready = self._process.stdout.readline() == b"ready\n"
        if not is_ready:
            self._process.wait(5.0)
            raise SandboxSetupError(f"bubblewrap did not start the sandbox: {self._process.tail(3) or 'no output'}")
        self._pid = json.loads(text)["child-pid"]

    def _bwrap(self, info_fd: int) -> list[str]:
        spec = self.spec
        command = ["bwrap", "--die-with-parent", "--as-pid-1", "--clearenv", "--cap-drop", "ALL", "--hostname", "sandbox"]
        command += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--info-fd", str(info_fd)]
        command += [] if spec.network else ["--unshare-net"]
        command += ["--bind", f"{AT}/root", "/"] if self._is_root else ["--unshare-user", "--uid", "0", "--gid", "0"]
        for folder in ("/etc", "/var", "/logs"):
            command += ["--perms", "0755", "--dir", folder]
        if spec.image is None or not (Path(spec.image) / "usr/bin").is_dir():
            command += ["--ro-bind", "/usr", "/usr"]
            for option, source, folder in system_folders():
                if spec.image is None or not os.path.islink(spec.image + folder):
                    command += [option, source, folder]
            for name in _FROM_ETC:
                command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        for name in _OF_NETWORK if spec.network else ():
            command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        command += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--dir", "/tmp", "--perms", "1777", "--dir"]
        command += ["/var/tmp", "--perms", "0700", "--dir", "/root", *spec.run_args]
        command += ["--chdir", "/", "sh", "-c", f"echo ready; {SLEEP}"]
        if not self._is_root:
            return command
        Path(AT).mkdir(mode=0o700, exist_ok=True)
        _sweep_once(os.getpid())
        self._group = make_group(
            f"polyturn-sandbox-{os.getpid()}-{uuid.uuid4().hex[:12]}",
            memory_mb=spec.memory_mb or NO_LIMIT_MB,
            processes=spec.processes or NO_LIMIT_PROCESSES,
            cpus=spec.cpus,
        )
        size = "" if spec.disk_mb is None else f",size={spec.disk_mb}m"
        arguments = [AT, size, os.path.abspath(spec.image) if spec.image else "", *self._doors, "--", *command]
        return ["unshare", "-m", "sh", "-c", _MOUNTS, "sh", *arguments]

    @property
    def _doors(self) -> tuple[str, ...]:
        return () if self._group is None else self._group.doors

    def _command(self, argv: Sequence[str], *, cwd: str, env: Mapping[str, str], user: str | None) -> list[str]:
        names = ("" if self._is_root else "user,") + "ipc,uts,net,pid,mnt"
        variables = [f"{name}={value}" for name, value in {**_ENVIRONMENT, **env}.items()]
        arguments = [str(self._pid), cwd, user or "root", names, ":".join(self._doors), str(len(variables))]
        return [sys.executable, "-I", "-S", str(Path(__file__).with_name("enter.py")), *arguments, *variables, *argv]

    async def _end(self) -> None:
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process.close()
        if self._group is not None:
            self._group.remove()


@functools.cache
def _sweep_once(pid: int) -> None:
    """Remove the control groups of killed runs, once per process."""
    sweep()
