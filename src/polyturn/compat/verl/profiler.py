"""verl.utils.profiler: `simple_timer`, with which agent loops measure durations."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from polyturn.compat.not_offered import __getattr__  # noqa: F401  (raises for names that are not offered)


@contextlib.contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds of the block to `timing_raw[name]`."""
    began = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - began
