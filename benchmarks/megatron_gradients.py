"""Megatron against one process: the largest differences per parallelism, float32, as its tests measure them. One JSON line.

    python benchmarks/megatron_gradients.py [--ranks 1 2 4] [--only context context_stages]

Tiny models of two layers, real processes with gloo (tests/support/rank_matrix.py): scores, loss, gradient, its norm, the
weights behind two steps of AdamW, the state that is written, and the share of a model's file that a rank reads.
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
"""What the names of a measurement end with; `largest` is the largest number of the gradient."""


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    arguments.add_argument("--only", nargs="+", default=[], help="names of comparisons")
    asked, found = arguments.parse_args(), {}
    for count in asked.ranks:
        with tempfile.TemporaryDirectory() as folder:
            names = asked.only or ["short", "long"]
            measured = results_of_ranks(
                "support.rank_matrix:measure", count, Path(folder) / "found.json", "megatron", *names
            )
        for name, ranks in measured.items():
            case = dataclasses.asdict(MEGATRON[name])
            figures = {of: [v for one in ranks for what, v in one.items() if what.endswith(of)] for of in FIGURES}
            found[name] = {**case, **{of: float(f"{max(v):.2g}") for of, v in figures.items() if v}}
    print(json.dumps({"benchmark": "megatron_gradients", "results": found}))


if __name__ == "__main__":
    main()
