"""Rollout workers as processes of this machine, so that the Python of tools, users and rewards has more than one core.

    leader                                              worker's process
    WorkerPool -> ProcessWorker.run(spec)   -------->   RolloutWorker.run
    the run's engine  <--------------------- generate, abort, end_session   CalledEngine

One socket carries both directions. The engine, its order and its load stay with the leader, whichever kind it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from polyturn.cluster.called_engine import CalledEngine
from polyturn.cluster.journal import WorkerJournal
from polyturn.cluster.worker import RolloutWorker
from polyturn.cluster.worker_pool import RemoteWorker, WorkerLostError
from polyturn.core.protocols import Engine, EngineCapabilities
from polyturn.infra.ipc import Peer
from polyturn.infra.process import ManagedProcess, signal_session
from polyturn.rollout.pool import RolloutPool

logger = logging.getLogger(__name__)

_MAIN = "from polyturn.cluster.worker_process import main; main()"
_END_S = 5.0
"""Seconds that a worker may take to end by itself."""
_LOOK_S = 1.0
"""Seconds between two looks whether the leader lives."""

Build = Callable[[WorkerJournal, Engine], RolloutPool]
"""Makes a worker's pool, over the engine that it asks."""


class ProcessWorker(RemoteWorker):
    """A worker in a process of its own, as its leader sees it."""

    def __init__(self, name: str, build: bytes, engine: Engine) -> None:
        """Take what it is; the process is started when it is first asked.

        Args:
            name: For people.
            build: A `Build`, pickled.
            engine: What its episodes ask.
        """
        super().__init__(name)
        self._build = build
        self._engine = engine
        self._process: ManagedProcess | None = None
        methods: dict[str, Callable[..., Any]] = {
            "generate": engine.generate,
            "abort": engine.abort,
            "end_session": engine.end_session,
            "log": _log,
        }
        self._peer = Peer(methods, on_end=self._lost)
        self._starting = asyncio.Lock()
        self._is_up = False

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method there; the first call starts the process."""
        async with self._starting:
            if not self._is_up:
                await self._start()
                self._is_up = True
        return await self._peer.call(method, *arguments)

    async def end(self) -> None:
        """End it: asked first, so that what its plug-ins started ends with it."""
        self._peer.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.end, grace_s=_END_S)
            self._process.close()

    async def _start(self) -> None:
        if self._process is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                command = [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno()), str(os.getpid())]
                self._process = ManagedProcess(command, pass_fds=(theirs.fileno(),))
            await self._peer.connect(ours)
        await self._peer.call("boot", sys.path, self._build, self._engine.capabilities)
        logger.info("%s: process %d", self.name, self._process.pid)

    def _lost(self) -> WorkerLostError:
        assert self._process is not None
        self._process.wait(1.0)
        tail = self._process.tail() or "(it wrote nothing)"
        status = self._process.returncode
        how = "hung up" if status is None else f"ended with status {status}"
        return WorkerLostError(f"{self.name} (process {self._process.pid}) {how}. The last lines of its log:\n{tail}")


async def _log(name: str, level: int, message: str) -> None:
    logging.getLogger(name).log(level, "%s", message)


class _LogToLeader(logging.Handler):
    """Lets what is logged here be logged where people look."""

    def __init__(self, leader: Peer) -> None:
        super().__init__(logging.INFO)
        self._leader = leader
        self._loop = asyncio.get_running_loop()
        self._saying: set[asyncio.Task[Any]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record, from whichever thread."""
        message = self.format(record)
        self._loop.call_soon_threadsafe(self._say, record.name, record.levelno, message)

    def _say(self, *what: Any) -> None:
        task = self._loop.create_task(self._leader.call("log", *what))
        self._saying.add(task)
        task.add_done_callback(self._saying.discard)


def main() -> None:
    """Run episodes until the leader is gone or says that it is over."""
    leader = int(sys.argv[2])
    threading.Thread(target=_end_behind, args=(leader,), name="polyturn-leader", daemon=True).start()
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
    if os.getppid() != leader:
        _end_session()


def _end_behind(leader: int) -> None:
    """End what the leader would have ended, had it not been killed itself: a tool may hold the event loop, or a thread that
    is waited for."""
    while os.getppid() == leader:
        time.sleep(_LOOK_S)
    time.sleep(_END_S)
    _end_session()


def _end_session() -> None:
    signal_session(os.getpid(), signal.SIGKILL)  # this process, and what its tools started


async def _serve(connection: socket.socket) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    methods: dict[str, Callable[..., Any]] = {}

    def end() -> ConnectionError:
        ended.set()
        return ConnectionError("the process that leads the run is gone")

    leader = Peer(methods, on_end=end)

    async def boot(path: list[str], build: bytes, capabilities: EngineCapabilities) -> None:
        sys.path[:] = path  # modules beside the program's own file are found here, too
        make: Build = pickle.loads(build)
        worker = RolloutWorker(lambda journal: make(journal, CalledEngine(leader.call, capabilities)))
        methods.update(run=worker.run, abort=worker.abort, posts=worker.posts)
        logging.getLogger("polyturn").addHandler(_LogToLeader(leader))

    methods["boot"] = boot
    await leader.connect(connection)
    await ended.wait()
