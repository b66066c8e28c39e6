"""RankGroup: the controller's interface to all ranks of a run. RankWorker: runs the controller's commands on one rank.

    controller   RankGroup.call(command, a share for each rank)  ->  RankWorker.run(command, share) on each rank  ->  replies

A command names a network of the rank (policy or critic) and a method of its backend. The ranks may be processes on this
machine (`cluster/rank_processes.py`), Ray actors (`cluster/clients.py`), or one in this process (`process_group.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from polyturn.batching.microbatch import LayoutSettings, plan
from polyturn.core.arrays import Floats
from polyturn.core.errors import PolyturnError
from polyturn.core.sample import TrainSample
from polyturn.training.model_backend import ModelBackend

Held = Mapping[str, Mapping[str, Tensor]]
"""Network -> name -> this rank's shard."""


class RankGroup(Protocol):
    """The controller's interface to all ranks of a run."""

    num_ranks: int
    row_width: int
    """Number of consecutive ranks that see the same samples and split layers or tokens."""

    def call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run `command` on every rank with its share, and return the results in the order of ranks.

        Raises:
            RankLostError: a rank is gone.
            PolyturnError: raised by a rank.
        """
        ...

    def lost(self) -> str | None:
        """Return the crash report of a rank that is known to be gone; None if no such rank is known. The call does not
        contact ranks."""
        ...

    def close(self) -> None:
        """End the ranks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReply:
    """The result of a command on one rank."""

    value: Any = None
    error: PolyturnError | None = None


class RankWorker:
    """Runs the controller's commands on one rank."""

    def __init__(self, make: Mapping[str, Callable[[Any, Held], ModelBackend]]) -> None:
        """Use `make`: network -> function from the controller's spec and this rank's current shards to a backend. It is
        called again when training follows a warm start."""
        self._make = dict(make)
        self._backends: dict[str, ModelBackend] = {}

    def run(self, command: str, share: tuple[Any, ...]) -> RankReply:
        """Run one command, `<network>.<method>`. A `PolyturnError` becomes the reply; any other exception ends the rank."""
        network, _, method = command.partition(".")
        try:
            if method == "make":
                models = {name: backend.held() for name, backend in self._backends.items()}
                if network in self._backends:  # keep only the previous backend's weights: there may be no memory for more
                    self._backends.pop(network).close()
                    gc.collect()
                (spec,) = share
                self._backends[network] = self._make[network](spec, models)
                return RankReply()
            function = getattr(self._backends[network], method)
            return RankReply(value=function(*share) if callable(function) else function)
        except PolyturnError as problem:
            return RankReply(error=problem)


def values_of(answers: Sequence[RankReply]) -> list[Any]:
    """Return the values of all replies, or raise the first error."""
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return [answer.value for answer in answers]


def assign(samples: Sequence[TrainSample], *, settings: LayoutSettings, num_shares: int) -> list[list[int]]:
    """Return the indices of each share's samples, in rising order. Micro-batches are planned over all samples and dealt out
    by cost.

    Samples of one micro-batch stay together, so that their common prefix is computed once, on one rank. Samples without a
    weighted token cost nothing and go to the first share.
    """
    ranks = plan(samples, settings=settings, num_ranks=num_shares).ranks
    shares = [{i for batch in batches if not batch.is_padding for i in batch.samples} for batches in ranks]
    shares[0] |= set(range(len(samples))).difference(*shares)
    return [sorted(share) for share in shares]


def put_back(rows: Sequence[Sequence[int]], rows_of_ranks: Sequence[Sequence[Floats]], count: int) -> list[Floats]:
    """Return the results of all rows in the order of the samples."""
    at = {i: value for row, values in zip(rows, rows_of_ranks, strict=True) for i, value in zip(row, values, strict=True)}
    return [at[i] for i in range(count)]
