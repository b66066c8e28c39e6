"""An asyncio loop whose clock jumps to the next timer: a thousand hours of waiting pass in seconds, the same everywhere.

Separate because it is about time alone. Everything that waits by the loop's clock (`asyncio.sleep`, `asyncio.timeout`,
`call_at`) runs unchanged on it. What waits for the outside world, such as a thread, waits in real time, and the clock stands
still meanwhile: a simulation that is to be the same on every machine starts none.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from polyturn.core.errors import LifecycleError

T = TypeVar("T")

_STUCK_S = 60.0
"""Seconds to wait for the outside world where no timer is set."""
_UNASKED = 32
"""Number of times that there may be work before the outside world is looked at."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that starts at time 0 and never sleeps."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._jumps.now


class _Jumps(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """A selector that moves the clock where others would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._num_unasked = 0
        """Number of times that the outside world was not looked at, one after another, because there was work."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0 and self._num_unasked < _UNASKED:
            self._num_unasked += 1
            return []
        self._num_unasked = 0
        if timeout is None:
            ready = super().select(_STUCK_S)
            if not ready:
                raise LifecycleError(
                    f"at virtual time {self.now:.3f} s nothing can happen any more and something waits; look for a "
                    "future that no code sets"
                )
            return ready
        ready = super().select(0)
        if not ready and timeout > 0:
            # Rounding must not leave the loop a hair before its timer, where it would ask again for ever.
            self.now += max(timeout, abs(self.now) * 1e-15)
        return ready


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a virtual clock to its end and return its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
