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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from polyturn.training.rank_group import RankWorker, values_of
from support.forked import ONE_THREAD, Forked


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
    """Return the memory of this process in bytes: VmRSS, the current one, or VmHWM, the largest so far."""
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


class LeadingRank:
    """A rank group whose first rank is the controller too, while each other rank calls `follow`."""

    row_width = 1

    def __init__(self, rank: RankWorker) -> None:
        self.num_ranks = dist.get_world_size()
        self._rank = rank
        self._control = dist.new_group(backend="gloo")

    def call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run `command` on every rank with its share, and return the results in the order of ranks."""
        own = self._rank.run(*_share([(command, share) for share in shares], self._control))
        replies: list[Any] = [None] * self.num_ranks
        dist.gather_object(own, replies, dst=0, group=self._control)
        return values_of(replies)

    def lost(self) -> None:
        """Return None: the test fails if a rank is gone."""

    def close(self) -> None:
        """End the other ranks."""
        _share([None] * self.num_ranks, self._control)
        dist.destroy_process_group()


def follow(rank: RankWorker) -> None:
    """Run the commands of the leading rank until it closes the group."""
    control = dist.new_group(backend="gloo")
    while (command := _share(None, control)) is not None:
        dist.gather_object(rank.run(*command), dst=0, group=control)
    dist.destroy_process_group()


def _share(shares: list[Any] | None, group: dist.ProcessGroup) -> Any:
    own: list[Any] = [None]
    dist.scatter_object_list(own, shares, src=0, group=group)
    return own[0]
