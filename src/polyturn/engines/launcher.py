"""Start an inference server, wait until it answers, and stop exactly the started processes.

    server = await Server.start(LaunchSpec(command=("python", "-m", "some.server", "--port", "{port}")))
    server.url                    http://127.0.0.1:41873
    await server.stop()

A server runs in a separate session, so that stopping it reaches exactly the processes that it started. If the kernel
supports it, the server ends whenever this process dies. Shared memory left by killed processes is removed, and so is the
folder for the server's log and vLLM's sockets. If a server does not come up, the error contains the last lines of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polyturn.core.errors import EngineError, one_line
from polyturn.infra.http import BrokenOffError, JsonClient, LargeAnswerError
from polyturn.infra.process import ManagedProcess, free_port

logger = logging.getLogger(__name__)

_FOLDER = Path("/dev/shm")
"""Folder of shared memory."""
_MAX_TEMP_PATH = 107 - 37
"""Largest length of a server's temporary folder, in bytes: the system limits the path of a socket to 107, and vLLM names its
sockets by UUIDs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The command, environment and limits of a server's start."""

    command: tuple[str, ...]
    """The program and its arguments; `{host}` stands for the address to listen on, `{port}` for a free port."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""
    health: str = "/health"
    """Path that answers 200 once the server is ready."""
    ready_timeout_s: float = 300.0
    stop_timeout_s: float = 20.0
    """Seconds to wait for the server to end before killing it."""
    log: Path | None = None
    """File for its output; None uses a file in the server's temporary folder, which is removed on stop."""


class RunningServer(Protocol):
    """A started server, on this machine or on a node of a cluster."""

    url: str

    async def is_dead(self) -> bool:
        """Return whether its main process or its node has ended."""
        ...

    async def last_lines(self) -> str:
        """Return the end of its log; "" if the log cannot be read any more."""
        ...

    def record_memory(self) -> None:
        """Record its processes' shared memory, to remove it if they leave it behind. Call it while the server is healthy."""
        ...

    async def stop(self) -> None:
        """End it and every process that it started. Stopping twice is fine."""
        ...


StartServer = Callable[[LaunchSpec], Awaitable[RunningServer]]
"""Starts a server and returns when it is ready, or raises EngineError."""


