"""BatchError: what a batch of verl's forms raises, where verl asserts."""

from __future__ import annotations


class BatchError(ValueError, AssertionError):
    """A batch cannot be made or changed as asked; code that was written for verl catches an AssertionError."""


def check(is_right: bool, otherwise: str) -> None:
    """Raise a BatchError unless something holds."""
    if not is_right:
        raise BatchError(otherwise)
