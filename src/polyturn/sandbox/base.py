"""BaseSandbox: a machine of its own for one episode, in which commands of a model run and files are kept.

    async with await open_sandbox(SandboxSpec(backend="podman", image="python:3.12-slim")) as box:
        await box.write("/app/file.py", b"print(1 + 1)")
        await box.exec("python file.py", cwd="/app")    ->  ExecResult(exit_code=0, stdout="2\n", stderr="")

A command that fails, prints without end or takes too long is a result, which the model reads. A sandbox that cannot be
started or is gone is a `SandboxError`: the trajectory is dropped and earns nothing.

A back-end says how a sandbox is started and ended, and which program of this machine runs a command in it. Files travel as
commands, too, so that no path inside is ever resolved outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import shlex
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import ClassVar, Literal

from polyturn.core.errors import ToolUnavailableError, one_line
from polyturn.infra.threads import DaemonThreads
from polyturn.sandbox.command import ProgramEnd, Stopper, run_bounded

KILL_AFTER_S = 2
"""Seconds between a late command's SIGTERM and its SIGKILL."""
SLACK_S = 15.0
"""Seconds beyond its deadline after which a command's own time-out has failed, and all in the sandbox is killed."""
MAX_OUTPUT = 1 << 16
MAX_FILE = 64 << 20
CLOSE_S = 60.0
MAX_AT_ONCE = 256
DEAD_CODES = frozenset({125, 126, 127, 137, 255, -9})
"""Exit codes with which a command ends, among others, because its sandbox did."""
KILLED_CODES, KILLED_LOOKS, LOOK_AGAIN_S = frozenset({137, -9}), 3, 0.1
"""Exit codes of a killed command, and how often and every how many seconds its sandbox is then looked at. On a
busy machine the first process of a namespace that was killed ended at most 5 ms after the commands in it."""
SLEEP = "while :; do sleep 3600 & wait $!; done"
"""The first process of a sandbox: it reaps what others leave, and survives when all others are killed."""

Backend = Literal["bubblewrap", "podman", "docker", "apptainer", "e2b"]


class SandboxError(ToolUnavailableError):
    """A sandbox failed, which no command can be blamed for: the trajectory fails, the run goes on."""


class SandboxSetupError(SandboxError):
    """A sandbox that could not be started, or an image that could not be built."""


class SandboxGoneError(SandboxError):
    """A sandbox that ended by itself."""


class SandboxFileError(Exception):
    """A file that cannot be read or written, in the words of the sandbox's own tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """The sandbox of an episode."""

    backend: Backend = "bubblewrap"
    image: str | None = None
    """The name of an image, or of e2b's template; for apptainer also a .sif file, for bubblewrap a folder with a root file
    system (as root). None is e2b's own template, and with bubblewrap the machine's own programs, read-only."""
    build: str | None = None
    """A folder with a Dockerfile to build the image from."""
    build_timeout_s: float = 600.0
    workdir: str | None = None
    """The folder that commands start in, made if it is missing; None is the image's; bubblewrap and apptainer take /app."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of every command."""
    user: str | None = None
    """The user that commands run as; None is the image's, and root with bubblewrap and apptainer."""
    cpus: float | None = None
    """Processors' worth of time; None means no limit."""
    memory_mb: int | None = 2048
    processes: int | None = 512
    disk_mb: int | None = 2048
    """With bubblewrap as root: all that is written, which counts as memory as well."""
    network: bool = False
    """Whether commands reach the network."""
    start_timeout_s: float = 120.0
    """Seconds until it is ready, without the time that building its image takes."""
    warm: int = 0
    """Sandboxes that are kept started for the episodes to come."""
    max_alive: int | None = None
    """Sandboxes that live at once in this process, of all with the same number; further ones wait. None means no limit."""
    run_args: tuple[str, ...] = ()
    """Further arguments of `podman run`, `docker run` or `apptainer instance start`, or of bwrap."""
    build_args: tuple[str, ...] = ()
    """Further arguments of `podman build` or `docker build`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The end of a command."""

    exit_code: int
    """Its status; 124 where it was late."""
    stdout: str
    stderr: str
    is_timeout: bool = False
    is_truncated: bool = False
    """Whether the middle of its output is left out."""
    duration_s: float = 0.0


