"""PassClock: measure the forward and backward passes of a step, without waiting for the device between them.

    with clock.lap("time/forward"):
        loss = ...
    clock.seconds()   ->  {"time/forward": 1.2}

On a GPU a lap is the time between two CUDA events, which is known once the device has passed the second. On a CPU it is wall
time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class PassClock:
    """Sums the seconds of laps by name."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._laps: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Time the block."""
        began = self._mark()
        yield
        self._laps[name].append((began, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each name; call it after the device has finished the last lap."""
        return {name: sum(self._between(*lap) for lap in laps) for name, laps in self._laps.items()}

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        if not self._is_cuda:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3
