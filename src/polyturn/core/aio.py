"""Small helpers for asyncio that more than one package needs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_error() -> Iterator[None]:
    """Raise the first real error of an exception group instead of the group, which becomes its cause.

    A `TaskGroup` wraps what its tasks raise; callers of the library expect the error itself.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        raise _leaf(group) from group


def _leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(reversed(error.exceptions))
        else:
            leaves.append(error)
    real = [e for e in leaves if not isinstance(e, asyncio.CancelledError)]
    return (real or leaves)[0]
