"""The clock of the running event loop, moved by a test: a deadline passes when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

AN_HOUR_S = 3600.0


def skip_an_hour_once(condition: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """Let an hour pass for the running event loop as soon as `condition()` holds and the loop runs its next callback."""
    loop = asyncio.get_running_loop()
    real = loop.time
    patch.setattr(loop, "time", lambda: real() + (AN_HOUR_S if condition() else 0.0))
