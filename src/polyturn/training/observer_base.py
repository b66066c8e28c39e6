"""Observer: the calls that a training loop makes. Each does nothing here; a subclass overrides what it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyturn.core.lifecycle import EpisodeState
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.evaluation.report import EvalReport
from polyturn.store.schema import Trained


class Observer:
    """Follows a training loop."""

    def watch(self, running: Mapping[EpisodeState, int]) -> None:
        """Receive the table of how many episodes are in each state, before the first step; it changes while they run."""

    def begin_phase(self, phase: str, total: int | None) -> None:
        """A phase of `total` groups or episodes has begun; None where it does not count them."""

    def on_episode(self, *, total: int) -> None:
        """An episode of the `total` of a training step is done."""

    def on_group(self, group: TrajectoryGroup, *, phase: str, total: int) -> None:
        """A group of the `total` of a phase is done."""

    def on_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[TrajectoryGroup],
        trained: Mapping[str, Trained] | None = None,
    ) -> None:
        """A training step is done."""

    def on_failed_step(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """The update of a step raised."""

    def on_eval(self, step: int, name: str, report: EvalReport, groups: Sequence[TrajectoryGroup]) -> None:
        """An evaluation set is done."""
