"""MicroBatchPlan: which samples go through the model in one forward pass, and on which rank.

    rows      sorted by length, padded on the right             [ a a a a ]   [ c c c c c c c ]
                                                                [ b b b . ]
    packed    end to end, without padding                       [ a a a a b b b c c c c c c c ]
    shared    packed, and common prefixes only once             [ a a a a b c c c c ]    (`packing.py`)

A plan consists of numbers only: the controller makes it for all ranks, and each rank lays out its share. Every rank gets the
same number of micro-batches, because collectives inside the model need all ranks. If a rank would have fewer than the
others, it gets further ones that contain the shortest sample, with weight 0. Gradients are sums over the global batch, so
the plan does not change them (I7).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyturn.batching.packing import common_prefix, sorted_rows
from polyturn.core.arrays import Ids
from polyturn.core.errors import ConfigError
from polyturn.core.sample import TrainSample

Kind = Literal["rows", "packed", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSettings:
    """The size of a micro-batch, and how samples lie in it."""

    max_tokens_per_batch: int = 4096
    """Largest number of tokens in one forward pass, padding included. A longer sample is a micro-batch by itself."""
    max_targets_per_batch: int | None = None
    """Largest number of targets in a micro-batch; None means no bound. Memory does not need a bound, because logits are
    computed in chunks."""
    max_padding_per_batch: int | None = None
    """Largest number of padding tokens in a micro-batch of rows; None takes a sixteenth of `max_tokens_per_batch`. With more
    padding than that, a further forward pass costs less time than the padding."""
    packed: bool = False
    """Lay samples end to end instead of in rows. Samples that show media always lie in rows."""
    shared_prefix: bool = False
    """Compute common prefixes only once, if that saves at least the share `min_saving` of all tokens."""
    min_saving: float = 0.15
    """Smallest share of tokens that must be saved. If sharing saves less, attention over many short pieces costs more time
    than the sharing saves."""
    min_shared: int = 16
    """Shortest common prefix, in tokens, that is shared."""

    def __post_init__(self) -> None:
        if self.max_tokens_per_batch < 1:
            raise ConfigError(f"max_tokens_per_batch is {self.max_tokens_per_batch}; it must be at least 1")
        if self.max_targets_per_batch is not None and self.max_targets_per_batch < 1:
            raise ConfigError(f"max_targets_per_batch is {self.max_targets_per_batch}; it must be at least 1, or None")
        if not 0 <= self.min_saving <= 1 or self.min_shared < 1:
            raise ConfigError(
                f"min_saving is {self.min_saving} and min_shared is {self.min_shared}; the first must be a share, the "
                "second at least 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """One micro-batch of a plan."""

    samples: tuple[int, ...]
    """Indices of its samples in the list passed to `plan`, in the order of their rows."""
    shared: tuple[int, ...] = ()
    """For each sample, the number of tokens that it shares with the previous one (kind "shared")."""
    cost: int
    """Number of tokens that its forward pass computes, padding included."""
    is_padding: bool = False
    """True if it only evens out the ranks' numbers of forward passes: its targets have weight 0, and metrics skip them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    """All micro-batches of one optimizer step."""

    kind: Kind
    ranks: tuple[tuple[PlannedBatch, ...], ...]
    """The micro-batches of each rank; all ranks have equally many."""


def input_lengths(samples: Sequence[TrainSample]) -> list[int]:
    """Return for each sample the number of tokens that the model reads: all before the last token that enters a loss."""
    return [int(tokens[-1]) if len(tokens := predicted(sample)) else 0 for sample in samples]


def predicted(sample: TrainSample) -> NDArray[np.int64]:
    """Return the indices of the tokens that enter a loss: tokens with a weight, and observations if a loss uses them."""
    is_read = sample.loss_weights != 0
    return np.flatnonzero(is_read if sample.observed is None else is_read | (sample.observed != 0))


def plan(samples: Sequence[TrainSample], *, settings: LayoutSettings, num_ranks: int = 1) -> MicroBatchPlan:
    """Plan the micro-batches of one optimizer step.

    Args:
        samples: The samples of the step, for all ranks. A sample is left out if none of its tokens enters a loss.
        settings: The size of a micro-batch and how samples lie in it.
        num_ranks: Number of ranks. Rank r lays out its share with `layout(samples, coefs=…, settings=…,
            batches=plan.ranks[r])`.

    Raises:
        ConfigError: `num_ranks` is below 1.
    """
    if num_ranks < 1:
        raise ConfigError(f"num_ranks is {num_ranks}; it must be at least 1")
    lengths = input_lengths(samples)
    counts = [len(predicted(s)) for s in samples]
    is_text = not any(s.media for s in samples)
    kind: Kind = "packed" if settings.packed and is_text else "rows"
    batches: list[PlannedBatch] = []
    if settings.shared_prefix and is_text:
        rows = [s.token_ids[:n] for s, n in zip(samples, lengths, strict=True)]
        order = [i for i in sorted_rows(rows) if lengths[i]]  # rows with a common prefix are neighbours
        # Cut first, then decide whether to share: only rows of the same micro-batch can share a prefix, so the number of
        # saved tokens depends on the cut.
        shared = _common(rows, order, settings.min_shared, [s.routed_experts for s in samples])
        batches = _cut_packed(lengths, counts, order, shared, settings)
        if sum(sum(b.shared) for b in batches) >= settings.min_saving * max(1, sum(lengths)):
            kind = "shared"
    if kind == "packed":
        order = [i for i, length in enumerate(lengths) if length]
        batches = _cut_packed(lengths, counts, order, np.zeros(len(order), np.int64), settings)
    elif kind == "rows":
        batches = _cut_rows(lengths, counts, settings)
    batches = _enough(batches, lengths, num_ranks)
    return MicroBatchPlan(kind=kind, ranks=_spread(batches, lengths, num_ranks))


