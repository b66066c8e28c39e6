"""Checks the bound on staleness for every token of a million simulated tokens, under all asynchronous settings.

The loop, buffer, groups and episodes are real; the engine and the clock are simulated, and lengths and training times are
random. Prints one JSON line with the numbers of tokens, of completions that cross an update, and of violations (target 0).

    python benchmarks/staleness_bound.py                 a million tokens
    python benchmarks/staleness_bound.py --tokens 50000
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import time

from polyturn.evaluation.options import EvalOptions
from polyturn.training.options import TrainOptions
from polyturn.training.state import LoopSettings
from support.asynchrony import run_simulated

MODES = ("in_flight", "wait", "abort_resume")


def main() -> None:
    """Run random settings until there are enough tokens, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    tokens = parser.parse_args().tokens
    logging.disable(logging.WARNING)  # warnings of steps in which no group has a signal
    began = time.perf_counter()
    num_tokens = num_mixed = num_violations = num_runs = 0
    at_bound = 0
    for seed in itertools.count():
        if num_tokens >= tokens:
            break
        rng = random.Random(seed)
        bound, groups = rng.randint(0, 4), rng.randint(1, 6)
        carries = bound > 0 and rng.random() < 0.3
        train = TrainOptions(
            steps=rng.randint(5, 25),
            groups_per_step=groups,
            group_size=rng.choice((2, 4, 8)),
            max_staleness=bound,
            leftover="carry" if carries else "cancel",
            oversample=(rng.randint(1, bound * groups) if carries else rng.choice((0, 0, 2))) / groups,
            dynamic_sampling=rng.choice((0, 0, 2)),
            replay=(rng.choice((0, 2)) if bound else 0) / groups,
            checkpoint_every=0,
        )
        settings = LoopSettings(train=train, evaluation=EvalOptions(before=False))
        run = run_simulated(
            settings, seed=seed, train_s=rng.choice((0.1, 1.0, 5.0)), update=rng.choice(MODES), flat_share=0.25
        )
        num_runs += 1
        num_tokens += run.staleness.total()
        num_mixed += run.mixed
        num_violations += sum(count for staleness, count in run.staleness.items() if not 0 <= staleness <= bound)
        at_bound += run.staleness[bound] if bound else 0
    result = {
        "benchmark": "staleness_bound",
        "tokens": num_tokens,
        "runs": num_runs,
        "completions_across_an_update": num_mixed,
        "tokens_at_the_bound": at_bound,
        "violations": num_violations,
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
