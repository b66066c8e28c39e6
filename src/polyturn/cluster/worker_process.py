"""Rollout workers as processes of this machine, so that Python code of tools, users and rewards can use several cores.

    controller                                          worker's process
    WorkerPool -> ProcessWorker.run(spec)   -------->   RolloutWorker.run
    embedded engine  <---------------------- generate, abort, end_session   CalledEngine
    EnginePool.on_change  --- PoolView ---->   FollowingPool  ---- HTTP ---->   servers (vLLM, SGLang)

One socket carries calls in both directions. An embedded engine, the order of its requests and its load stay in the
controller; workers send requests to servers directly (`engines/following.py`).
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
"""Seconds that a worker may take to exit before it is killed."""
_LOOK_S = 1.0
"""Seconds between two checks whether the controller lives."""

Build = Callable[[WorkerJournal, Engine | None], RolloutPool]
"""Makes a worker's pool from its journal, and the controller's engine or None."""


class ProcessWorker(RemoteWorker):
    """The controller's handle of a worker in a separate process."""

    def __init__(self, name: str, build: bytes, engine: Engine | None) -> None:
        """Store the arguments; the first call starts the process.

        Args:
            name: The display name.
            build: A pickled `Build`.
            engine: The controller's engine, which the worker's episodes use; None if the worker sends requests to servers.
        """
        super().__init__(name)
        self._build = build
        self._engine = engine
        self._process: ManagedProcess | None = None
        methods: dict[str, Callable[..., Any]] = {"log": _log}
        if engine is not None:
            methods |= {"generate": engine.generate, "abort": engine.abort, "end_session": engine.end_session}
        self._peer = Peer(methods, on_end=self._lost)
        self._starting = asyncio.Lock()
        self._is_up = False

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker; the first call starts the process."""
        async with self._starting:
            if not self._is_up:
                await self._start()
                self._is_up = True
        return await self._peer.call(method, *arguments)

    async def end(self) -> None:
        """End the process, with a grace period in which its plug-ins can release their resources."""
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
        await self._peer.call("boot", sys.path, self._build, None if self._engine is None else self._engine.capabilities)
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


class _LogToController(logging.Handler):
    """Forwards log records to the controller."""

    def __init__(self, controller: Peer) -> None:
        super().__init__(logging.INFO)
        self._controller = controller
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record; called from any thread."""
        message = self.format(record)
        self._loop.call_soon_threadsafe(self._controller.notify, "log", record.name, record.levelno, message)


def main() -> None:
    """Run episodes until the controller hangs up or dies."""
    controller = int(sys.argv[2])
    threading.Thread(target=_end_behind, args=(controller,), name="polyturn-controller", daemon=True).start()
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
    if os.getppid() != controller:
        _end_session()


def _end_behind(controller: int) -> None:
    """Kill this process and its children once the controller is dead, even if a tool blocks the event loop or a thread."""
    while os.getppid() == controller:
        time.sleep(_LOOK_S)
    time.sleep(_END_S)
    _end_session()


def _end_session() -> None:
    signal_session(os.getpid(), signal.SIGKILL)  # this process, and the processes that its tools started


async def _serve(connection: socket.socket) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    methods: dict[str, Callable[..., Any]] = {}

    def end() -> ConnectionError:
        ended.set()
        return ConnectionError("the process that leads the run is gone")

    controller = Peer(methods, on_end=end)

    async def boot(path: list[str], build: bytes, capabilities: EngineCapabilities | None) -> None:
        sys.path[:] = path  # so that modules next to the program's file can be imported here too
        make: Build = pickle.loads(build)
        engine = None if capabilities is None else CalledEngine(controller.call, capabilities)
        worker = RolloutWorker(lambda journal: make(journal, engine))
        methods.update(run=worker.run, follow=worker.follow, abort=worker.abort, posts=worker.posts)
        logging.getLogger("polyturn").addHandler(_LogToController(controller))

    methods["boot"] = boot
    await controller.connect(connection)
    await ended.wait()
