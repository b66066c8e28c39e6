"""Observer: the callbacks of a training loop. They do nothing here; a subclass overrides the ones that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyturn.core.lifecycle import EpisodeState
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.evaluation.report import EvalReport
from polyturn.store.schema import Trained


class Observer:
    """Follows a training loop."""

    def watch(self, running: Mapping[EpisodeState, int]) -> None:
        """Receive, before the first step, the live table of the number of episodes in each state."""

    def begin_phase(self, phase: str, total: int | None) -> None:
        """Handle the start of a phase of `total` groups or episodes; None if it does not count them."""

    def on_episode(self, *, total: int) -> None:
        """Handle the end of an episode of the `total` of a training step."""

    def on_group(self, group: TrajectoryGroup, *, phase: str, total: int) -> None:
        """Handle the end of a group of the `total` of a phase."""

    def on_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[TrajectoryGroup],
        trained: Mapping[str, Trained] | None = None,
    ) -> None:
        """Handle the end of a training step; `trained` has the result of each trajectory by id."""

    def on_failed_step(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Handle a step whose update raised."""

    def on_eval(self, step: int, name: str, report: EvalReport, groups: Sequence[TrajectoryGroup]) -> None:
        """Handle the end of an evaluation set."""
