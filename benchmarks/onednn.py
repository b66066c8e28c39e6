"""Measures how much faster linear layers on a CPU are with oneDNN than with torch's own product. Prints one JSON line.

    python benchmarks/onednn.py [--threads 2] [--rows 8 32 1024]

The layers have the shapes of SmolLM2-135M and Qwen3-0.6B, including the vocabulary. With up to 128 rows, one layer after the
other is computed forward, as a decoding step does; with more, forward and backward. The two forms of a layer alternate, and
the figure is the median ratio of their times: if it is above 1, `engines/onednn.py` helps on this processor.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import torch
from torch import Tensor, nn

from polyturn.engines.onednn import OneDnnLinear

SHAPES = {
    "smollm2_135m": {"attention": (576, 576), "mlp": (576, 1536), "head": (576, 49152)},
    "qwen3_0.6b": {"attention": (1024, 2048), "mlp": (1024, 3072), "head": (1024, 151936)},
}
MAX_DECODED = 128
NUM_BYTES = 2**27
"""Bytes of the weights of the layers of one round, more than fit into a processor's cache."""


def seconds(layers: list[nn.Linear], x: Tensor) -> float:
    """Return the seconds of a pass through all layers, each of which reads `x`."""
    start = time.perf_counter()
    if len(x) <= MAX_DECODED:
        with torch.inference_mode():
            for layer in layers:
                layer(x)
    else:
        for layer in layers:
            layer(x.requires_grad_()).sum().backward()
            layer.weight.grad = x.grad = None
    return time.perf_counter() - start


def ratio(shape: tuple[int, int], rows: int, *, rounds: int = 7) -> float:
    """Return the time of torch's layers divided by that of oneDNN's."""
    count = max(1, NUM_BYTES // (4 * shape[0] * shape[1]))
    usual = [nn.Linear(*shape, bias=False) for _ in range(count if rows <= MAX_DECODED else 1)]
    others = [OneDnnLinear(*shape, bias=False) for _ in usual]
    x = torch.randn(rows, shape[0])
    seconds(usual, x), seconds(others, x)
    return round(median(seconds(usual, x) / seconds(others, x) for _ in range(rounds)), 2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 1024])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ratios = {
        model: {name: {rows: ratio(shape, rows) for rows in args.rows} for name, shape in shapes.items()}
        for model, shapes in SHAPES.items()
    }
    print(json.dumps({"benchmark": "onednn", "threads": args.threads, "speedup": ratios}))


if __name__ == "__main__":
    main()
