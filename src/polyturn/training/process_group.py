"""The process group of a run's ranks, and a rank in the controller's process.

join()                  in a rank's own process or actor, whose starter (`cluster`) has set RANK, WORLD_SIZE, …
join(is_alone=True)     in the controller, for a backend that needs a process group even if there is one rank
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from polyturn.training.rank_group import RankWorker, values_of

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def join(*, is_alone: bool = False) -> torch.device:
    """Join the process group of the environment, or make one of this process alone, and return this rank's device."""
    store: dist.Store
    if is_alone:
        rank, size, local_rank, store = 0, 1, 0, dist.HashStore()
    else:
        rank, size, local_rank, port = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
        # Not by env://: below a torchrun of one process, rank 0 would look for torchrun's store instead of opening one.
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, size, is_master=rank == 0, timeout=_COLLECTIVE_TIMEOUT)
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        use_tensor_cores()
    dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT, store=store, rank=rank, world_size=size)
    return device


def use_tensor_cores() -> None:
    """Let float32 matrix products on a GPU round their inputs to TF32, which is about eight times faster."""
    torch.set_float32_matmul_precision("high")


class RankHere:
    """The only rank, in the controller's process; implements `RankGroup`."""

    num_ranks = row_width = 1

    def __init__(self, rank: RankWorker) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        """Allows one command at a time, because the thread that writes checkpoints also sends commands."""

    def call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run `command`, and return a list of its result.

        Raises:
            PolyturnError: the rank raised it.
        """
        with self._lock:
            return values_of([self._rank.run(command, share) for share in shares])

    def lost(self) -> None:
        """Return None, because this rank ends only with the controller."""

    def close(self) -> None:
        """Leave the process group; a second call does nothing."""
        if dist.is_initialized():
            dist.destroy_process_group()
