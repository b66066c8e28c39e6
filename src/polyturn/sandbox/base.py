"""BaseSandbox: an isolated machine for one episode, which runs the model's commands and keeps their files.

    async with await open_sandbox(SandboxSpec(backend="podman", image="python:3.12-slim")) as box:
        await box.write("/app/file.py", b"print(1 + 1)")
        await box.exec("python file.py", cwd="/app")    ->  ExecResult(exit_code=0, stdout="2\n", stderr="")

A command that fails, prints too much or exceeds its time limit is a result for the model to read. If a sandbox cannot start
or has died, a `SandboxError` is raised and the trajectory is dropped.

A back-end defines how to start and end a sandbox, and the program of this machine that runs a command in it. Files are
copied by commands, too, so a path inside the sandbox is never resolved outside.
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
from polyturn.sandbox.command import ProgramEnd, Stopper, last_lines, run_bounded

KILL_AFTER_S = 2
"""Seconds between SIGTERM and SIGKILL of a command at its time limit."""
SLACK_S = 15.0
"""If a command still runs this many seconds after its deadline, its `timeout` program has failed, and all processes in the
sandbox are killed."""
MAX_OUTPUT = 1 << 16
MAX_FILE = 64 << 20
CLOSE_S = 60.0
MAX_AT_ONCE = 256
DEAD_CODES = frozenset({125, 126, 127, 137, 255, -9})
"""Exit codes of a command that may mean that its sandbox has ended."""
KILLED_CODES, KILLED_LOOKS, LOOK_AGAIN_S = frozenset({137, -9}), 3, 0.1
"""Exit codes of a killed command; number of checks whether its sandbox is alive; seconds between two checks. On a busy
machine the first process of a killed namespace ended at most 5 ms after the commands in it."""
_LOOP = """trap 'exec sh -c "$LOOP"' EXIT; while :; do kill -CHLD $$; jobs; sleep 3600 & wait $!; done > /dev/null 2>&1"""
SLEEP = f'export LOOP={shlex.quote(_LOOP)}; exec sh -c "$LOOP"'
"""The first process of a sandbox: it reaps orphaned processes, and survives when all others are killed. A shell exits if it
cannot fork, which happens at the limit of processes; this one then restarts itself as the same process. The signal makes the
shell notice the processes that have ended, and `jobs` reaps them."""

Backend = Literal["bubblewrap", "podman", "docker", "apptainer", "e2b"]


class SandboxError(ToolUnavailableError):
    """A sandbox failed, not a command in it: the trajectory is dropped, and the run continues."""


class SandboxSetupError(SandboxError):
    """A sandbox could not be started, or its image could not be built."""


class SandboxGoneError(SandboxError):
    """A sandbox has ended by itself."""


class SandboxFileError(Exception):
    """A file cannot be read or written; the message comes from the sandbox's own tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """The options of an episode's sandbox."""

    backend: Backend = "bubblewrap"
    image: str | None = None
    """The name of an image or of e2b's template. apptainer also takes a .sif file; bubblewrap takes a folder with a root
    file system, but only as root. None is e2b's base template; with bubblewrap it is this machine's programs, read-only."""
    build: str | None = None
    """A folder with a Dockerfile to build the image from."""
    build_timeout_s: float = 600.0
    workdir: str | None = None
    """The working folder of commands, created if missing. None is the image's; for bubblewrap and apptainer it is /app."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every command."""
    user: str | None = None
    """The user that commands run as. None is the image's; for bubblewrap and apptainer it is root."""
    cpus: float | None = None
    """CPU limit in processors; None means no limit."""
    memory_mb: int | None = 2048
    processes: int | None = 512
    disk_mb: int | None = 2048
    """Limit on written data in MB. Only bubblewrap as root enforces it; written data then also counts towards
    `memory_mb`."""
    network: bool = False
    """Whether commands have network access."""
    start_timeout_s: float = 120.0
    """Seconds within which a sandbox must be ready, excluding the build of its image."""
    warm: int = 0
    """Number of sandboxes to start in advance for future episodes."""
    max_alive: int | None = None
    """Largest number of live sandboxes in this process, counted over all specs with the same limit; further ones wait.
    None means no limit."""
    run_args: tuple[str, ...] = ()
    """Further arguments of `podman run`, `docker run` or `apptainer instance start`, or of bwrap."""
    build_args: tuple[str, ...] = ()
    """Further arguments of `podman build` or `docker build`."""

    def limit_options(self, *, unit: str) -> list[str]:
        """Return the limits as options; `unit` means megabytes: m for podman and docker, M for apptainer."""
        limits = {"--memory": (self.memory_mb, unit), "--pids-limit": (self.processes, ""), "--cpus": (self.cpus, "")}
        return [one for option, (v, suffix) in limits.items() if v is not None for one in (option, f"{v}{suffix}")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The result of a command."""

    exit_code: int
    """Exit status; 124 after a timeout."""
    stdout: str
    stderr: str
    is_timeout: bool = False
    is_truncated: bool = False
    """Whether the middle of the output is left out."""
    duration_s: float = 0.0


class BaseSandbox:
    """A live sandbox. `close` must always be called; `async with` does."""

    default_workdir: ClassVar[str | None] = None

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.workdir = spec.workdir or self.default_workdir or "/"
        """The working folder of commands."""
        self.shell = "sh"
        """bash if the sandbox has it, else sh."""
        self._has_timeout = False
        self._threads = DaemonThreads(name="sandbox-exec", max_threads=MAX_AT_ONCE)
        self._closing: asyncio.Task[None] | None = None
        self._is_begun = False
        self.on_close = contextlib.ExitStack()
        """Closed after the sandbox has been removed."""

    # Implemented by back-ends.

    async def _prepare(self) -> None:
        """Build the image if necessary."""

    async def _begin(self) -> None:
        """Start the sandbox.

        Raises:
            SandboxSetupError: the sandbox cannot be started.
        """
        raise NotImplementedError

    def _command(self, argv: Sequence[str], *, cwd: str, env: Mapping[str, str], user: str | None) -> list[str]:
        """Return the command of this machine that runs `argv` in the sandbox."""
        raise NotImplementedError

    async def is_alive(self) -> bool:
        """Return whether the sandbox runs; never raises."""
        raise NotImplementedError

    async def pid(self) -> int:
        """Return the id, on this machine, of a process in the sandbox.

        Raises:
            SandboxError: the sandbox runs on another machine.
        """
        raise SandboxError(
            f"a {self.spec.backend} sandbox runs on another machine; set sandbox.network: true, host and reach_as"
        )

    async def _end(self) -> None:
        """Remove the sandbox and everything in it."""
        raise NotImplementedError

    async def snapshot(self) -> str:
        """Return an image of the sandbox's files, for the `image` of further sandboxes.

        Raises:
            SandboxError: the image cannot be created.
        """
        raise SandboxError(f"a {self.spec.backend} sandbox cannot be copied")

    # Common to all back-ends.

    async def start(self) -> None:
        """Start the sandbox within its deadline.

        Raises:
            SandboxSetupError: the sandbox did not start in time, or cannot run a command; it has been removed.
        """
        await self._prepare()
        has_own_workdir = self.spec.workdir is None and self.default_workdir is None  # the image sets it
        try:
            async with asyncio.timeout(self.spec.start_timeout_s):
                self._is_begun = True
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
            raise SandboxSetupError(f"the {self.spec.backend} sandbox cannot run a command: {last_lines(output)}")
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
            cwd: The command's folder, if not `workdir`.
            env: Variables in addition to the sandbox's.
            user: The user to run as; "root" always exists.
            timeout_s: Seconds after which the command is killed; this is a normal result.
            stdin: The whole standard input.
            max_bytes: Bytes to keep of stdout, and of stderr; the middle is left out.

        Raises:
            SandboxGoneError: the sandbox has ended.
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
        """Kill every process in the sandbox except the first."""
        await self._run(["sh", "-c", "kill -9 -1"], cwd="/", user="root", timeout_s=SLACK_S)

    async def read(self, path: str, *, max_bytes: int = MAX_FILE, user: str | None = None) -> bytes:
        """Return the content of a file; relative paths start at `workdir`.

        Raises:
            SandboxFileError: there is no such file, or it is longer than `max_bytes`.
        """
        argv = ["head", "-c", str(max_bytes + 1), "--", path]
        output = await self._checked(argv, user=user, max_bytes=2 * max_bytes + 2)
        if len(output) > max_bytes:
            raise SandboxFileError(f"{path}: longer than {max_bytes} bytes")
        return output

    async def write(self, path: str, data: bytes, *, user: str | None = None) -> None:
        """Write a file, creating missing folders; relative paths start at `workdir`.

        Raises:
            SandboxFileError: the file cannot be written.
        """
        await self._checked(
            ["sh", "-c", 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"', "sh", path], stdin=data, user=user
        )

    async def upload(self, folder: Path, target: str, *, leaves_out: Sequence[str] = ()) -> None:
        """Copy the content of a folder of this machine into a folder of the sandbox, which is created if missing.

        Raises:
            SandboxFileError: the files cannot be written.
        """
        data = await asyncio.to_thread(_packed, folder, leaves_out)
        script = 'mkdir -p -- "$1" && tar -x --no-same-owner -f - -C "$1"'
        await self._checked(["sh", "-c", script, "sh", target], stdin=data, user="root")

    async def download(self, source: str, folder: Path) -> None:
        """Copy the content of a folder of the sandbox into a folder of this machine.

        Raises:
            SandboxFileError: the folder cannot be read, is too large, or contains a link.
        """
        data = await self._checked(["tar", "-c", "-f", "-", "-C", source, "."], user="root", max_bytes=2 * MAX_FILE)
        await asyncio.to_thread(_unpack, data, folder)

    async def close(self) -> None:
        """Remove the sandbox. May be called more than once, and finishes even if the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # A sandbox that does not end in time is removed when this process ends; its slot of `max_alive` is released now.
        with contextlib.suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if self._is_begun:
                    await self._end()
        self._threads.close()
        self.on_close.close()

    async def _checked(
        self, argv: Sequence[str], *, stdin: bytes = b"", user: str | None = None, max_bytes: int = MAX_OUTPUT
    ) -> bytes:
        """Return the output of one of the sandbox's own tools.

        Raises:
            SandboxFileError: the tool failed, or a path contains a NUL character.
            SandboxGoneError: the sandbox is gone.
        """
        for argument in argv:
            if "\0" in argument:
                raise SandboxFileError(f"{argument!r}: a path cannot contain a NUL character")
        output = await self._run(argv, user=user, timeout_s=CLOSE_S, stdin=stdin, max_bytes=max_bytes)
        await self._check_alive(output)
        if output.exit_code != 0 or output.is_truncated:
            raise SandboxFileError(last_lines(output) if output.exit_code else "the data is too large")
        return output.stdout

    async def _check_alive(self, output: ProgramEnd) -> None:
        if self._closing is None and output.exit_code not in DEAD_CODES:
            return
        # When a sandbox is killed, its commands may end before its first process does.
        for look in range(KILLED_LOOKS if output.exit_code in KILLED_CODES else 1):
            if look:
                await asyncio.sleep(LOOK_AGAIN_S)
            if not await self.is_alive():
                raise SandboxGoneError(f"the {self.spec.backend} sandbox is gone: {last_lines(output)}")

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
        return await self._on_host(command, timeout_s=timeout_s, stdin=stdin, max_bytes=max_bytes, keeps_children=True)

    async def _on_host(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        max_bytes: int = MAX_OUTPUT,
        keeps_children: bool = False,
    ) -> ProgramEnd:
        """Run a program of this machine in a thread; cancelling the call kills the program.

        `keeps_children` is for programs whose children end with the sandbox: its commands, and the program that starts it.

        Raises:
            SandboxError: the program cannot be started.
        """
        stop = Stopper()
        try:
            output: ProgramEnd = await self._threads.run(
                run_bounded,
                command,
                timeout_s=timeout_s,
                stdin=stdin,
                max_bytes=max_bytes,
                stop=stop,
                keeps_children=keeps_children,
            )
        except asyncio.CancelledError:
            stop.set()
            raise
        except OSError as problem:
            raise SandboxError(f"{command[0]} cannot be started: {one_line(problem)}") from problem
        return output


def _packed(folder: Path, leaves_out: Sequence[str]) -> bytes:
    """Return a folder's content as a tar file."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            if path.name not in leaves_out:
                archive.add(path, arcname=path.name)
    return data.getvalue()


def _unpack(data: bytes, folder: Path) -> None:
    """Write the folders and plain files of a tar file; links are refused, because they may lead out of the folder."""
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
