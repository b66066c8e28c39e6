"""Linear layers for few rows: the same numbers, and only where they pay."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from polyturn.engines.few_rows import MAX_ROWS, FewRowsLinear, use_few_rows

WIDE = (512, 512)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (4, 3), (MAX_ROWS, 1), (MAX_ROWS + 1, 1)])
@pytest.mark.parametrize("width", [512, 2048])
def test_few_rows_linear_equals_linear(shape: tuple[int, int], width: int, bias: bool):
    torch.manual_seed(0)
    layer = FewRowsLinear(512, width, bias=bias, dtype=torch.float64)
    x = torch.randn(*shape, 512, dtype=torch.float64)
    out = layer(x)
    assert out.is_contiguous()
    torch.testing.assert_close(out, functional.linear(x, layer.weight, layer.bias), atol=1e-12, rtol=0)


def test_large_layers_are_replaced_with_their_parameters():
    model = nn.ModuleDict(
        {"embed": nn.Embedding(512, 512), "inner": nn.Sequential(nn.Linear(*WIDE)), "small": nn.Linear(8, 8)}
    )
    model["head"] = nn.Linear(*WIDE, bias=False)
    model["head"].weight = model["embed"].weight
    before = dict(model.named_parameters(remove_duplicate=False))
    use_few_rows(model)
    assert type(model["inner"][0]) is type(model["head"]) is FewRowsLinear and type(model["small"]) is nn.Linear
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def test_bfloat16_layers_stay():
    model = nn.Sequential(nn.Linear(*WIDE)).bfloat16()
    use_few_rows(model)
    assert type(model[0]) is nn.Linear
