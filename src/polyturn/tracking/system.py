"""The load of the machine while a run trains: processors, memory and GPUs, sampled in a thread beside the run.

    system/cpu_share 0.93   system/memory_share 0.41   system/process_gb 3.2   system/gpu0/busy_share 0.97

Linux says it in /proc; GPUs are asked through NVML, where its Python package (`nvidia-ml-py`) and a driver are there. What
a machine does not tell is left out. Processors and power are means over a step, memory is its peak.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)

EVERY_S = 2.0
"""Seconds between two looks; one costs less than a millisecond."""
_PEAKS = ("memory_share", "process_gb")
"""Of what the largest value of a step counts."""
Readings = dict[str, float]


class SystemSampler:
    """Looks at the machine from `__enter__` to `__exit__`."""

    def __init__(
        self, *, every_s: float = EVERY_S, proc: Path = Path("/proc"), nvml: Callable[[], Any] | None = None
    ) -> None:
        """Describe the machine.

        Args:
            every_s: Seconds between two looks.
            proc: Where Linux says how it is.
            nvml: Gives the module `pynvml`, started; by default the installed one.
        """
        self._every_s = every_s
        self._processors = _Processors(proc)
        self._proc = proc
        self._nvml = nvml or _installed_nvml
        self._gpus: _Gpus | None = None
        self._lock = threading.Lock()
        self._seen: dict[str, list[float]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="system-metrics", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over.set()

    def read(self) -> Readings:
        """Return the metrics since the last call; none of what was not looked at since."""
        with self._lock:
            seen, self._seen = self._seen, {}
        return {name: max(of) if name.endswith(_PEAKS) else sum(of) / len(of) for name, of in seen.items()}

    def look(self) -> None:
        """Add one reading of the machine; the sampler's thread does so every `every_s` seconds."""
        readings = self._processors.read() | _memory(self._proc) | ({} if self._gpus is None else self._gpus.read())
        with self._lock:
            for name, value in readings.items():
                self._seen.setdefault(f"system/{name}", []).append(value)

    def find_gpus(self) -> None:
        """Look for GPUs, whose numbers each later reading has."""
        try:
            self._gpus = _Gpus(self._nvml())
        except Exception as problem:  # no package, no driver, no permission: a run needs none of them
            logger.debug("GPUs are not looked at: %s", problem)

    def _watch(self) -> None:
        self.find_gpus()
        while True:
            self.look()
            if self._is_over.wait(self._every_s):
                return


class _Processors:
    """The share of the machine's processors that was busy between two calls, from the counters of /proc/stat."""

    def __init__(self, proc: Path) -> None:
        self._stat = proc / "stat"
        self._before: tuple[int, int] | None = None

    def read(self) -> Readings:
        try:
            user, nice, system, idle, wait, *rest = map(int, self._stat.read_text().split("\n", 1)[0].split()[1:9])
        except (OSError, ValueError):
            return {}  # no Linux
        now = (user + nice + system + sum(rest), idle + wait)
        before, self._before = self._before, now
        busy, free = (0, 0) if before is None else (now[0] - before[0], now[1] - before[1])
        return {"cpu_share": busy / (busy + free)} if busy + free > 0 else {}


def _memory(proc: Path) -> Readings:
    try:
        lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        kilobytes = {words[0]: int(words[1]) for words in lines if len(words) > 1}
        resident = next(line for line in (proc / "self/status").read_text().splitlines() if line.startswith("VmRSS"))
        share = 1 - kilobytes["MemAvailable:"] / kilobytes["MemTotal:"]
    except (OSError, ValueError, LookupError, StopIteration):
        return {}  # no Linux
    return {"memory_share": share, "process_gb": int(resident.split()[1]) * 1024 / 1e9}


class _Gpus:
    """The GPUs of the machine, through NVML."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]

    def read(self) -> Readings:
        readings: Readings = {}
        for number, handle in enumerate(self._handles):
            for name, ask in _OF_GPU.items():
                try:
                    readings[f"gpu{number}/{name}"] = ask(self._nvml, handle)
                except self._nvml.NVMLError as problem:  # a GPU that is shared out tells less
                    logger.debug("GPU %d does not tell %s: %s", number, name, problem)
        return readings


def _used(nvml: Any, handle: Any) -> float:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return float(memory.used / memory.total)


_OF_GPU: Mapping[str, Callable[[Any, Any], float]] = {
    "busy_share": lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
    "memory_share": _used,
    "power_w": lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
}


def _installed_nvml() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml
