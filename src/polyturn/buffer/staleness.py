"""Staleness, token by token: how far the weights that sampled a token are behind those that it trains."""

from __future__ import annotations

from collections.abc import Iterable

from polyturn.core.errors import LifecycleError
from polyturn.core.trajectory import TrajectoryGroup


def oldest_version(group: TrajectoryGroup) -> int:
    """Return the oldest policy version of the group's sampled tokens; a very new one where it has none."""
    versions = [
        span.policy_version
        for trajectory in group.trajectories
        for segment in trajectory.segments
        for span in segment.spans
        if span.policy_version is not None
    ]
    return min(versions, default=1 << 31)


def check_staleness(groups: Iterable[TrajectoryGroup], *, step: int, max_staleness: int) -> None:
    """Refuse groups that are too old for the step.

    Raises:
        LifecycleError: a token is staler than the bound: slots were freed too early, or an engine serves old weights.
    """
    for group in groups:
        if (oldest := oldest_version(group)) < step - max_staleness:
            raise LifecycleError(
                f"group {group.id} has a token of policy version {oldest}, and step {step} trains none before "
                f"{step - max_staleness} (train.max_staleness {max_staleness}); an engine serves older weights than it got"
            )
