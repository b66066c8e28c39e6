"""Groups of parameters are moved from where they were, alike on all ranks, and put back to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyturn.training.weight_shifts import WeightShifts


class Copies(TorchDispatchMode):
    """Counts the copies that are made of tensors."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def part(*, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=dtype).view(3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moved_parts_are_put_back_to_the_bit(dtype: torch.dtype) -> None:
    shifts, own = WeightShifts(), part(dtype=dtype)
    for scale in (0.01, 0.04):
        shifts.shift(["w"], {"w": {(0, 0): own}}, scale)
        moved = (own - part(dtype=dtype)).float().square().mean().sqrt()
        assert 0.5 * scale < moved < 2 * scale, "counted from where it was"
    for _ in range(2):
        shifts.shift(["w"], {"w": {(0, 0): own}}, 0)
        assert torch.equal(own, part(dtype=dtype))


def test_ranks_move_the_same_part_alike_and_others_otherwise() -> None:
    first, second, other = part(), part(), part()
    WeightShifts().shift(["w"], {"w": {(0, 0): first}}, 0.1)
    WeightShifts().shift(["w"], {"w": {(0, 0): second, (3, 0): other}}, 0.1)
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_part_is_copied_once_however_often_it_moves() -> None:
    shifts, own = WeightShifts(), part()
    with Copies() as copies:
        for scale in (0.1, 0.2, 0.4, 0):
            shifts.shift(["w"], {"w": {(0, 0): own}}, scale)
        shifts.shift(["w"], {"w": {(0, 0): own}}, 0)
    assert copies.num == 1
