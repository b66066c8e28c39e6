"""Replay: groups of the last steps, trained on once more beside new ones, never at weights that are too old for it.

    step 7 trains on   g56 ... g63 (new)   g49 g52 (replayed)      with max_staleness 1: no token of theirs before version 6

Which ones is drawn by (seed, step), so that it does not depend on timing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from polyturn.buffer.staleness import oldest_version
from polyturn.core.trajectory import TrajectoryGroup


class Replay:
    """Keeps the groups that may be trained on again."""

    def __init__(self, *, max_staleness: int, seed: int = 0) -> None:
        self._max_staleness = max_staleness
        self._seed = seed
        self._held: list[TrajectoryGroup] = []

    def __len__(self) -> int:
        return len(self._held)

    def add(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Keep groups that were trained on for the first time; a group is replayed once."""
        self._held += groups

    def draw(self, count: int, *, step: int) -> list[TrajectoryGroup]:
        """Return up to `count` groups that `step` may train on, and forget them and those that are too old for it."""
        fresh = [g for g in self._held if oldest_version(g) >= step - self._max_staleness]
        chosen = set(random.Random(f"{self._seed}/{step}").sample(range(len(fresh)), min(count, len(fresh))))
        self._held = [g for i, g in enumerate(fresh) if i not in chosen]
        return [fresh[i] for i in sorted(chosen)]