class Server:
    """A server started by this process."""

    def __init__(
        self, spec: LaunchSpec, process: ManagedProcess, *, url: str, log: Path, folder: Path, memory: SessionMemory
    ) -> None:
        self.spec = spec
        self.url = url
        self.log = log
        self._folder = folder
        self._process = process
        self._memory = memory

    @classmethod
    async def start(cls, spec: LaunchSpec, *, host: str = "127.0.0.1") -> Server:
        """Start a server that listens on `host`, and return when it is ready.

        Raises:
            EngineError: the server cannot be started, ended early, or was not ready in time; the message ends with its last
                lines.
        """
        port = free_port(host)
        folder = _temporary_folder()
        log = spec.log or folder / "server.log"
        command = [part.replace("{host}", host).replace("{port}", str(port)) for part in spec.command]
        memory = SessionMemory()
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            # Not TMPDIR: compiled kernels lie there, and the next start would compile them again.
            environ = {"VLLM_RPC_BASE_PATH": str(folder), **os.environ, **spec.env}
            process = ManagedProcess(command, env=environ, log=log)
        except OSError as problem:
            shutil.rmtree(folder)
            raise EngineError(f"the server {spec.command[0]!r} cannot be started ({one_line(problem)})") from problem
        at = f"[{host}]" if ":" in host else host
        server = cls(spec, process, url=f"http://{at}:{port}", log=log, folder=folder, memory=memory)
        try:
            await server._wait_until_ready()
        except BaseException:
            await server.stop()
            raise
        return server

    @property
    def pid(self) -> int:
        """The id of the server's process and session."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the server's main process runs."""
        return self._process.is_alive

    async def is_dead(self) -> bool:
        """Return whether the server's main process has ended."""
        return not self.is_alive

    async def last_lines(self) -> str:
        """Return the end of the server's log."""
        return self.tail()

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of the server's log."""
        return self._process.tail(lines)

    def record_memory(self) -> None:
        """Record its processes' shared memory, to remove it if they leave it behind. Call it while the server is healthy."""
        self._memory.look(self._process.members())

    async def stop(self) -> None:
        """End the server and all processes of its session, and kill any that do not end in time. Stopping twice is fine."""
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Like `stop`, but synchronous: a process that is ending cannot start a thread."""
        self.record_memory()
        self._process.end(grace_s=self.spec.stop_timeout_s)
        self._process.close()
        if removed := self._memory.remove_unheld():
            logger.info("removed shared memory left by the server %d: %s", self.pid, ", ".join(removed))
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _wait_until_ready(self) -> None:
        client, deadline = JsonClient(timeout_s=5), time.monotonic() + self.spec.ready_timeout_s
        try:
            while time.monotonic() < deadline:
                if not self.is_alive:
                    raise EngineError(
                        f"the server {self.spec.command[0]!r} ended with status {self._process.returncode} before it was "
                        f"ready; its last lines:\n{self.tail()}"
                    )
                self.record_memory()
                with contextlib.suppress(BrokenOffError, TimeoutError, LargeAnswerError):
                    if (await client.send("GET", self.url + self.spec.health)).status == 200:
                        self.record_memory()
                        return
                await asyncio.sleep(0.2)
        finally:
            await client.close()
        raise EngineError(
            f"the server {self.spec.command[0]!r} was not ready after {self.spec.ready_timeout_s:.0f} s; raise "
            f"engine.launch.ready_timeout_s, or see its last lines:\n{self.tail()}"
        )


def _temporary_folder() -> Path:
    """Make a folder for a server's log and for vLLM's sockets, which a killed server leaves behind."""
    folder = tempfile.mkdtemp(prefix="polyturn-")
    if len(os.fsencode(folder)) > _MAX_TEMP_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="polyturn-", dir="/tmp")
    return Path(folder)


class SessionMemory:
    """Tracks a server's files in shared memory, to remove them if the server is killed.

    A file in /dev/shm outlives the processes that map it; a killed vLLM leaves hundreds of megabytes. The owner of a file
    can be determined only while its processes live. Files are identified by inode, because a semaphore is mapped under an
    earlier temporary name.

    A file is removed only if it appeared after this object was made, was held by a process of the server's session, and is
    held by no living process.
    """

    def __init__(self) -> None:
        """Ignore the files that already exist."""
        self._others = set(shared_files())
        self._own: set[int] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Record the files that the processes `pids` hold."""
        new = set(shared_files()) - self._others - self._own
        if new:
            self._own |= new & files_in_use(pids)

    def remove_unheld(self) -> list[str]:
        """Remove the recorded files that no living process holds; return their names."""
        left = {inode: path for inode, path in shared_files().items() if inode in self._own}
        if not left:
            return []
        in_use = files_in_use(int(name) for name in os.listdir("/proc") if name.isdigit())
        removed = []
        for inode, path in left.items():
            if inode not in in_use:
                path.unlink(missing_ok=True)
                removed.append(path.name)
        return sorted(removed)


def shared_files() -> dict[int, Path]:
    """Return inode -> file in shared memory; empty if the system has no such folder."""
    files = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(_FOLDER) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                files[entry.inode()] = Path(entry.path)
    return files


def files_in_use(pids: Iterable[int]) -> set[int]:
    """Return the inodes of the files in shared memory that processes map or have open."""
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            inodes.update(_mapped(pid))
        with contextlib.suppress(OSError):
            inodes.update(_open(pid))
    return inodes


def _mapped(pid: int) -> Iterator[int]:
    with Path(f"/proc/{pid}/maps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            fields = line.split(maxsplit=5)  # addresses, permissions, offset, device, inode, path
            if len(fields) == 6 and fields[5].startswith(f"{_FOLDER}/"):
                yield int(fields[4])


def _open(pid: int) -> Iterator[int]:
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(entry.path).startswith(f"{_FOLDER}/"):
                yield os.stat(entry.path).st_ino
