"""The rank group of processes started by torchrun, or of a single process: rank 0 is the controller, the others follow it.

    controller   call(command, shares)  -- scatter -->  every rank runs it  -- gather -->  answers
    follower     follow(): wait for a command, run it, answer; until the controller closes

Commands use a separate process group on the CPU, without a timeout, because rollouts may take long. A process that dies
closes its connections, which wakes the others.
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
    """Join the process group of the environment, or make one of this process alone, and return this rank's device."""
    store, rank, size = (dist.HashStore(), 0, 1) if is_alone else _meeting()
    # With the same keys, a second run in this process would find the addresses of the first.
    store = dist.PrefixStore(f"run {next(_runs)}", store)
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


@functools.cache
def _meeting() -> tuple[dist.Store, int, int]:
    """Return the store where the ranks of the environment meet, this rank, and the number of ranks."""
    store, rank, size = next(dist.rendezvous("env://", timeout=_COLLECTIVE_TIMEOUT))
    return store, rank, size


class ProcessRankGroup:
    """The controller, which is a rank too."""

    def __init__(self, rank: RankWorker, *, row_width: int) -> None:
        """Lead the process group, while every other process calls `follow`."""
        self.num_ranks = dist.get_world_size()
        self.row_width = row_width
        self.is_elsewhere = False
        self._rank = rank
        self._control = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._lock = threading.Lock()
        """Serialises commands: the thread that writes checkpoints sends commands too."""
        self._lost: str | None = None
        self._is_closed = False
        self.last_word: Any = None
        """The value that `follow` returns in every follower once this group is closed."""

    def call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run `command` on every rank with its share, and return the results in the order of ranks.

        Raises:
            RankLostError: a rank is gone.
            PolyturnError: raised by a rank.
        """
        if self._lost is not None:
            raise RankLostError(self._lost)
        try:
            with self._lock:
                # The controller is a rank too, and computes its share before it gathers the answers.
                own = _scatter([(command, share) for share in shares], self._control)
                answer = self._rank.run(*own)
                answers = _gather(RankReply(), self._control)  # the controller's answer is in `own`
        except (RuntimeError, ConnectionError) as problem:
            if isinstance(problem, torch.OutOfMemoryError):  # a RuntimeError of this rank, not a lost connection
                raise
            # Permanent: in a group that lost a rank, commands and answers no longer match.
            self._lost = f"a rank ended during {command!r} ({_first_line(problem)}); see its log"
            raise RankLostError(self._lost) from problem
        assert answers is not None
        return values_of([answer, *answers[1:]])

    def lost(self) -> str | None:
        """Return the reason from the last command if a rank is gone; None otherwise."""
        return self._lost

    def close(self) -> None:
        """End the followers; a second call does nothing."""
        if not self._is_closed and self._lost is None:
            self._is_closed = True
            _scatter([(_CLOSE, self.last_word)] * self.num_ranks, self._control)
            dist.destroy_process_group()


def follow(rank: RankWorker) -> Any:
    """Run the controller's commands until it closes, and return its last message.

    Raises:
        RankLostError: the controller is gone.
    """
    control = dist.new_group(backend="gloo", timeout=_FOREVER)
    while True:
        try:
            command, share = _scatter(None, control)
        except (RuntimeError, ConnectionError) as problem:
            raise RankLostError(f"the controller is gone ({_first_line(problem)})") from problem
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
