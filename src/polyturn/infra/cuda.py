"""Whether this machine has a GPU that PyTorch can use, without importing PyTorch where there is no driver."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""Device files of NVIDIA's and AMD's drivers, and of either one's under WSL."""


def has_cuda() -> bool:
    """Return whether PyTorch can use a CUDA or ROCm GPU here."""
    if not any(driver.exists() for driver in DRIVERS) or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
