"""Wait until a file descriptor can be read, whatever its number.

`select.select` refuses numbers above 1023, which a run with hundreds of live sandboxes, servers or sessions reaches.
"""

from __future__ import annotations

import math
import select


def is_readable(fd: int, *, timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds; return whether data or the end of the stream can be read. Negative means no wait."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(math.ceil(max(0.0, timeout_s) * 1000)))
