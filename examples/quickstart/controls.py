"""A control experiment for the quick start: GRPO with the right rewards in the wrong order.

    polyturn train examples/quickstart/config.yaml algorithm.advantage=controls.py:shuffled_grpo name=shuffled

Everything else is the same: episodes, group sizes, the spread of advantages, the number of updates. If the gain of the quick
start had another cause than the assignment of rewards to trajectories, this run would show it too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyturn.algorithms.advantages import Rewards, grpo
from polyturn.core.arrays import Floats
from polyturn.core.sample import TrainSample
from polyturn.core.seeds import derive_seed


def shuffled_grpo(rewards_G: Rewards, samples_G: Sequence[Sequence[TrainSample]]) -> list[list[Floats]]:
    """Return GRPO's advantages for the group's rewards in a random order, seeded by the group."""
    group = next((s.id.group for samples in samples_G for s in samples), "")
    rng = np.random.default_rng(derive_seed("shuffle", group))
    return grpo(rng.permutation(rewards_G), samples_G)
