"""The rank group of processes that torchrun started, or of this process alone: rank 0 leads, the others follow.

    leader     call(command, shares)  -- scatter -->  every rank runs it  -- gather -->  answers
    follower   follow(): wait for a command, run it, answer; until the leader closes

Commands travel over a group of their own on the CPU, which waits for as long as rollouts take; a process that dies closes
its connections, and that is what wakes the others.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from polyturn.core.errors import RankLostError
from polyturn.training.rank_group import RankReply, RankWorker, values_of

_CLOSE = "close"
_FOREVER = timedelta(days=30)
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
_runs = itertools.count()


def join(*, local_rank: int, is_alone: bool = False) -> torch.device:
    """Join the process group that the environment describes, or make one of this process, and return this rank's device."""
    store, rank, size = (dist.HashStore(), 0, 1) if is_alone else _meeting()
    # Under the same keys, a second run of this process would find the addresses of the first.
    store = dist.PrefixStore(f"run {next(_runs)}", store)
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        use_tensor_cores()
    dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT, store=store, rank=rank, world_size=size)
    return device


def use_tensor_cores() -> None:
    """Let float32 matrix products on a GPU round their inputs to TF32, which is about eight times faster there."""
    torch.set_float32_matmul_precision("high")


@functools.cache
def _meeting() -> tuple[dist.Store, int, int]:
    """Return the store where the ranks of the environment meet, this rank, and the number of ranks."""
    store, rank, size = next(dist.rendezvous("env://", timeout=_COLLECTIVE_TIMEOUT))
    return store, rank, size


class ProcessRankGroup:
    """The leader's side; it is a rank itself."""

    def __init__(self, rank: RankWorker, *, row_width: int) -> None:
        """Lead the process group; every process makes this or `follow`s, at the same time."""
        self.num_ranks = dist.get_world_size()
        self.row_width = row_width
        self.is_elsewhere = False
        self._rank = rank
        self._control = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._lock = threading.Lock()
        """One command at a time: a checkpoint is asked after from another thread than training's."""
        self._lost: str | None = None
        self._is_closed = False
        self.last_word: Any = None
        """The last message to the followers, when they may end."""

    def call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Let every rank run `command` on its share, and return the results in the order of ranks.

        Raises:
            RankLostError: a rank is gone.
            PolyturnError: what a rank raised.
        """
        if self._lost is not None:
            raise RankLostError(self._lost)
        try:
            with self._lock:
                # The leader is a rank too: its share is computed here, between the commands and the answers of the others.
                own = _scatter([(command, share) for share in shares], self._control)
                answer = self._rank.run(*own)
                answers = _gather(RankReply(), self._control)  # its own is here already
        except (RuntimeError, ConnectionError) as problem:
            if isinstance(problem, torch.OutOfMemoryError):  # a RuntimeError of this rank, and no lost connection
                raise
            # For good: commands and answers of a group that lost a rank no longer belong together.
            self._lost = f"a rank ended during {command!r} ({_first_line(problem)}); its log says why"
            raise RankLostError(self._lost) from problem
        assert answers is not None
        return values_of([answer, *answers[1:]])

    def lost(self) -> str | None:
        """The reason that the last command gave, if a rank was gone."""
        return self._lost

    def close(self) -> None:
        """Let the followers end; a second call does nothing."""
        if not self._is_closed and self._lost is None:
            self._is_closed = True
            _scatter([(_CLOSE, self.last_word)] * self.num_ranks, self._control)
            dist.destroy_process_group()


def follow(rank: RankWorker) -> Any:
    """Run what the leader says until it closes, and return its last word.

    Raises:
        RankLostError: the leader is gone.
    """
    control = dist.new_group(backend="gloo", timeout=_FOREVER)
    while True:
        try:
            command, share = _scatter(None, control)
        except (RuntimeError, ConnectionError) as problem:
            raise RankLostError(f"the leader is gone ({_first_line(problem)})") from problem
        if command == _CLOSE:
            dist.destroy_process_group()
            return share
        _gather(rank.run(command, share), control)


def _first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0][:200]


def _scatter(shares: Sequence[Any] | None, group: dist.ProcessGroup) -> Any:
    own: list[Any] = [None]
    dist.scatter_object_list(own, None if shares is None else list(shares), src=0, group=group)
    return own[0]


def _gather(answer: RankReply, group: dist.ProcessGroup) -> list[RankReply] | None:
    answers: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(answer, answers, dst=0, group=group)
    return answers
