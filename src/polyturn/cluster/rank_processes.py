"""Trainer ranks as processes of this machine. The controller, which starts them, leads the run and is not a rank.

    controller   RankProcesses.call(command, a share for each rank)      samples in memory that both processes map
    rank         main: join the group of ranks, build a part, RankWorker.run(command, share), until the controller hangs up

The ranks sum gradients in a process group of `torch.distributed`.
"""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyturn.core.errors import PolyturnError, RankLostError
from polyturn.infra.array_socket import ArraySocket, Packed
from polyturn.infra.process import ManagedProcess, free_port
from polyturn.training.rank_group import RankReply, RankWorker, values_of

_MAIN = "from polyturn.cluster.rank_processes import main; main()"
_END_S = 10.0
"""Seconds that ranks may take to exit after `close`."""
_HUNG_UP_S = 10.0
"""Seconds that a rank may take to exit after it hung up."""
_SETTLE_S = 0.5
"""Seconds to wait for more ranks to exit, because the first rank that hangs up may not be the one that was killed."""

Build = Callable[[], RankWorker]
"""Joins the process group that environment variables describe, and builds a rank."""


class _Answer(NamedTuple):
    """A rank's answer to one command."""

    reply: RankReply
    log: list[tuple[str, int, str]]
    """Logger, level and message of each record since the last answer."""


