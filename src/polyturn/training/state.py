"""What the training loop is told and keeps: its settings, its state, and what it speaks to. Values and protocols alone.

LoopSettings    how long and how much          LoopState     where a run is, kept in every checkpoint
TrainObserver   is told what happens           WeightChannel the way of new weights to the engine
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from polyturn.core.trajectory import TrajectoryGroup
from polyturn.evaluation.report import EvalReport
from polyturn.store.schema import Trained


class TrainObserver(Protocol):
    """Is told what happens, for the records and for a person to read. It decides nothing."""

    def on_group(self, group: TrajectoryGroup, *, phase: str, total: int) -> None:
        """A group is done; `phase` is "rollout" or "eval/<set>", `total` the number of groups of the phase."""

    def on_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[TrajectoryGroup],
        trained: Mapping[str, Trained],
    ) -> None:
        """A step is done; `trained` says by trajectory id what it made of each."""

    def on_eval(self, step: int, name: str, report: EvalReport, groups: Sequence[TrajectoryGroup]) -> None:
        """An evaluation set is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How long and how much."""

    steps: int
    groups_per_step: int
    group_size: int
    has_baseline: bool = False
    """Whether each group has one more trajectory, decoded greedily and never trained, for the estimator."""
    seed: int = 0
    shuffle: bool = True
    max_staleness: int = 0
    extra_groups: int = 0
    """Groups that are started beyond those of a step; the first complete ones are taken."""
    carries_over: bool = False
    """Whether the others are trained in a later step instead of being cut off."""
    max_attempts: int = 0
    """How many further tasks are tried in place of a group that has nothing to learn from."""
    replayed_groups: int = 0
    """Groups of earlier steps that are trained on again beside those of a step."""
    eval_before: bool = True
    eval_every: int = 0
    eval_limit_during: int | None = None
    stop_at: float | None = None
    patience: int | None = None
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 counts none."""
    checkpoint_every_s: float | None = None
    """Seconds between checkpoints; None is no limit of time."""
    needs_checkpoints: bool = True
    """Whether a checkpoint that cannot be written ends the run, instead of being warned of and tried again."""


@dataclass(slots=True, kw_only=True)
class LoopState:
    """Where a run is; what a checkpoint keeps beside the policy."""

    step: int = 0
    best: float = -math.inf
    best_step: int = -1
    evals_since_best: int = 0
    evaluated: int = -1
    """The step of the latest validation."""
    reports: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """"before" and "after" -> evaluation set -> its numbers."""


class WeightChannel(Protocol):
    """The way of the policy's weights to the engine."""

    async def start(self, version: int) -> object:
        """Bring the first weights there, as `version`."""

    async def publish(self, version: int) -> object:
        """Bring the weights as they are now, as `version`.

        Raises:
            EngineError: they did not arrive.
        """