class BaseSandbox:
    """A live sandbox. `close` must be called once whatever happens; `async with` does."""

    default_workdir: ClassVar[str | None] = None

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.workdir = spec.workdir or self.default_workdir or "/"
        """The folder that commands start in."""
        self.shell = "sh"
        """bash where the sandbox has it, else sh."""
        self._has_timeout = False
        self._threads = DaemonThreads(name="sandbox-exec", max_threads=MAX_AT_ONCE)
        self._closing: asyncio.Task[None] | None = None
        self.on_close = contextlib.ExitStack()
        """Closed once it is gone."""

    # A back-end's own.

    async def _prepare(self) -> None:
        """Build the image that it needs."""

    async def _begin(self) -> None:
        """Start the sandbox.

        Raises:
            SandboxSetupError: it cannot be.
        """
        raise NotImplementedError

    def _command(self, argv: Sequence[str], *, cwd: str, env: Mapping[str, str], user: str | None) -> list[str]:
        """Return the command of this machine that runs `argv` in the sandbox."""
        raise NotImplementedError

    async def is_alive(self) -> bool:
        """Return whether it runs; never raises."""
        raise NotImplementedError

    async def pid(self) -> int:
        """Return one of its processes, as this machine numbers it.

        Raises:
            SandboxError: it has none on this machine.
        """
        raise SandboxError(f"a {self.spec.backend} sandbox runs elsewhere; set sandbox.network: true, host and reach_as")

    async def _end(self) -> None:
        """Remove the sandbox and everything in it."""
        raise NotImplementedError

    async def snapshot(self) -> str:
        """Return an image of its files, for the `image` of further sandboxes.

        Raises:
            SandboxError: it cannot be made.
        """
        raise SandboxError(f"a {self.spec.backend} sandbox cannot be copied")

    # The same for all.

    async def start(self) -> None:
        """Start it, within its deadline.

        Raises:
            SandboxSetupError: it did not start, or not in time; nothing of it is left.
        """
        await self._prepare()
        has_own_workdir = self.spec.workdir is None and self.default_workdir is None  # the image's
        try:
            async with asyncio.timeout(self.spec.start_timeout_s):
                await self._begin()
                folder = "." if has_own_workdir else shlex.quote(self.workdir)
                probe = f"mkdir -p {folder} && cd {folder} || exit 1; command -v timeout >&2; command -v bash; pwd"
                cwd, user = ("", None) if has_own_workdir else ("/", "root")
                output = await self._run(["sh", "-c", probe], cwd=cwd, user=user, timeout_s=self.spec.start_timeout_s)
        except BaseException as problem:
            await self.close()
            if isinstance(problem, TimeoutError):
                limit = f"{self.spec.start_timeout_s:g} s"
                raise SandboxSetupError(f"the {self.spec.backend} sandbox did not start within {limit}") from problem
            raise
        if output.exit_code != 0:
            await self.close()
            raise SandboxSetupError(f"the {self.spec.backend} sandbox runs no command: {_last_line(output)}")
        lines = output.stdout.decode("utf-8", "replace").splitlines()
        self._has_timeout = b"timeout" in output.stderr
        self.shell = "bash" if len(lines) > 1 else "sh"
        self.workdir = lines[-1]

    async def __aenter__(self) -> BaseSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float = 60.0,
        stdin: bytes = b"",
        max_bytes: int = MAX_OUTPUT,
    ) -> ExecResult:
        """Run a command to its end.

        Args:
            command: A line for the shell, or a program and its arguments.
            cwd: The folder that it starts in, instead of `workdir`.
            env: Variables beside those of the sandbox.
            user: The user that it runs as; "root" is always there.
            timeout_s: When it is killed; its end is then a result as well.
            stdin: All that it reads.
            max_bytes: Of stdout, and of stderr, that are kept: the first and the last.

        Raises:
            SandboxGoneError: the sandbox ended before or meanwhile.
        """
        argv = [self.shell, "-c", command] if isinstance(command, str) else list(command)
        if self._has_timeout:
            argv = ["timeout", "-k", str(KILL_AFTER_S), f"{timeout_s:.3f}", *argv]
        limit_s = timeout_s + (SLACK_S if self._has_timeout else 0.0)
        start = time.monotonic()
        output = await self._run(argv, cwd=cwd, env=env, user=user, timeout_s=limit_s, stdin=stdin, max_bytes=max_bytes)
        duration_s = time.monotonic() - start
        await self._check_alive(output)
        is_timeout = output.is_late or (output.exit_code in (124, 137) and duration_s >= timeout_s)
        if output.is_late:
            await self.kill_all()
        return ExecResult(
            exit_code=124 if is_timeout else output.exit_code,
            stdout=output.stdout.decode("utf-8", "replace"),
            stderr=output.stderr.decode("utf-8", "replace"),
            is_timeout=is_timeout,
            is_truncated=output.is_truncated,
            duration_s=duration_s,
        )

    async def kill_all(self) -> None:
        """Kill every process in the sandbox but the first."""
        await self._run(["sh", "-c", "kill -9 -1"], cwd="/", user="root", timeout_s=SLACK_S)

    async def read(self, path: str, *, max_bytes: int = MAX_FILE, user: str | None = None) -> bytes:
        """Return the content of a file, from `workdir` on.

        Raises:
            SandboxFileError: there is no such file, or it is longer than `max_bytes`.
        """
        argv = ["head", "-c", str(max_bytes + 1), "--", path]
        output = await self._checked(argv, user=user, max_bytes=2 * max_bytes + 2)
        if len(output) > max_bytes:
            raise SandboxFileError(f"{path}: longer than {max_bytes} bytes")
        return output

    async def write(self, path: str, data: bytes, *, user: str | None = None) -> None:
        """Write a file, from `workdir` on; missing folders are made.

        Raises:
            SandboxFileError: it cannot be written.
        """
        await self._checked(
            ["sh", "-c", 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"', "sh", path], stdin=data, user=user
        )

    async def upload(self, folder: Path, target: str, *, leaves_out: Sequence[str] = ()) -> None:
        """Copy the content of a folder of this machine into one of the sandbox, which is made if it is missing.

        Raises:
            SandboxFileError: it cannot be written.
        """
        data = await asyncio.to_thread(_packed, folder, leaves_out)
        script = 'mkdir -p -- "$1" && tar -x --no-same-owner -f - -C "$1"'
        await self._checked(["sh", "-c", script, "sh", target], stdin=data, user="root")

    async def download(self, source: str, folder: Path) -> None:
        """Copy the content of a folder of the sandbox into one of this machine.

        Raises:
            SandboxFileError: it cannot be read, is too large, or holds a link.
        """
        data = await self._checked(["tar", "-c", "-f", "-", "-C", source, "."], user="root", max_bytes=2 * MAX_FILE)
        await asyncio.to_thread(_unpack, data, folder)

    async def close(self) -> None:
        """Remove it, once, however often this is called and also while the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        with contextlib.suppress(SandboxError):
            async with asyncio.timeout(CLOSE_S):
                await self._end()
        self._threads.close()
        self.on_close.close()

    async def _checked(
        self, argv: Sequence[str], *, stdin: bytes = b"", user: str | None = None, max_bytes: int = MAX_OUTPUT
    ) -> bytes:
        """Return the output of one of the sandbox's own tools.

        Raises:
            SandboxFileError: it failed.
            SandboxGoneError: the sandbox is gone.
        """
        output = await self._run(argv, user=user, timeout_s=CLOSE_S, stdin=stdin, max_bytes=max_bytes)
        await self._check_alive(output)
        if output.exit_code != 0 or output.is_truncated:
            raise SandboxFileError(_last_line(output) if output.exit_code else "the data is too large")
        return output.stdout

    async def _check_alive(self, output: ProgramEnd) -> None:
        if self._closing is None and output.exit_code not in DEAD_CODES:
            return
        # A sandbox that is killed takes its commands along, which may be seen to end before it.
        for look in range(KILLED_LOOKS if output.exit_code in KILLED_CODES else 1):
            if look:
                await asyncio.sleep(LOOK_AGAIN_S)
            if not await self.is_alive():
                raise SandboxGoneError(f"the {self.spec.backend} sandbox is gone: {_last_line(output)}")

    async def _run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes = b"",
        max_bytes: int = MAX_OUTPUT,
    ) -> ProgramEnd:
        environ = {**self.spec.env, **(env or {})}
        where = self.workdir if cwd is None else cwd
        if where and not PurePosixPath(where).is_absolute():
            where = str(PurePosixPath(self.workdir) / where)
        command = self._command(argv, cwd=where, env=environ, user=user or self.spec.user)
        return await self._on_host(command, timeout_s=timeout_s, stdin=stdin, max_bytes=max_bytes)

    async def _on_host(
        self, command: Sequence[str], *, timeout_s: float, stdin: bytes = b"", max_bytes: int = MAX_OUTPUT
    ) -> ProgramEnd:
        """Run a program of this machine in a thread; a cancellation kills it.

        Raises:
            SandboxError: it cannot be started.
        """
        stop = Stopper()
        try:
            output: ProgramEnd = await self._threads.run(
                run_bounded, command, timeout_s=timeout_s, stdin=stdin, max_bytes=max_bytes, stop=stop
            )
        except asyncio.CancelledError:
            stop.set()
            raise
        except OSError as problem:
            raise SandboxError(f"{command[0]} cannot be started: {one_line(problem)}") from problem
        return output


def _last_line(output: ProgramEnd) -> str:
    text = (output.stderr or output.stdout).decode("utf-8", "replace").strip()
    return text.rpartition("\n")[2][:500] or f"exit code {output.exit_code}"


def _packed(folder: Path, leaves_out: Sequence[str]) -> bytes:
    """Return a folder's content as a tar file."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            if path.name not in leaves_out:
                archive.add(path, arcname=path.name)
    return data.getvalue()


def _unpack(data: bytes, folder: Path) -> None:
    """Write the folders and plain files of a tar file; links, which may lead out of the folder, are refused."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isdir() or member.isfile()):
                    raise SandboxFileError(f"{member.name}: neither a folder nor a plain file")
                target = folder / path
                (target if member.isdir() else target.parent).mkdir(parents=True, exist_ok=True)
                if (content := archive.extractfile(member)) is not None:
                    target.write_bytes(content.read())
    except (tarfile.TarError, OSError) as problem:
        raise SandboxFileError(one_line(problem)) from problem
