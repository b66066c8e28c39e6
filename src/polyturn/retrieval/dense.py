"""Vectors of passages: the passages whose vectors point where the query's does, and how two rankings become one.

    vectors.npy   [passages, size] float32, each of length 1        score of a passage = its vector times the query's

Rankings are joined by reciprocal rank fusion (Cormack, Clarke and Buettcher 2009): 1 / (60 + rank), summed over rankings, so
that scores on different scales need not be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyturn.core.errors import DataError
from polyturn.retrieval.bm25 import best_of

FUSION_OFFSET = 60

_VECTORS = "vectors.npy"


def write_vectors(folder: Path, vectors: NDArray[np.float32]) -> None:
    """Write vectors, each brought to length 1."""
    np.save(folder / _VECTORS, unit_rows(vectors, what="vectors"), allow_pickle=False)


def read_matrix(path: Path) -> NDArray[np.float32]:
    """Return the matrix of a `.npy` file.

    Raises:
        DataError: there is no such file, or it is not a matrix of numbers.
    """
    try:
        matrix = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as problem:
        raise DataError(f"{path} cannot be read as a NumPy array: {problem}") from problem
    return as_matrix(matrix, what=str(path))


def as_matrix(values: object, *, what: str) -> NDArray[np.float32]:
    """Return values as a matrix of float32.

    Raises:
        DataError: they are not one row of numbers each.
    """
    try:
        matrix = np.asarray(values, np.float32)
    except (TypeError, ValueError) as problem:
        raise DataError(f"{what}: these are not vectors of one length ({problem})") from problem
    if matrix.ndim != 2 or not matrix.size:
        raise DataError(f"{what}: vectors are a matrix, a row for each text; this has the shape {matrix.shape}")
    return matrix


def unit_rows(vectors: NDArray[np.float32], *, what: str) -> NDArray[np.float32]:
    """Return the rows, each of length 1.

    Raises:
        DataError: a row is zero or not finite, so that it has no direction.
    """
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
    if len(bad):
        raise DataError(f"{what}: vector {bad[0]} is zero or not finite, so it has no direction")
    return np.asarray(vectors / lengths, np.float32)


class Vectors:
    """Scores passages for the vector of a query."""

    def __init__(self, folder: Path) -> None:
        self._vectors = np.load(folder / _VECTORS, mmap_mode="r", allow_pickle=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(passages, size)."""
        return self._vectors.shape[0], self._vectors.shape[1]

    def rank(self, vector: NDArray[np.float32], *, limit: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the numbers and scores of the best passages, best first."""
        scores = np.asarray(self._vectors @ vector, np.float32)
        best = best_of(scores, limit=limit)
        return best, scores[best]


def fuse(rankings: Sequence[NDArray[np.int64]], *, limit: int) -> list[tuple[int, float]]:
    """Return (number, score) of the best passages over several rankings, best first; of equals the earlier one."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking.tolist(), start=1):
            scores[number] = scores.get(number, 0.0) + 1.0 / (FUSION_OFFSET + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:limit]
