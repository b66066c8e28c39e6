"""Float32 matrix products on a CPU by oneDNN, as linear layers with a gradient.

    model      the large nn.Linear of a model become OneDnnLinear: the same parameters, under the same names
    product    x @ weight.T by oneDNN for float32 on a CPU, by torch elsewhere

torch multiplies float32 matrices with MKL, which uses only half of the vector width of AMD's AVX-512 processors. There, with
torch 2.13 and two threads, oneDNN takes 0.4 to 0.6 of MKL's time for the forward and the backward pass, and for the few rows
of a decoding step. On processors with AVX2 alone, both are about equally fast in training, and oneDNN is faster in decoding
(`benchmarks/onednn.py`). The results differ by rounding.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MIN_WEIGHTS = 2**16
"""Number of weights of a layer from which on oneDNN's gain exceeds the cost of the call."""
FEW_ROWS = 64
"""Largest number of rows of x for which the product is computed as (weight @ x.T).T. oneDNN copies the right factor into a
layout of its own, and with few rows that copy of the weight takes as long as the product."""

_CACHES = dict.fromkeys(("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "256")
"""Environment variables with the sizes of two caches, of torch's ideep and of oneDNN. Both keep generated code: half a
megabyte for each layer and each number of rows. Their default, 1024, takes one to two gigabytes of a run whose
micro-batches all differ in length; to generate code again takes less than a millisecond."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, without a gradient.

    Args:
        x: [M, K], with any strides.
        weight: [N, K], with any strides.
        bias: [N]

    Returns:
        [M, N], contiguous.
    """
    if not _applies(x, weight):
        return functional.linear(x, weight, bias)
    if len(x) > FEW_ROWS or len(x) > len(weight):
        return _multiply(x, weight, bias)
    out = _multiply(weight, x, None).t().contiguous()
    return out if bias is None else out.add_(bias)


class OneDnnLinear(nn.Linear):
    """A linear layer that multiplies with oneDNN where it can, else like `nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., N] for [..., K]."""
        if not _applies(input, self.weight):
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        out: Tensor = _Product.apply(rows, self.weight, self.bias)
        return out.view(*input.shape[:-1], self.out_features)


def use_onednn(module: nn.Module) -> None:
    """Let the large float32 linear layers of a model on the CPU multiply with oneDNN; its parameters stay as they are."""
    if not _is_available():
        return
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.weight.numel() >= MIN_WEIGHTS and _is_float32_on_cpu(layer.weight):
            layer.__class__ = OneDnnLinear


def use_torch(module: nn.Module) -> None:
    """Undo `use_onednn`: oneDNN's rounding depends on the number of rows."""
    for layer in module.modules():
        if type(layer) is OneDnnLinear:
            layer.__class__ = nn.Linear  # type: ignore[assignment]  # the class differs only in `forward`


@functools.cache
def _bound_caches() -> None:
    for name, size in _CACHES.items():
        os.environ.setdefault(name, size)  # read at the first product


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _bound_caches()
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        # A frozen layer, as beside an adapter, must not keep its input until the backward pass.
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(grad, weight.t()) if of_x else None,
            product(grad.t(), x.t()) if of_weight else None,
            grad.sum(dim=0) if of_bias else None,
        )


def _applies(x: Tensor, weight: Tensor) -> bool:
    return (
        x.numel() > 0
        and _is_float32_on_cpu(x)
        and _is_float32_on_cpu(weight)
        and not torch.is_autocast_enabled("cpu")
        and _is_available()
    )


def _is_float32_on_cpu(tensor: Tensor) -> bool:
    # Subclasses, such as a DTensor over several ranks, have products of their own.
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and type(tensor) in (Tensor, nn.Parameter)


def _is_available() -> bool:
    onednn = torch.backends.mkldnn
    return bool(onednn.is_available() and onednn.enabled and hasattr(torch.ops.mkldnn, "_linear_pointwise"))
