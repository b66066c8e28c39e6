"""The section `evaluation`: on which tasks, how often, and how each set decodes.

    evaluation: {data: {files: test.parquet}, every: 20, sets: {greedy: {}, avg8: {samples: 8}}}

The first set that runs during training chooses the best checkpoint and may end the run.
"""

from __future__ import annotations

from pydantic import Field

from polyturn.config.models.base import Section
from polyturn.config.models.data import TaskSourceConfig
from polyturn.core.generation import Sampling


class EvalSetConfig(Section):
    """One way to evaluate."""

    sampling: Sampling = Sampling(temperature=0.0)
    max_turns: int | None = Field(None, ge=1)
    """Overrides rollout.limits.max_turns."""
    samples: int = Field(1, ge=1)
    """How often each task is run; more than one gives mean@N, best@N and, where functions return a `pred`, maj@N."""
    every: bool = True
    """Whether it also runs every `evaluation.every` steps; else only before and after training."""


class EvalConfig(Section):
    """Validation: before training, every few steps, and after it."""

    data: TaskSourceConfig | None = None
    sets: dict[str, EvalSetConfig] = {"greedy": EvalSetConfig()}
    """Name of each set to how it decodes; the first that runs every `every` steps chooses the best checkpoint."""
    before: bool = True
    """Validate before training; without it there is nothing to compare the end with."""
    every: int = Field(0, ge=0)
    """Steps between validations; 0 validates only before and after."""
    limit_during: int | None = Field(None, ge=1)
    """During training only the first so many tasks are used."""
    success_at: float = 1.0
    """The outcome that counts as success."""
    stop_at: float | None = None
    """End training early once the first set's success reaches this."""
    patience: int | None = Field(None, ge=1)
    """End training after so many validations without a better result. The one before training counts as a result."""
