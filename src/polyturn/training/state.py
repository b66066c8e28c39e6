"""The settings and state of the training loop, and the parts that it calls.

LoopSettings    its options          LoopState     the progress of a run, kept in every checkpoint
Data, EngineLink, Saving    the tasks, the engine and the checkpoints of a run
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from polyturn.core.task import Task
from polyturn.data.sampler import TaskSampler
from polyturn.evaluation.evaluate import EvalSet
from polyturn.evaluation.options import EvalOptions
from polyturn.infra.aio import OneThread
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
    """The progress of a run; checkpoints contain it in addition to the policy."""

    step: int = 0
    best: float = -math.inf
    best_step: int = -1
    evals_since_best: int = 0
    evaluated: int = -1
    """The step of the latest validation."""
    success: float = math.nan
    """The success of the latest validation, on the set that chooses the best checkpoint."""
    reports: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """"before" or "after" -> evaluation set -> metrics."""


class WeightChannel(Protocol):
    """Publishes the policy's weights to an engine."""

    async def start(self, version: int) -> object:
        """Publish the first weights as `version`."""
        ...

    async def publish(self, version: int) -> object:
        """Publish the current weights as `version`.

        Raises:
            EngineError: the weights did not arrive.
        """
        ...


class Data(NamedTuple):
    """The tasks for training and evaluation."""

    tasks: Sequence[Task]
    eval_sets: Sequence[EvalSet] = ()
    sampler: Callable[[], TaskSampler] | None = None
    """Makes a sampler of tasks; None shuffles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLink:
    """The training loop's interface to the engine."""

    channel: WeightChannel
    closed: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext
    """Holds the episodes' requests back while weights are published, but not the channel's probes."""
    busy_s: Callable[[], float]
    """Returns the seconds the engine has spent generating so far."""
    metrics: Callable[[], Mapping[str, float]] = dict
    """Returns the engine's metrics since the last call."""
    snapshots: PolicySnapshots = field(default_factory=PolicySnapshots)
    """Copies of the trained policy that episodes also use."""
    sleep: Callable[[], Awaitable[object]] | None = None
    """Frees the GPUs that the engine shares with the trainer until weights are published; None if it shares none."""
    thread: OneThread | None = None
    """The trainer's thread; None if updates run on the event loop, in turns with an engine that samples there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Where and how a run's state is saved."""

    checkpoints: Checkpoints
    export: Callable[[Path], object]
    """Writes the model in Hugging Face format to a folder, from the policy's shards next to the folder."""
    journal: JournalFile | None = None
    """Journal of conversations in flight; None if the run writes no journal."""
    fingerprint: str = ""
    """Fingerprint of the tokenizer and its template."""
