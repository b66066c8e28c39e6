"""The section `evaluation`: on which tasks, how often, and how each set decodes.

    evaluation: {data: {files: test.parquet}, every: 20, sets: {greedy: {}, avg8: {samples: 8}}}

The first set that runs during training chooses the best checkpoint and may end the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from polyturn.config.models.base import Section
from polyturn.config.models.data import TaskSourceConfig
from polyturn.core.generation import Sampling
from polyturn.evaluation.options import EvalOptions


class EvalSetConfig(Section):
    """One way to evaluate."""

    sampling: Sampling = Sampling(temperature=0.0)
    max_turns: int | None = Field(None, ge=1)
    """Overrides rollout.limits.max_turns."""
    samples: int = Field(1, ge=1, le=2**16)
    """How often each task is run; more than one gives mean@N, best@N and, where functions return a `pred`, maj@N."""
    every: bool = True
    """Whether it also runs every `evaluation.every` steps; else only before and after training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(EvalOptions):
    """Validation: before training, every few steps, and after it."""

    data: TaskSourceConfig | None = None
    sets: dict[str, EvalSetConfig] = field(default_factory=lambda: {"greedy": EvalSetConfig()})
    """Name of each set to how it decodes; the first that runs every `every` steps chooses the best checkpoint."""
    success_at: float = 1.0
    """The outcome that counts as success."""
