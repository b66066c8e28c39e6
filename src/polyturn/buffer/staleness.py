"""Staleness of each token: the number of weight versions between its sampling and its training.

    step 7 trains on   g56 ... g63 (new)   g49 g52 (replayed)      with max_staleness 1: no token older than version 6

The seed and the step determine which of the kept groups are replayed, so the choice does not depend on timing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from polyturn.core.errors import LifecycleError
from polyturn.core.trajectory import TrajectoryGroup


def oldest_version(group: TrajectoryGroup) -> int:
    """Return the oldest policy version of the group's sampled tokens; a very large number if it has none."""
    versions = [
        span.policy_version
        for trajectory in group.trajectories
        for segment in trajectory.segments
        for span in segment.spans
        if span.policy_version is not None
    ]
    return min(versions, default=1 << 31)  # without a sampled token, nothing can be stale


def check_staleness(groups: Iterable[TrajectoryGroup], *, step: int, max_staleness: int) -> None:
    """Raise if a group is too old for the step.

    Raises:
        LifecycleError: a token is staler than the bound, because slots were freed too early or an engine serves old weights.
    """
    for group in groups:
        if (oldest := oldest_version(group)) < step - max_staleness:
            raise LifecycleError(
                f"group {group.id} has a token of policy version {oldest}, but step {step} may only train versions from "
                f"{step - max_staleness} on (train.max_staleness {max_staleness}); an engine serves older weights than it "
                "received"
            )


class Replay:
    """Groups of earlier steps that are trained once more, within the bound of staleness."""

    def __init__(self, *, max_staleness: int, seed: int = 0) -> None:
        self._max_staleness = max_staleness
        self._seed = seed
        self._groups: list[TrajectoryGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Keep groups that were trained on for the first time. Each is replayed at most once."""
        self._groups += groups

    def draw(self, count: int, *, step: int) -> list[TrajectoryGroup]:
        """Return up to `count` random groups among those that are new enough for `step`. They are no longer kept, and
        neither are the groups that are too old."""
        fresh = [g for g in self._groups if oldest_version(g) >= step - self._max_staleness]
        chosen = set(random.Random(f"{self._seed}/{step}").sample(range(len(fresh)), min(count, len(fresh))))
        self._groups = [g for i, g in enumerate(fresh) if i not in chosen]
        return [fresh[i] for i in sorted(chosen)]
