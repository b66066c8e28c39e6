"""The values of the training loop: its settings, its state, and the parts that it calls.

LoopSettings    how long and how much          LoopState     where a run is, kept in every checkpoint
Data, EngineLink, Saving    the tasks, the engine and the checkpoints of a run, as the loop needs them
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from polyturn.core.aio import OneThread
from polyturn.core.task import Task
from polyturn.data.sampler import TaskSampler
from polyturn.engines.update_gate import WeightChannel
from polyturn.evaluation.evaluate import EvalSet
from polyturn.evaluation.options import EvalOptions
from polyturn.training.checkpoint import Checkpoints
from polyturn.training.journal_file import JournalFile
from polyturn.training.options import TrainOptions
from polyturn.training.policy_snapshots import PolicySnapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The options of the training loop: training, evaluation and the seed."""

    train: TrainOptions = field(default_factory=TrainOptions)
    evaluation: EvalOptions = field(default_factory=EvalOptions)
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class LoopState:
    """The state of a run that a checkpoint keeps beside the policy."""

    step: int = 0
    best: float = -math.inf
    best_step: int = -1
    evals_since_best: int = 0
    evaluated: int = -1
    """The step of the latest validation."""
    reports: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """"before" and "after" -> evaluation set -> its numbers."""


class Data(NamedTuple):
    """The tasks that a run is trained and evaluated on."""

    tasks: Sequence[Task]
    eval_sets: Sequence[EvalSet] = ()
    sampler: Callable[[], TaskSampler] | None = None
    """Makes the order of the tasks; None takes a shuffled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLink:
    """The engine of the episodes, as the training loop needs it."""

    channel: WeightChannel
    busy_s: Callable[[], float]
    """Seconds that it spent generating so far."""
    metrics: Callable[[], Mapping[str, float]] = dict
    """Its metrics since it was last asked."""
    snapshots: PolicySnapshots = field(default_factory=PolicySnapshots)
    """Copies of the trained policy that episodes also ask."""
    sleep: Callable[[], Awaitable[object]] | None = None
    """Frees GPUs that it shares with the trainer, until weights are published; None where it shares none."""
    thread: OneThread | None = None
    """The trainer's, where the engine has weights of its own, so that it samples while the trainer's change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The destination of a run's state, and the format of its model there."""

    checkpoints: Checkpoints
    export: Callable[[Path], object]
    """Writes the model in the Hugging Face format to a folder beside that of the policy's shards, from these."""
    journal: JournalFile | None = None
    """Of conversations in flight."""
    fingerprint: str = ""
    """Of the tokenizer and its template."""
