"""swift.utils: small helpers that plug-ins import."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from polyturn.serving.rollout_protocol import remove_response

__all__ = ["get_logger", "remove_response", "to_device"]


def get_logger(*args: Any, **kwargs: Any) -> logging.Logger:
    """Return the logger of plug-ins."""
    return logging.getLogger("polyturn.plugins")


def to_device(data: Any, device: Any, non_blocking: bool = False) -> Any:
    """Return data with all of its tensors moved to a device."""
    import torch

    if isinstance(data, torch.Tensor):
        return data.to(device=device, non_blocking=non_blocking)
    if isinstance(data, Mapping):
        return type(data)((k, to_device(v, device, non_blocking)) for k, v in data.items())  # type: ignore[call-arg]
    if isinstance(data, tuple | list):
        return type(data)(to_device(v, device, non_blocking) for v in data)
    return data
