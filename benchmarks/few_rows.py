"""Measures how much faster the linear layers of a decoding step are with the weight on the left. Prints one JSON line.

    python benchmarks/few_rows.py [--threads 2] [--rows 8 32 64]

The layers have the shapes of SmolLM2-135M and Qwen3-0.6B, including the vocabulary. The two forms of a layer alternate, and
the figure is the median ratio of their times: if it is above 1, `engines/few_rows.py` helps on this processor.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import torch
from torch import Tensor, nn

from polyturn.engines.few_rows import FewRowsLinear

SHAPES = {
    "smollm2_135m": {"attention": (576, 576), "mlp": (576, 1536), "head": (576, 49152)},
    "qwen3_0.6b": {"attention": (1024, 2048), "mlp": (1024, 3072), "head": (1024, 151936)},
}


def seconds(layer: nn.Module, x: Tensor, calls: int) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    for _ in range(calls):
        layer(x)
    return (time.perf_counter() - start) / calls


def ratio(shape: tuple[int, int], rows: int, *, rounds: int = 7) -> float:
    """Return the time of the usual layer divided by that of the other form."""
    usual = nn.Linear(*shape, bias=False)
    other = FewRowsLinear(*shape, bias=False)
    other.weight = usual.weight
    x = torch.randn(rows, shape[0])
    calls = max(1, int(2e9 / (2 * rows * usual.weight.numel())))
    with torch.inference_mode():
        seconds(usual, x, 1), seconds(other, x, 1)
        return median(seconds(usual, x, calls) / seconds(other, x, calls) for _ in range(rounds))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 64])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {
        model: {name: {str(rows): round(ratio(shape, rows), 2) for rows in args.rows} for name, shape in shapes.items()}
        for model, shapes in SHAPES.items()
    }
    print(json.dumps({"benchmark": "few_rows", "threads": args.threads, "speedup": found}))


if __name__ == "__main__":
    main()
