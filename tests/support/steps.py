"""Counts what a call does, so that a test can say how its work grows without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def num_steps(work: Callable[[], Any]) -> int:
    """Return the number of calls and returns, of Python's and C's functions alike, that `work` makes in this thread.

    What a single C function does, such as a search with a regular expression, is one step however long it takes.
    """
    steps = 0

    def count(*event: Any) -> None:
        nonlocal steps
        steps += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return steps
