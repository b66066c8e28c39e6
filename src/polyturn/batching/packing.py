"""Packing: rows end to end on one axis, without padding; a common prefix is stored once.

    rows      a b c d e          flat     a b c d e | x y | z          x y follows a b c, z follows a b c x
              a b c x y          index    row 0 = 0 1 2 3 4,  row 1 = 0 1 2 5 6,  row 2 = 0 1 2 5 7
              a b c x z          until    a b c: 8,  d e: 5,  x: 8,  y: 7,  z: 8

A token attends to itself and the earlier tokens of its row only. Rows that share prefixes are sorted by their tokens, so
that rows with a common prefix are neighbours. The prefix is written once, and the tokens of all rows that contain it attend
to it: token q attends to token k if k <= q < until[k]. The keys and values of a prefix are computed once and read by every
row that continues it; autograd adds up their gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyturn.core.arrays import Ids


class PackedRow(NamedTuple):
    """One row on the flat axis: the pieces that this row writes, and the pieces of its prefix, which earlier rows wrote."""

    own: tuple[int, int]
    """Indices [start, end) of the pieces that this row writes; empty if earlier rows contain all of its tokens."""
    context: tuple[int, ...]
    """Indices of the pieces of the prefix, from its beginning on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """The attention mask of a flat axis of N tokens, cut into pieces such that every row consists of whole pieces."""

    pieces: tuple[int, ...]
    """Number of tokens of each piece; they add up to N."""
    rows: tuple[PackedRow, ...]
    row_indices: tuple[NDArray[np.int64], ...]
    """For each row [T] the indices of its tokens on the flat axis."""
    until_N: NDArray[np.int64]
    """[N] token q attends to token k if k <= q < until[k]."""
    positions_N: NDArray[np.int64]
    """[N] index of each token in its row."""

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.until_N)


def common_prefix(a: Ids, b: Ids) -> int:
    """Return the length of the common prefix of two rows, in tokens."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def sorted_rows(rows: Sequence[Ids]) -> list[int]:
    """Return the indices of `rows` sorted by their tokens, so that rows with a common prefix are neighbours."""
    keys = [np.ascontiguousarray(row, dtype=">u4").tobytes() for row in rows]
    return sorted(range(len(rows)), key=keys.__getitem__)


def pack(rows: Sequence[Ids], *, shared: Sequence[int]) -> Packing:
    """Lay rows end to end.

    Args:
        rows: The token ids of each row, in the order in which they are laid.
        shared: For each row the length of the prefix that it shares with the previous row, in tokens.
    """
    row_indices: list[NDArray[np.int64]] = []
    ends: list[int] = []
    until_N = np.zeros(sum(len(row) for row in rows) - sum(shared), np.int64)
    positions_N = np.zeros_like(until_N)
    cuts = {0, len(until_N)}
    end = 0
    for row, taken in zip(rows, shared, strict=True):
        start, end = end, end + len(row) - taken
        before = row_indices[-1][:taken] if taken else np.zeros(0, np.int64)
        span = np.concatenate([before, np.arange(start, end)])
        until_N[span] = end  # also for the prefix, because this row's tokens attend to it
        positions_N[start:end] = np.arange(taken, len(row))
        cuts.update((start, end))
        if taken:
            # The prefix may consist of several stretches of the flat axis; cut at the beginning and end of each.
            jumps = np.flatnonzero(np.diff(before) != 1)
            cuts.update((before[jumps] + 1).tolist(), before[jumps + 1].tolist(), (int(before[0]), int(before[-1]) + 1))
        row_indices.append(span)
        ends.append(end)
    bounds = sorted(cuts)
    number = {bound: index for index, bound in enumerate(bounds)}
    starts = np.array(bounds[:-1], np.int64)
    packed = []
    for span, taken, end in zip(row_indices, shared, ends, strict=True):
        # A prefix consists of whole pieces, so a piece belongs to it if the piece's first token does.
        context = np.flatnonzero(np.isin(starts, span[:taken])) if taken else ()
        packed.append(PackedRow((number[end - (len(span) - taken)], number[end]), tuple(int(p) for p in context)))
    return Packing(
        pieces=tuple(b - a for a, b in itertools.pairwise(bounds)),
        rows=tuple(packed),
        row_indices=tuple(row_indices),
        until_N=until_N,
        positions_N=positions_N,
    )
