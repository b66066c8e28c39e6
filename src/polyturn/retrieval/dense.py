"""Ranks passages by the cosine similarity of their vectors to the vector of the query, and fuses rankings.

    vectors.npy   [passages, size] float32, unit rows        score of a passage = dot product with the query's vector

Rankings are combined by reciprocal rank fusion (Cormack, Clarke and Buettcher 2009): the sum of 1 / (60 + rank) over
rankings, so scores on different scales need not be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyturn.core.errors import DataError

FUSION_OFFSET = 60

_VECTORS = "vectors.npy"


def write_vectors(folder: Path, vectors: NDArray[np.float32]) -> None:
    """Normalize vectors to unit length and write them."""
    np.save(folder / _VECTORS, unit_rows(vectors, what="vectors"), allow_pickle=False)


def read_matrix(path: Path) -> NDArray[np.float32]:
    """Return the matrix of a `.npy` file.

    Raises:
        DataError: the file is missing, or does not contain a matrix of numbers.
    """
    try:
        matrix = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as problem:  # an empty file
        raise DataError(f"{path} cannot be read as a NumPy array: {problem}") from problem
    return as_matrix(matrix, what=str(path))


def as_matrix(values: object, *, what: str) -> NDArray[np.float32]:
    """Return values as a matrix of float32.

    Raises:
        DataError: the values are not a matrix of numbers.
    """
    try:
        matrix = np.asarray(values, np.float32)
    except (TypeError, ValueError) as problem:
        raise DataError(f"{what}: vectors must consist of numbers and have one length ({problem})") from problem
    if matrix.ndim != 2 or not matrix.size:
        raise DataError(f"{what}: vectors must be a matrix with a row per text; this has the shape {matrix.shape}")
    return matrix


def unit_rows(vectors: NDArray[np.float32], *, what: str) -> NDArray[np.float32]:
    """Return the rows normalized to unit length.

    Raises:
        DataError: a row is zero or not finite.
    """
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
    if len(bad):
        raise DataError(f"{what}: vector {bad[0]} is zero or not finite, so it has no direction")
    return np.asarray(vectors / lengths, np.float32)


def read_vectors(folder: Path) -> NDArray[np.float32]:
    """Return the vectors of a folder, memory-mapped."""
    vectors: NDArray[np.float32] = np.load(folder / _VECTORS, mmap_mode="r", allow_pickle=False)
    return vectors


def fuse(rankings: Sequence[NDArray[np.int64]], *, limit: int) -> list[tuple[int, float]]:
    """Return (passage number, score) of the best passages over several rankings, best first; ties by passage number."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking.tolist(), start=1):
            scores[number] = scores.get(number, 0.0) + 1.0 / (FUSION_OFFSET + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:limit]
