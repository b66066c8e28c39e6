"""WeightShifts: groups of parameters moved away from their values, each rank's part by that rank, and put back to the bit.

    shift(["layers.0.up_proj.weight", …], …, 0.01)     tensor = what it was + 0.01 x noise of the size of its values
    shift(["layers.0.up_proj.weight", …], …, 0)        tensor = what it was

A group is the parameters of one name in all layers. The noise is made anew each time, from the tensor's name and from where
in it a part lies, so that ranks which hold the same move it alike; only what a moved tensor was is kept meanwhile.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polyturn.engines.weight_transport import TensorKind
from polyturn.training.shards import Place


class WeightShifts:
    """Moves groups of one network's parameters."""

    def __init__(self) -> None:
        self._were: dict[tuple[str, Place], Tensor] = {}
        """The values of moved parts before."""

    def shift(self, names: Sequence[str], parts: Mapping[str, Mapping[Place, Tensor]], scale: float) -> None:
        """Move what is here of a group to `scale` times its noise from where it was; 0 puts it back.

        Args:
            names: The group.
            parts: From `Names.parts`.
            scale: How far.
        """
        for name in names:
            for origin, own in parts.get(name, {}).items():
                was = self._were.pop((name, origin), None)
                if was is not None:
                    own.copy_(was)  # from where it was, always: what is added and taken off again leaves rounding behind
                if scale:
                    self._were[name, origin] = was = own.clone() if was is None else was
                    own.add_(_noise(f"{name}{origin}", was), alpha=scale)


def groups_of(weights: Mapping[str, Tensor | TensorKind]) -> dict[str, list[str]]:
    """Return name with layer numbers as `*` -> names of the tensors of floating point."""
    groups: dict[str, list[str]] = {}
    for name, tensor in weights.items():
        if tensor.dtype.is_floating_point:
            groups.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), []).append(name)
    return groups


def _noise(seed: str, was: Tensor) -> Tensor:
    """Return noise of the size of the values that are here; of size one where they are all zero, as biases are."""
    # On the device, because a CPU takes seconds for each part of a large model. Ranks are on devices of one kind, which draw
    # and sum alike.
    generator = torch.Generator(was.device).manual_seed(zlib.crc32(seed.encode()))
    noise = torch.randn(was.shape, generator=generator, device=was.device, dtype=torch.float32).to(was)
    size = was.float().square().sum().div(max(1, was.numel())).sqrt().item()
    return noise * (size or 1.0)
