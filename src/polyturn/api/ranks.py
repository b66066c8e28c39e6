"""The processes of one run on one machine: started, watched, and ended together.

    polyturn train run.yaml --nproc 4   ->   python -m polyturn train run.yaml --nproc 4     rank 0: this terminal
                                             the same, three times                           ranks 1 to 3: a log each

torchrun may start them instead, on several machines too: what a rank reads is torchrun's environment. A rank that dies ends
the run within seconds, with the last lines of its log; when the launcher dies, the leader saves and ends the run. Signals go
to the leader alone, which still needs the others for its last checkpoint.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from polyturn.core.errors import ConfigError, PolyturnError
from polyturn.infra.process import free_port

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""Seconds for the rest of a run to end by itself."""
_NUM_LINES = 20
_LAUNCHER = "POLYTURN_LAUNCHER"
"""The launcher's process id, for its ranks."""
_PR_SET_PDEATHSIG = 1


class RankPlace(NamedTuple):
    """Which of how many processes this one is."""

    rank: int
    size: int
    local: int
    """The rank among those on this machine: the number of its GPU."""


class RankError(PolyturnError, RuntimeError):
    """A process of the run died."""


def this_rank() -> RankPlace | None:
    """Return which rank this process is; None where no launcher said so.

    Raises:
        ConfigError: the launcher's environment makes no sense.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", rank))
    except ValueError:
        rank, size, local = 0, -1, 0
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if size > 1 and name not in os.environ]
    if missing or not 0 <= rank < size:
        wrong = f"and {missing[0]} is not set" if missing else "which are not a rank and a number of ranks"
        raise ConfigError(
            f"the environment has RANK={os.environ['RANK']} and WORLD_SIZE={os.environ['WORLD_SIZE']}, {wrong}; begin with "
            "torchrun --nproc-per-node 2 FILE, which sets all of them, or unset RANK for one process"
        )
    return RankPlace(rank, size, local)


def tell_start(name: str) -> None:
    """Say for all ranks that a run begins."""
    this = this_rank()
    if this is None or this.rank == 0:
        logger.info("%s: checking the configuration, then loading PyTorch and the model", name)


def launch(num_ranks: int) -> None:
    """Run this process's own command line in `num_ranks` processes, and return when all are done.

    Raises:
        ConfigError: this process has no command line that could be run again.
        RankError: one died; the message ends with the last lines of its log.
        SystemExit: the leader ended with another code than 0.
    """
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules or threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            f"train.distributed.ranks is {num_ranks}, and a notebook or a running event loop is one process; write the call "
            f"into a file and run `torchrun --nproc-per-node {num_ranks} FILE`, or stay here with ray='auto'"
        )
    logs = Path(tempfile.mkdtemp(prefix="polyturn-ranks-"))
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared[_LAUNCHER] = str(os.getpid())
    if num_ranks > 1:  # as torchrun does: ranks on one machine would each take all of its cores
        shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    ranks: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        ranks[0].send_signal(number)

    former = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(num_ranks):
            env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONUNBUFFERED": "1"}
            with (logs / f"rank-{rank}.log").open("wb") as log:
                output = {} if rank == 0 else {"stdout": log, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
                command = [sys.executable, *sys.orig_argv[1:]]
                ranks.append(subprocess.Popen(command, env=env, start_new_session=True, **output))  # type: ignore[call-overload]
        first = _first_to_fail(ranks)
        if first is None:
            shutil.rmtree(logs, ignore_errors=True)
            return
        _end(ranks)
        code = ranks[first].returncode
        if first == 0 and (code > 0 or received):
            raise SystemExit(code if code > 0 else 128 - code)
        raise RankError(_crash_report(first, code, logs / f"rank-{first}.log"))
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
        for number, handler in former.items():
            signal.signal(number, handler)


def _first_to_fail(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all are done, or one has failed, and return which; a follower that fails explains a leader that does."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed == [0]:  # the leader saw its peer go before this process did?
            time.sleep(0.3)
            codes = [process.poll() for process in ranks]
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            return max(failed, key=lambda rank: (codes[rank] == -signal.SIGKILL, rank > 0 and codes[0] is None))
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.1)


def end_with_launcher() -> None:
    """Let the leader take its last step and save when the process that launched it is gone, whatever that one died of.

    Only the leader asks for it, because it needs the others for its checkpoint; they end with the leader.
    """
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux") or not _may_set_signals():
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGTERM)

    # The kernel signals as each thread of the launcher ends, and a second SIGTERM would end this process unsaved.
    signal.signal(signal.SIGHUP, end)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != int(launcher):
        raise RankError("the process that launched this run is gone")


def keep_serving() -> None:
    """Leave signals to the leader, who needs this rank for its last checkpoint and then lets it end."""
    for number in (signal.SIGINT, signal.SIGTERM) if _may_set_signals() else ():
        signal.signal(number, signal.SIG_IGN)


def _may_set_signals() -> bool:
    """Return whether this is the main thread: in another one, as of `polyturn.steps`, signals are the program's."""
    return threading.current_thread() is threading.main_thread()


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask what is left to end, and end what does not."""
    deadline = time.monotonic() + GRACE_S
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    while any(p.poll() is None for p in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in ranks:
        if process.poll() is None:
            process.kill()
            process.wait()


def _crash_report(rank: int, code: int, log: Path) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    if rank == 0:
        return f"rank 0 {how}; what it said is above. Resume the run to go on from its latest checkpoint"
    log_tail = last_lines(log)
    return (
        f"rank {rank} {how}, and training cannot go on without its share of the model. Resume the run to go on from its "
        f"latest checkpoint. The last lines of its log, {log}:\n{log_tail or '  (nothing)'}"
    )


def last_lines(log: Path, *, count: int = _NUM_LINES) -> str:
    """Return the end of a log, indented."""
    lines = log.read_text(errors="replace").splitlines()[-count:]
    return "\n".join(f"  {line}" for line in lines)
