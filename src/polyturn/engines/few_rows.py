"""Linear layers for the few rows of a decoding step on a CPU.

    [B, N] = x [B, K] @ weight.T    MKL for B of 2 to 128: a fraction of the processor's speed
    [N, B] = weight @ x.T           the same numbers up to rounding, 1.3 to 3 times as fast, most for a large vocabulary

Measured with torch 2.13 on two cores with AVX2 (on one: 1 to 1.8 times); `benchmarks/few_rows.py` repeats it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MAX_ROWS = 128
"""Largest number of rows for which this layer multiplies from the left; with more, the usual product is as fast."""
MIN_WEIGHTS = 2**18
"""Number of weights of a layer from which on the gain exceeds the cost of transposing the result."""
FEWEST_ROWS, LARGE = 8, 2**20
"""With at most FEWEST_ROWS rows, only layers with at least LARGE weights gain; with one row no layer gains."""


class FewRowsLinear(nn.Linear):
    """A linear layer that multiplies from the left when its input has few rows."""

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., N] for [..., K]."""
        rows = input.numel() // self.in_features
        fewest = 1 if self.weight.numel() >= LARGE else FEWEST_ROWS
        if not fewest < rows <= MAX_ROWS:
            return super().forward(input)
        out = (self.weight @ input.reshape(rows, -1).t()).t().contiguous()  # later code reads rows
        if self.bias is not None:
            out += self.bias
        return out.view(*input.shape[:-1], -1)


def use_few_rows(module: nn.Module) -> None:
    """Replace the large float32 linear layers of a model on the CPU; its parameters keep their names and storage."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.numel() < MIN_WEIGHTS:
                continue
            if child.weight.device.type != "cpu" or child.weight.dtype != torch.float32:
                continue
            with torch.device("meta"):
                layer = FewRowsLinear(child.in_features, child.out_features, bias=child.bias is not None)
            layer.weight, layer.bias = child.weight, child.bias
            layer.train(child.training)
            setattr(parent, name, layer)
