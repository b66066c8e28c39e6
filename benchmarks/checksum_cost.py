"""Measures the cost of comparing every tensor of a model by checksum at every sync. Prints one JSON line.

    python benchmarks/checksum_cost.py [--values 100000000] [--repeats 5]

A checksum reads every value once, on the trainer and on each server. The benchmark measures the checksum of one tensor of
`--values` values, as float32 and as bfloat16, and for comparison a plain copy, which is the minimum for any sync. Figures
are medians of `--repeats`, with torch's default number of threads. `seconds_for_0.5b` is for a model of half a billion
parameters. On a machine with a GPU, the GPU is measured too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from polyturn.engines.server_side.polyturn_weights import fold


def seconds(work: Callable[[], object], repeats: int, device: str) -> float:
    """Return the median seconds of `work`, after one run that is not measured."""
    times = []
    for _ in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    results = {}
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(options.values, device=device).to(dtype)
            one = seconds(lambda values=values: fold(values), options.repeats, device)  # type: ignore[misc]
            copy = seconds(values.clone, options.repeats, device)
            results[f"{device} {str(dtype).removeprefix('torch.')}"] = {
                "ns_per_value": round(1e9 * one / options.values, 3),
                "copy_ns_per_value": round(1e9 * copy / options.values, 3),
                "seconds_for_0.5b": round(0.5e9 * one / options.values, 2),
            }
    print(json.dumps({"benchmark": "checksum_cost", "threads": torch.get_num_threads(), "results": results}))


if __name__ == "__main__":
    main()
