"""oneDNN's products against torch's: values, gradients, and which layers use them."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from polyturn.engines import onednn
from polyturn.engines.onednn import FEW_ROWS, OneDnnLinear, product, use_onednn, use_torch
from support.forked import run_program

WIDE = (512, 512)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 1), (4, 3), (FEW_ROWS, 1), (FEW_ROWS + 1, 1), (3, 200)])
@pytest.mark.parametrize("width", [32, 2048])
def test_values_and_gradients_equal_those_of_linear(shape: tuple[int, int], width: int, bias: bool):
    torch.manual_seed(0)
    layer = OneDnnLinear(512, width, bias=bias)
    x, grad = torch.randn(*shape, 512, requires_grad=True), torch.randn(*shape, width)
    results = []
    for forward in (layer, lambda x: functional.linear(x, layer.weight, layer.bias)):
        out = forward(x)
        assert out.is_contiguous() and out.shape == grad.shape
        inputs = [x, *layer.parameters()]
        results.append([out, *torch.autograd.grad(out, inputs, grad)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_product_takes_transposed_matrices():
    torch.manual_seed(0)
    x, weight = torch.randn(512, 300).t(), torch.randn(512, 700).t()
    torch.testing.assert_close(product(x, weight), x @ weight.t(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(product(x[:3], weight), x[:3] @ weight.t(), atol=1e-4, rtol=1e-5)


MANY_LENGTHS = """
import ctypes, os, sys, torch
from polyturn.engines.onednn import product

def megabytes():
    ctypes.CDLL(None).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

if size := sys.argv[1]:
    os.environ.update(LRU_CACHE_CAPACITY=size, ONEDNN_PRIMITIVE_CACHE_CAPACITY=size)
torch.set_num_threads(1)
x, weight = torch.randn(1000, 32), torch.randn(64, 32)
product(x, weight)
before = megabytes()
for rows in range(65, 765):
    product(x[:rows], weight)
print(megabytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from /proc")
def test_products_of_many_lengths_take_little_memory():
    """Each length has its own code, and torch keeps that of 1024 by default; its size depends on the processor."""
    ours, torchs = (float(run_program(MANY_LENGTHS, size).out) for size in ("", "1024"))
    assert ours < 0.6 * torchs


def test_frozen_layer_keeps_only_its_weight_for_the_backward_pass():
    layer, x = OneDnnLinear(*WIDE).requires_grad_(False), torch.randn(3, 512, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = layer(x)
    assert [tensor.data_ptr() for tensor in kept] == [layer.weight.data_ptr()]
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], layer.weight.sum(0).expand(3, -1), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_multiply_as_torch_does(dtype: torch.dtype):
    layer, x = OneDnnLinear(*WIDE, dtype=dtype), torch.randn(2, 512, dtype=dtype)
    assert torch.equal(layer(x), functional.linear(x, layer.weight, layer.bias))


def test_autocast_still_lowers_the_precision():
    layer, x = OneDnnLinear(*WIDE), torch.randn(2, 512)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_large_layers_use_onednn_with_the_same_parameters():
    model = nn.ModuleDict(
        {"embed": nn.Embedding(512, 512), "inner": nn.Sequential(nn.Linear(*WIDE)), "small": nn.Linear(8, 8)}
    )
    model["head"] = nn.Linear(*WIDE, bias=False)
    model["head"].weight = model["embed"].weight
    before = dict(model.named_parameters(remove_duplicate=False))
    use_onednn(model)
    assert type(model["inner"][0]) is type(model["head"]) is OneDnnLinear and type(model["small"]) is nn.Linear
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    use_torch(model)
    assert type(model["inner"][0]) is type(model["head"]) is nn.Linear


@pytest.mark.parametrize("place", [{"dtype": torch.bfloat16}, {"device": "meta"}])
def test_other_layers_stay(place: dict[str, torch.dtype]):
    model = nn.Sequential(nn.Linear(*WIDE, **place))
    use_onednn(model)
    assert type(model[0]) is nn.Linear


def test_layers_stay_where_torch_has_no_onednn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(onednn, "_is_available", lambda: False)
    model = nn.Sequential(nn.Linear(*WIDE))
    use_onednn(model)
    assert type(model[0]) is nn.Linear
    layer, x = OneDnnLinear(*WIDE), torch.randn(3, 512)
    assert torch.equal(layer(x), functional.linear(x, layer.weight, layer.bias))
