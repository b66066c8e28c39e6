"""WeightShifts: groups of parameters moved away from their values, each rank's part by that rank, and put back to the bit.

    shift("model.layers.*.mlp.up_proj.weight", 0.01)     tensor = what it was + 0.01 x noise of the size of its values
    shift("model.layers.*.mlp.up_proj.weight", 0)        tensor = what it was

A group is the parameters of one name in all layers. The noise is made anew each time, from the tensor's name and from where
in it a rank's part begins; only what a moved tensor was is kept meanwhile.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from polyturn.training.shards import local_part


class WeightShifts:
    """Moves groups of one network's parameters."""

    def __init__(self, live: Callable[[], Mapping[str, Tensor]]) -> None:
        """Move what `live` returns: name -> live tensor, of tied ones the first."""
        self._live = live
        self._were: dict[str, Tensor] = {}
        """What moved tensors were."""

    def shift(self, group: str, scale: float) -> None:
        """Move a group to `scale` times its noise from where it was; 0 puts it back."""
        live = self._live()
        with torch.no_grad():
            for name in groups_of(live)[group]:
                own = local_part(live[name])
                was = self._were.setdefault(name, own.clone())
                own.copy_(was)
                if scale:
                    own.add_(_noise(name, live[name], was), alpha=scale)
                else:
                    del self._were[name]


def groups_of(weights: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return name with layer numbers as `*` -> names of the tensors of floating point."""
    groups: dict[str, list[str]] = {}
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            groups.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), []).append(name)
    return groups


def _noise(name: str, tensor: Tensor, was: Tensor) -> Tensor:
    """Return noise of the size of the values that are here; of size one where they are all zero, as biases are."""
    start: tuple[int, ...] = ()
    if isinstance(tensor, DTensor):
        _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{start}".encode()))
    noise = torch.randn(was.shape, generator=generator, dtype=torch.float32).to(was)
    size = was.float().square().sum().div(max(1, was.numel())).sqrt().item()
    return noise * (size or 1.0)
