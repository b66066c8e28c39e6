"""Check that a checkpoint fits the run that resumes it, so that no task is skipped or visited twice.

Other modules check weights, optimizer, tokenizer and the order of tasks. This module checks the tasks, and the settings that
determine the tasks of a step. All other settings may change.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.errors import CheckpointError
from polyturn.core.task import Task
from polyturn.training.options import OptimSettings, TrainOptions

logger = logging.getLogger(__name__)

_NAMES = {
    "groups_per_step": "train.groups_per_step",
    "group_size": "train.group_size",
    "has_baseline": "a greedy member in each group (algorithm.advantage)",
    "extra_groups": "train.oversample × train.groups_per_step",
    "carries_over": "train.leftover: carry",
    "max_attempts": "train.dynamic_sampling",
}
_NUM_LOOKED_AT = 64
"""Number of tasks that are compared, because a dataset may be too large to read at the start."""


def identity_of(train: TrainOptions, tasks: Sequence[Task], *, has_baseline: bool) -> dict[str, Any]:
    """Return the settings of groups, and a digest of the tasks, that must stay the same when a run resumes."""
    # Spread evenly, so that a dataset that grew or was sorted differs in some of these tasks.
    digest = hashlib.blake2b(digest_size=8)
    count = min(len(tasks), _NUM_LOOKED_AT)
    for index in (i * len(tasks) // count for i in range(count)):
        task = tasks[index]
        # The prompt but not the scoring of a task: a reward may be corrected before a run resumes.
        digest.update(repr((task.id, task.data_source, [(m.role, str(m.content)) for m in task.prompt])).encode())
    return {
        "groups_per_step": train.groups_per_step,
        "group_size": train.group_size,
        "has_baseline": has_baseline,
        "extra_groups": train.extra_groups,
        "carries_over": train.carries_over,
        "max_attempts": train.dynamic_sampling,
        "tasks": digest.hexdigest(),
    }


def require_same_identity(saved: Mapping[str, Any], mine: Mapping[str, Any], *, path: Path) -> None:
    """Raise if the checkpoint at `path` was written with other tasks or group settings.

    Raises:
        CheckpointError: something differs; the message says what, and what to do.
    """
    for key, value in mine.items():
        if key not in saved or saved[key] == value:  # an older checkpoint has fewer keys
            continue
        if key == "tasks":
            what = "other tasks in data.train than this run has"
        else:
            what = f"{_NAMES[key]} {saved[key]!r} and this run has {value!r}"
        raise _other_tasks(path, what)


def require_same_groups(former: Mapping[str, Any], now: Mapping[str, Any], *, path: Path) -> None:
    """Compare the sizes of groups in two resolved configurations, to raise before weights are loaded.

    Args:
        former: The settings in the run's folder; a missing key is not compared.
        now: The settings to resume with.
        path: The checkpoint to resume from.

    Raises:
        CheckpointError: a size differs.
    """
    before, after = former.get("train"), now.get("train")
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return
    for key in ("groups_per_step", "group_size"):
        if key in before and key in after and before[key] != after[key]:
            raise _other_tasks(path, f"{_NAMES[key]} {before[key]!r} and this run has {after[key]!r}")


def _other_tasks(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} was made with {what}, so that tasks would be skipped or visited twice; resume with the "
        f"same, or start a new run from its weights (model.path={path / 'model'})"
    )


def warn_of_other_updates(saved: Mapping[str, Any], train: TrainOptions, optims: Sequence[OptimSettings]) -> None:
    """Warn if learning rates jump because the number of optimizer updates per step changed."""
    # Older checkpoints lack the number; their schedules counted every update as a step.
    before, now = saved.get("updates_per_step", 1), train.updates_per_step
    if before != now and any(optim.schedule.name != "constant" or optim.warmup_steps for optim in optims):
        logger.warning(
            "the learning rate continues at another point of its schedule: the run had %d optimizer updates per step, "
            "and now has %d (train.minibatches × train.passes)",
            before,
            now,
        )


def changed_settings(former: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for every setting that differs between two resolved configurations: `train.optim.lr: 0.001 ->
    0.0005`."""
    before, after = _flat(former), _flat(now)
    names = sorted(before.keys() | after.keys())
    return [f"{n}: {before.get(n)!r} -> {after.get(n)!r}" for n in names if before.get(n) != after.get(n)]


def _flat(values: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, prefix=f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
