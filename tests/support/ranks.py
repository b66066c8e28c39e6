"""Ranks of `torch.distributed` for tests: processes that are forked from one that has imported everything.

    found = results_of_ranks("support.fsdp_ranks:measure", 2, folder / "found.json")        what the ranks wrote there

The function is called on each rank, in a group of all of them, in the folder of the file, with the file and what else is
given; the first rank writes.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from polyturn.training.process_group import join
from support.forked import ONE_THREAD, Forked

RUNS = 3


def results_of_ranks(call: str, count: int, out: Path, *arguments: str) -> Any:
    """Call `module:function` on each of `count` ranks and return the JSON that is in `out` afterwards."""
    ranks = Forked(
        *(call, count, out, *arguments), cwd=out.parent, call="support.ranks:main", env={**os.environ, **ONE_THREAD}
    )
    try:
        assert ranks.wait(800) == 0, ranks.out + ranks.err
    finally:
        ranks.kill()
    return json.loads(out.read_text())


def bytes_of(field: str) -> int:
    """Return what the system says of this process: VmRSS, what it has in memory now, or VmHWM, the most it had."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def main() -> None:
    """Import the module of `sys.argv[1]`, fork the ranks, and wait for them; the first that fails ends all."""
    call, count, out, *arguments = sys.argv[1:]
    module, _, name = call.partition(":")
    function = getattr(importlib.import_module(module), name)
    store = f"{out}.store"
    torch.multiprocessing.start_processes(
        _rank, args=(function, int(count), store, Path(out), arguments), nprocs=int(count), start_method="fork"
    )


def _rank(rank: int, function: Any, count: int, store: str, out: Path, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if "cuda" in arguments else "gloo"
    limit = datetime.timedelta(seconds=300)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count, timeout=limit)
    function(out, *arguments)
    if dist.is_initialized():
        dist.destroy_process_group()


def meet() -> None:
    """Join the group of the environment and leave it, `RUNS` times; the rank `LATE` comes later than the other."""
    rank = int(os.environ["RANK"])
    for _ in range(RUNS):
        join(local_rank=rank)
        found = [None, None]
        dist.all_gather_object(found, rank)
        sys.stdout.write(f"{found}\n")
        dist.destroy_process_group()
        time.sleep(0.5 * (rank == int(os.environ["LATE"])))
