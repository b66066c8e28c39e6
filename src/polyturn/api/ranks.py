"""Read the rank of this process from torchrun's environment.

torchrun --nproc-per-node 4 -m polyturn train run.yaml     rank 0 leads the run; ranks 1 to 3 follow
polyturn train run.yaml --nproc 4                          this process leads, and starts four ranks (`cluster`)
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import NamedTuple

from polyturn.core.errors import ConfigError

logger = logging.getLogger(__name__)


class ThisRank(NamedTuple):
    """The rank of this process, and the number of ranks."""

    rank: int
    size: int
    local: int
    """The rank among those on this machine, which is the index of its GPU."""


def this_rank() -> ThisRank | None:
    """Return the rank of this process; None without a launcher.

    Raises:
        ConfigError: the launcher's environment is invalid.
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
            f"the environment has RANK={os.environ['RANK']} and WORLD_SIZE={os.environ['WORLD_SIZE']}, {wrong}; start "
            "with torchrun --nproc-per-node 2 FILE, which sets all of them, or unset RANK for one process"
        )
    return ThisRank(rank, size, local)


def tell_start(name: str) -> None:
    """Log the start of a run, on the controller only."""
    this = this_rank()
    if this is None or this.rank == 0:
        logger.info("%s: checking the configuration, then loading PyTorch and the model", name)


def keep_serving() -> None:
    """Ignore SIGINT and SIGTERM on a follower: the controller needs this rank for the last checkpoint, and then ends it."""
    if threading.current_thread() is threading.main_thread():  # signal.signal raises in other threads (`polyturn.steps`)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
