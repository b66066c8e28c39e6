"""The load of the machine while a run trains: processors, memory and GPUs, sampled in a thread beside the run.

    system/cpu_share 0.93   system/memory_share 0.41   system/process_gb 3.2   system/gpu0/busy_share 0.97

psutil reads processors and memory, NVML the GPUs where its Python package (`nvidia-ml-py`) and a driver are installed. A
number that a GPU does not report is left out. Processors and power are means over a step, memory is its peak.
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
"""Seconds between two looks; one costs less than a millisecond."""
_PEAKS = ("memory_share", "process_gb")
"""Of what the largest value of a step counts."""
Readings = dict[str, float]


class SystemSampler:
    """Looks at the machine from `__enter__` to `__exit__`."""

    def __init__(self, *, every_s: float = EVERY_S, machine: Any = psutil, nvml: Callable[[], Any] | None = None) -> None:
        """Describe the machine.

        Args:
            every_s: Seconds between two looks.
            machine: The module `psutil`, or an object with its functions.
            nvml: Gives the module `pynvml`, started; by default the installed one.
        """
        self._every_s = every_s
        self._machine = machine
        self._process = machine.Process()
        machine.cpu_percent()  # the next call counts from here
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
        readings = self._host() | ({} if self._gpus is None else self._gpus.read())
        with self._lock:
            for name, value in readings.items():
                self._seen.setdefault(f"system/{name}", []).append(value)

    def find_gpus(self) -> None:
        """Look for GPUs, whose numbers each later reading has."""
        try:
            self._gpus = _Gpus(self._nvml())
        except Exception as problem:  # no package, no driver, no permission: a run needs none of them
            logger.debug("GPUs are not looked at: %s", problem)

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
