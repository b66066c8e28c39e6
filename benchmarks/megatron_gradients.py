"""Compares Megatron with a single process: the largest differences per parallelism, in float32. Prints one JSON line.

    python benchmarks/megatron_gradients.py [--ranks 1 2 4] [--only context context_stages]

It uses tiny models of two layers and real processes with gloo (tests/support/rank_matrix.py), like the tests. It compares
scores, loss, gradient, gradient norm, the weights after two steps of AdamW, the written state, and the share of a model's
file that a rank reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

from support.rank_matrix import MEGATRON
from support.ranks import results_of_ranks

FIGURES = ("/scores", "loss", "gradient", "largest", "norm", "weights", "state", "share")
"""Suffixes of the names of measurements; `largest` is the largest absolute value of the gradient."""


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    arguments.add_argument("--only", nargs="+", default=[], help="names of comparisons")
    options, results = arguments.parse_args(), {}
    for count in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            names = options.only or ["short", "long"]
            measured = results_of_ranks(
                "support.rank_matrix:measure", count, Path(folder) / "found.json", "megatron", *names
            )
        for name, ranks in measured.items():
            case = dataclasses.asdict(MEGATRON[name])
            figures = {of: [v for one in ranks for what, v in one.items() if what.endswith(of)] for of in FIGURES}
            results[name] = {**case, **{of: float(f"{max(v):.2g}") for of, v in figures.items() if v}}
    print(json.dumps({"benchmark": "megatron_gradients", "results": results}))


if __name__ == "__main__":
    main()
