"""Episodes that each estimator needs in a game whose credit is known: sixteen turns, each with its own score.

    python benchmarks/turn_credit.py [--seeds 20]

Every estimator plays with the learning rate that suits it best; the median over seeds counts. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json

from support.turn_credit import TURN_LEVEL, Game, best_median

LRS = (1.0, 2.0, 4.0, 8.0, 16.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    seeds = range(parser.parse_args().seeds)
    game = Game()
    wanted = {"grpo": {}, "gae": {"lam": 0.5}, **TURN_LEVEL}
    episodes = {name: best_median(game, name, kwargs, lrs=LRS, seeds=seeds) for name, kwargs in wanted.items()}
    share = {name: round(episodes[name] / episodes["grpo"], 3) for name in TURN_LEVEL}
    result = {
        "benchmark": "turn_credit",
        "turns": game.turns,
        "actions": game.actions,
        "seeds": len(seeds),
        "episodes": episodes,
        "share_of_grpo": share,
        "target": 0.5,
        "ok": max(share.values()) <= 0.5,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
