"""The load of the machine is recorded with each step: processors, memory, and GPUs through NVML."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from polyturn.tracking.metric_docs import meaning
from polyturn.tracking.system import SystemSampler


class NvmlError(Exception):
    """The error that NVML raises."""


def two_gpus() -> SimpleNamespace:
    """NVML with two GPUs; the second one does not report its power, like a shared GPU."""

    def power(handle: int) -> int:
        if handle:
            raise NvmlError("Not Supported")
        return 350_000

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=90 + handle),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=40, total=80),
        nvmlDeviceGetPowerUsage=power,
    )


def machine(*, busy: tuple[float, ...], available: tuple[int, ...]) -> SimpleNamespace:
    """A machine with these readings of processors and memory; the first one of `busy` covers no time."""
    shares, free = iter(busy), iter(available)
    return SimpleNamespace(
        cpu_percent=lambda: next(shares),
        virtual_memory=lambda: SimpleNamespace(total=1000, available=next(free)),
        Process=lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=2_048_000_000)),
    )


def test_shares_are_means_of_a_step_and_memory_is_its_peak() -> None:
    host = machine(busy=(0.0, 90.0, 50.0), available=(100, 500))
    sampler = SystemSampler(machine=host, nvml=two_gpus)
    sampler.find_gpus()
    for _ in range(2):
        sampler.look()
    found = sampler.read()
    assert found == {
        "system/cpu_share": pytest.approx((0.9 + 0.5) / 2),
        "system/memory_share": 0.9,
        "system/process_gb": 2.048,
        "system/gpu0/busy_share": 0.9,
        "system/gpu0/memory_share": 0.5,
        "system/gpu0/power_w": 350.0,
        "system/gpu1/busy_share": 0.91,
        "system/gpu1/memory_share": 0.5,
    }
    assert all(meaning(name) for name in found) and sampler.read() == {}


def test_machine_without_gpus_gives_its_other_metrics() -> None:
    def no_driver() -> None:
        raise NvmlError("Driver Not Loaded")

    sampler = SystemSampler(machine=machine(busy=(0.0, 50.0), available=(100,)), nvml=no_driver)
    sampler.find_gpus()
    sampler.look()
    assert set(sampler.read()) == {"system/cpu_share", "system/memory_share", "system/process_gb"}


def test_sampler_looks_while_it_is_open_and_its_thread_ends() -> None:
    before = set(threading.enumerate())
    with SystemSampler(every_s=0.001) as sampler:
        (thread,) = set(threading.enumerate()) - before
        seen: dict[str, float] = {}
        while "system/process_gb" not in seen:
            seen |= sampler.read()
    thread.join()
    assert all(0 <= value <= 1 for name, value in seen.items() if name.endswith("_share"))
