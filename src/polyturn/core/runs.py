"""Per-token arrays as runs of equal neighbours, which is how the arrays of a sample travel to the ranks that train it.

    weights [ 0 0 0 0 1 1 1 0 0 ]   ->   values [ 0 1 0 ], last [ 3 6 8 ]

Weights, turns, versions and most advantages change a few times in a conversation, and log-probabilities are 0 where nothing
was sampled: of about 24 bytes a token 4 to 6 are left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_MIN_TOKENS = 64
"""A shorter array is left as it is."""


class Runs(NamedTuple):
    """An array of numbers of 4 bytes."""

    values: NDArray[Any]
    """[R] the value of each run."""
    last: NDArray[np.int32]
    """[R] the index of its last token."""


def packed(value: Any) -> Any:
    """Return the runs of an array if they take less than half of its bytes, else `value`, whatever that is."""
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.itemsize != 4 or len(value) < _MIN_TOKENS:
        return value
    bits = value.view(np.int32)  # compared by its bits: -0.0 is not 0.0, and a NaN is itself
    (cuts,) = (bits[1:] != bits[:-1]).nonzero()
    if 4 * (len(cuts) + 1) > len(bits):
        return value
    last = np.empty(len(cuts) + 1, np.int32)
    last[:-1], last[-1] = cuts, len(bits) - 1
    return Runs(value[last], last)


def unpacked(value: Any) -> Any:
    """Return the array of which `packed` made runs, read-only; anything else as it is."""
    if not isinstance(value, Runs):
        return value
    array = np.repeat(value.values, np.diff(value.last, prepend=-1))
    array.flags.writeable = False
    return array