class RankProcesses:
    """All trainer ranks of a run on this machine; implements `RankGroup`."""

    def __init__(self, build: Build, num_ranks: int, *, row_width: int) -> None:
        """Start a process for each rank; the first `call` waits until all are built.

        Args:
            build: Called first in each process, with RANK, LOCAL_RANK and WORLD_SIZE in its environment.
            num_ranks: Number of ranks.
            row_width: Number of consecutive ranks that see the same samples.

        Raises:
            TypeError, AttributeError, pickle.PicklingError: `build` contains an object that cannot be pickled.
        """
        path, packed = Packed.of(sys.path), Packed.of(build)
        self.num_ranks = num_ranks
        self.row_width = row_width
        self._lock = threading.Lock()
        """Allows one command at a time, because the thread that writes checkpoints also sends commands."""
        self._problem: str | None = None
        self._is_built = self._is_closed = False
        self.logs = Path(tempfile.mkdtemp(prefix="polyturn-ranks-"))
        """The folder with a log of each rank; `close` keeps it if a rank was lost."""
        self._processes: list[ManagedProcess] = []
        self._sockets: list[ArraySocket] = []
        shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if num_ranks > 1:  # otherwise each rank would use all cores
            shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        try:
            for rank in range(num_ranks):
                env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONUNBUFFERED": "1"}
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                self._sockets.append(ArraySocket(ours))
                with theirs:
                    command = [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno())]
                    own = ManagedProcess(command, env=env, pass_fds=(theirs.fileno(),), log=self._log_of(rank))
                    self._processes.append(own)
            self._send([path] * num_ranks)
            self._send([packed] * num_ranks)
        except BaseException:
            self.close()
            raise
        finally:
            path.close()
            packed.close()

    @property
    def pids(self) -> list[int]:
        """The process id of each rank, in the order of ranks."""
        return [process.pid for process in self._processes]

    def call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Let every rank run `command` on its share, and return the results in the order of ranks.

        Raises:
            RankLostError: a rank is gone.
            PolyturnError: a rank raised it.
        """
        with self._lock:
            if not self._is_built:
                values_of(self._answers())
                self._is_built = True
            if self._problem is not None:
                raise RankLostError(self._problem)
            distinct = {id(share): share for share in shares}  # ranks of a row have the same share, which is packed once
            packed = {key: Packed.of((command, share)) for key, share in distinct.items()}
            try:
                self._send([packed[id(share)] for share in shares])
            finally:
                for one in packed.values():
                    one.close()
            return values_of(self._answers())

    def lost(self) -> str | None:
        """Return the crash report of a rank that ended, even between two calls; None while all ranks live."""
        if self._problem is None and not self._is_closed:
            ended = next((rank for rank, process in enumerate(self._processes) if not process.is_alive), None)
            if ended is not None:
                self._lose(ended)
        return self._problem

    def close(self) -> None:
        """Let the ranks exit, and kill those that do not; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for connection in self._sockets:
            connection.close()
        deadline = time.monotonic() + (_END_S if self._problem is None else 0.0)
        for process in self._processes:
            process.wait(max(0.0, deadline - time.monotonic()))
            process.end()
            process.close()
        if self._problem is None:
            shutil.rmtree(self.logs, ignore_errors=True)

    def _log_of(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def _send(self, packed: Sequence[Packed]) -> None:
        for rank, (connection, one) in enumerate(zip(self._sockets, packed, strict=True)):
            try:
                connection.send(one)
            except OSError as problem:
                self._lose(rank)
                raise RankLostError(self._problem) from problem

    def _answers(self) -> list[RankReply]:
        """Collect the answer of every rank in order of arrival, so that a dead rank is noticed at once."""
        answers: dict[int, RankReply] = {}
        with selectors.DefaultSelector() as waiting:
            for rank, connection in enumerate(self._sockets):
                waiting.register(connection, selectors.EVENT_READ, rank)
            while len(answers) < self.num_ranks:
                for key, _ in waiting.select():
                    try:
                        answer: _Answer = self._sockets[key.data].receive()
                    except OSError as problem:
                        self._lose(key.data)
                        raise RankLostError(self._problem) from problem
                    answers[key.data] = answer.reply
                    waiting.unregister(key.fileobj)
                    for name, level, message in answer.log:
                        logging.getLogger(name).log(level, "%s", message)
        return [answers[rank] for rank in range(self.num_ranks)]

    def _lose(self, first: int) -> None:
        """Find the rank whose death caused `first` to hang up, and end the other ranks, which would wait forever."""
        self._processes[first].wait(_HUNG_UP_S)
        deadline = time.monotonic() + _SETTLE_S
        for process in self._processes:
            process.wait(max(0.0, deadline - time.monotonic()))
        codes = [process.returncode for process in self._processes]
        killed = next((rank for rank, code in enumerate(codes) if code == -signal.SIGKILL), first)
        if self._problem is None:
            self._problem = self._crash_report(killed, codes[killed])
        for process in self._processes:
            process.end()

    def _crash_report(self, rank: int, code: int | None) -> str:
        how = "hung up" if code is None else f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        tail = "\n".join(f"  {line}" for line in self._processes[rank].tail().splitlines())
        return (
            f"rank {rank} {how}, and training cannot go on without its share of the model. Resume the run to go on from "
            f"its latest checkpoint. The last lines of its log, {self._log_of(rank)}:\n{tail or '  (nothing)'}"
        )


class _Log(logging.Handler):
    """Collects log records for the controller: INFO and above from rank 0, warnings and above from the others."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.INFO if rank == 0 else logging.WARNING)
        self._prefix = f"rank {rank}: " if rank else ""
        self.records: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record; called from any thread."""
        self.records.append((record.name, record.levelno, self._prefix + self.format(record)))

    def taken(self) -> list[tuple[str, int, str]]:
        """Return the records since the last call."""
        records, self.records = self.records, []
        return records


def main() -> None:
    """Build a rank, and run the controller's commands until it hangs up."""
    connection = ArraySocket(socket.socket(fileno=int(sys.argv[1])))
    sys.path[:] = connection.receive()  # so that modules next to the program's file can be imported here too
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    log = _Log(int(os.environ["RANK"]))
    logging.getLogger("polyturn").addHandler(log)

    def answer(reply: RankReply) -> None:
        packed = Packed.of(_Answer(reply, log.taken()))
        connection.send(packed)
        packed.close()

    try:
        rank = connection.receive()()
    except PolyturnError as problem:
        answer(RankReply(error=problem))
        return
    answer(RankReply())
    while True:
        try:
            command, share = connection.receive()
        except OSError:  # the controller closed the group or has died
            break
        answer(rank.run(command, share))
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