def _common(rows: Sequence[Ids], order: Sequence[int], min_shared: int, routes: Sequence[Any | None]) -> NDArray[np.int64]:
    """Return for each row in `order` the length of the prefix that it shares with the previous row; 0 below `min_shared`.

    Equal tokens that the engine sent to different experts do not count as equal, because replaying the routes computes them
    differently. This happens if rounding in the engine changes the choice of experts.
    """
    common = [0]
    for a, b in itertools.pairwise(order):
        count = common_prefix(rows[a], rows[b])
        one, other = routes[a], routes[b]
        if (one is None) != (other is None):
            count = 0
        elif one is not None and other is not None:
            differ = np.flatnonzero((one[:count] != other[:count]).any(axis=(1, 2)))
            count = int(differ[0]) if len(differ) else count
        common.append(count)
    return np.array([n if n >= min_shared else 0 for n in common[: len(order)]], np.int64)


def _cut_packed(
    lengths: Sequence[int],
    counts: Sequence[int],
    order: Sequence[int],
    shared: NDArray[np.int64],
    settings: LayoutSettings,
) -> list[PlannedBatch]:
    """Cut the rows in `order` into micro-batches: start a new one if the tokens or targets would exceed their bound."""
    max_targets = settings.max_targets_per_batch or sum(counts)
    batches: list[PlannedBatch] = []
    taken: list[tuple[int, int]] = []
    tokens = targets = 0

    def close() -> None:
        if taken:
            ids, common = zip(*taken, strict=True)
            batches.append(PlannedBatch(samples=ids, shared=common, cost=tokens))

    for i, common in zip(order, shared.tolist(), strict=True):
        own = lengths[i] - common
        if taken and (tokens + own > settings.max_tokens_per_batch or targets + counts[i] > max_targets):
            close()
            taken, tokens, targets = [], 0, 0
        if not taken:  # the first row of a micro-batch shares nothing
            own, common = lengths[i], 0
        taken.append((i, common))
        tokens, targets = tokens + own, targets + counts[i]
    close()
    return batches


def _cut_rows(lengths: Sequence[int], num_targets: Sequence[int], settings: LayoutSettings) -> list[PlannedBatch]:
    """Cut the samples into micro-batches of similar length, shortest first."""
    max_targets = settings.max_targets_per_batch or sum(num_targets)
    max_padding = settings.max_padding_per_batch
    if max_padding is None:
        max_padding = settings.max_tokens_per_batch // 16
    batches: list[list[int]] = []
    targets = tokens = 0
    # Lengths rise, so the row that is added is always the longest and sets the width of the micro-batch.
    for i in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: lengths[i]):
        padded = (len(batches[-1]) + 1) * lengths[i] if batches else 0
        is_full = (
            padded > settings.max_tokens_per_batch
            or padded - tokens - lengths[i] > max_padding
            or targets + num_targets[i] > max_targets
        )
        if not batches or is_full:
            batches.append([])
            targets = tokens = 0
        batches[-1].append(i)
        targets += num_targets[i]
        tokens += lengths[i]
    return [PlannedBatch(samples=tuple(rows), cost=len(rows) * lengths[rows[-1]]) for rows in batches]


def _enough(batches: list[PlannedBatch], lengths: Sequence[int], num_ranks: int) -> list[PlannedBatch]:
    """Halve the costliest micro-batches until their number is a multiple of `num_ranks`, or none can be halved."""
    batches = list(batches)
    # Halving is better than adding micro-batches of weight 0: these cost a forward pass and contribute nothing.
    while len(batches) % num_ranks:
        halvable = [b for b in batches if len(b.samples) > 1]
        if not halvable:
            break
        batch = max(halvable, key=lambda b: b.cost)
        where = batches.index(batch)
        middle = len(batch.samples) // 2
        batches[where : where + 1] = [_part(batch, slice(0, middle), lengths), _part(batch, slice(middle, None), lengths)]
    return batches


def _part(batch: PlannedBatch, which: slice, lengths: Sequence[int]) -> PlannedBatch:
    samples = batch.samples[which]
    if not batch.shared:
        return PlannedBatch(samples=samples, cost=len(samples) * max(lengths[i] for i in samples))
    shared = (0, *batch.shared[which][1:])  # the first row of the second half shares nothing
    return PlannedBatch(samples=samples, shared=shared, cost=sum(lengths[i] for i in samples) - sum(shared))


def _spread(batches: Sequence[PlannedBatch], lengths: Sequence[int], num_ranks: int) -> tuple[tuple[PlannedBatch, ...], ...]:
    """Give each micro-batch, costliest first, to the rank that has the lowest cost so far and is not full."""
    if num_ranks == 1 or not batches:
        return (tuple(batches), *((),) * (num_ranks - 1))
    # All ranks get the same number, because a rank with one more would wait forever in a collective.
    room = -(-len(batches) // num_ranks)
    shares: list[list[PlannedBatch]] = [[] for _ in range(num_ranks)]
    costs = [0] * num_ranks
    for batch in sorted(batches, key=lambda b: -b.cost):
        open_ranks = [r for r in range(num_ranks) if len(shares[r]) < room]
        rank = min(open_ranks, key=lambda r: (costs[r], r))
        shares[rank].append(batch)
        costs[rank] += batch.cost
    shortest = min((i for i, length in enumerate(lengths) if length), key=lambda i: lengths[i])
    is_packed = bool(batches[0].shared)
    padding = PlannedBatch(samples=(shortest,), shared=(0,) if is_packed else (), cost=lengths[shortest], is_padding=True)
    return tuple((*share, *(padding,) * (room - len(share))) for share in shares)
