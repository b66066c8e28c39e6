"""WeightShifts: add noise to groups of parameters, each rank to its part, and restore the exact values.

    shift(["layers.0.up_proj.weight", …], …, 0.01)     tensor = original + 0.01 x noise of the size of its values
    shift(["layers.0.up_proj.weight", …], …, 0)        tensor = original

A group contains the parameters of the same name in all layers. The noise is seeded by the tensor's name and the part's
origin, so that replicas get the same noise. Only the original values of shifted tensors are kept.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polyturn.engines.weights.stream import TensorKind
from polyturn.training.shards import Origin


class WeightShifts:
    """Shifts groups of one network's parameters."""

    def __init__(self) -> None:
        self._originals: dict[tuple[str, Origin], Tensor] = {}
        """Original values of the shifted parts."""

    def shift(self, names: Sequence[str], parts: Mapping[str, Mapping[Origin, Tensor]], scale: float) -> None:
        """Set this process's parts of a group to the original plus `scale` times noise; 0 restores the original.

        Args:
            names: Names of the group's parameters.
            parts: The result of `Names.parts`.
            scale: Factor on the noise.
        """
        for name in names:
            for origin, own in parts.get(name, {}).items():
                original = self._originals.pop((name, origin), None)
                if original is not None:
                    own.copy_(original)  # adding and subtracting noise would leave rounding errors
                if scale:
                    self._originals[name, origin] = original = own.clone() if original is None else original
                    own.add_(_noise(f"{name}{origin}", original), alpha=scale)


def groups_of(weights: Mapping[str, Tensor | TensorKind]) -> dict[str, list[str]]:
    """Return name with `*` for layer numbers -> names of the floating-point tensors."""
    groups: dict[str, list[str]] = {}
    for name, tensor in weights.items():
        if tensor.dtype.is_floating_point:
            groups.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), []).append(name)
    return groups


def _noise(seed: str, like: Tensor) -> Tensor:
    """Return noise of the size of the values, or of size one if all are zero, like biases."""
    # On the device, because a CPU takes seconds for each part of a large model. All ranks have the same kind of device, so
    # they draw the same noise.
    generator = torch.Generator(like.device).manual_seed(zlib.crc32(seed.encode()))
    noise = torch.randn(like.shape, generator=generator, device=like.device, dtype=torch.float32).to(like)
    size = like.float().square().sum().div(max(1, like.numel())).sqrt().item()
    return noise * (size or 1.0)
