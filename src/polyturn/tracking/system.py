"""Samples the machine's load during a run in a thread: processors, memory and GPUs.

    system/cpu_share 0.93   system/memory_share 0.41   system/process_gb 3.2   system/gpu0/busy_share 0.97

psutil reads processors and memory. NVML reads the GPUs if its Python package (`nvidia-ml-py`) and a driver are installed;
values that a GPU does not report are left out. Memory is the peak of a step; all other values are its means.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import psutil

logger = logging.getLogger(__name__)

EVERY_S = 2.0
"""Seconds between two samples; a sample takes less than a millisecond."""
_PEAKS = ("memory_share", "process_gb")
"""Metrics that report the largest value of a step instead of the mean."""
Readings = dict[str, float]


class SystemSampler:
    """Samples the machine from `__enter__` to `__exit__`."""

    def __init__(self, *, every_s: float = EVERY_S, machine: Any = psutil, nvml: Callable[[], Any] | None = None) -> None:
        """Create a sampler.

        Args:
            every_s: Seconds between two samples.
            machine: The module `psutil`, or an object with its functions.
            nvml: Returns the initialized module `pynvml`; by default the installed one.
        """
        self._every_s = every_s
        self._machine = machine
        self._process = machine.Process()
        machine.cpu_percent()  # the next call measures from here
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
        """Return the metrics that were sampled since the last call."""
        with self._lock:
            seen, self._seen = self._seen, {}
        return {name: max(of) if name.endswith(_PEAKS) else sum(of) / len(of) for name, of in seen.items()}

    def look(self) -> None:
        """Take one sample; the sampler's thread does this every `every_s` seconds."""
        readings = self._host() | ({} if self._gpus is None else self._gpus.read())
        with self._lock:
            for name, value in readings.items():
                self._seen.setdefault(f"system/{name}", []).append(value)

    def find_gpus(self) -> None:
        """Find the GPUs, which later samples include."""
        try:
            self._gpus = _Gpus(self._nvml())
        except Exception as problem:  # package, driver or permission may be missing; GPU metrics are optional
            logger.debug("GPUs are not sampled: %s", problem)

    def _host(self) -> Readings:
        memory = self._machine.virtual_memory()
        return {
            "cpu_share": self._machine.cpu_percent() / 100,
            "memory_share": 1 - memory.available / memory.total,
            "process_gb": self._process.memory_info().rss / 1e9,
        }

    def _watch(self) -> None:
        self.find_gpus()
        while True:
            self.look()
            if self._is_over.wait(self._every_s):
                return


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
                except self._nvml.NVMLError as problem:  # a partitioned GPU reports less
                    logger.debug("GPU %d does not report %s: %s", number, name, problem)
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
