"""What the machine does is recorded with each step: Linux' counters, and GPUs through NVML where there are any."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyturn.tracking.metric_docs import meaning
from polyturn.tracking.system import SystemSampler


class NvmlError(Exception):
    """What NVML raises."""


def two_gpus() -> SimpleNamespace:
    """NVML of two GPUs, of which the second one tells no power, as one that is shared out."""

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


def machine(folder: Path, *, busy: int, idle: int, available: int = 250) -> Path:
    (folder / "self").mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n")
    (folder / "meminfo").write_text(f"MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n")
    (folder / "self/status").write_text("Name:\tpython\nVmRSS:\t2000000 kB\n")
    return folder


def test_shares_are_means_of_a_step_and_memory_is_its_peak(tmp_path: Path) -> None:
    sampler = SystemSampler(proc=machine(tmp_path, busy=100, idle=100), nvml=two_gpus)
    sampler.find_gpus()
    sampler.look()
    for busy, idle, available in ((190, 110, 100), (240, 160, 500)):
        machine(tmp_path, busy=busy, idle=idle, available=available)
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


def test_machine_without_counters_gives_no_metrics(tmp_path: Path) -> None:
    def no_driver() -> None:
        raise NvmlError("Driver Not Loaded")

    sampler = SystemSampler(proc=tmp_path / "missing", nvml=no_driver)
    sampler.find_gpus()
    sampler.look()
    assert sampler.read() == {}


def test_sampler_looks_while_it_is_open_and_its_thread_ends() -> None:
    before = set(threading.enumerate())
    with SystemSampler(every_s=0.001) as sampler:
        (thread,) = set(threading.enumerate()) - before
        seen: dict[str, float] = {}
        while "system/process_gb" not in seen and Path("/proc/meminfo").exists():
            seen |= sampler.read()
    thread.join()
    assert all(0 <= value <= 1 for name, value in seen.items() if name.endswith("_share"))
