"""Run and record episodes without training."""

from __future__ import annotations

import functools
import itertools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyturn import build
from polyturn.api.folders import ANOTHER_FOLDER, keep_tokenizer, new_run_folder
from polyturn.api.signals import CANCELLING, Signals, until_done
from polyturn.config.load import write_resolved
from polyturn.core.errors import ConfigError
from polyturn.core.task import Task
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.infra.console import stderr_console
from polyturn.infra.loop import run_loop
from polyturn.infra.writable import check_writable
from polyturn.rollout.pool import GroupSpec
from polyturn.training.observer import AlsoRecord, RunObserver

logger = logging.getLogger(__name__)


class RolledOut(NamedTuple):
    """The result of a rollout without training."""

    folder: Path
    groups: list[TrajectoryGroup]


def some_of(tasks: Sequence[Task], num: int, *, of_each: bool) -> Sequence[Task]:
    """Return the first `num` tasks; with `of_each`, take them in turn from each data source (environment)."""
    if not of_each:
        return tasks[:num]
    by_source: dict[str | None, list[Task]] = {}
    for task in tasks:
        by_source.setdefault(task.data_source, []).append(task)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_source.values()))
    return list(itertools.islice((task for task in in_turn if task is not None), num))


def _count(num_tasks: Any) -> int:
    """Convert a number of tasks: 3, np.int64(3), "3"."""
    try:
        count = int(num_tasks) if isinstance(num_tasks, str) else operator.index(num_tasks)
    except (TypeError, ValueError):
        count = 0
    if count < 1 or isinstance(num_tasks, bool):
        raise ConfigError(f"num_tasks is {num_tasks!r}; give a number of at least 1, or remove it to run all tasks")
    return count


def roll_out(
    source: build.ConfigSource,
    resolved: Mapping[str, Any],
    *,
    num_tasks: int | None,
    checkpoint: Path | None = None,
    signals: Callable[..., Signals] = Signals,
) -> RolledOut:
    """Run and record groups of `train.group_size` members for `num_tasks` tasks, or for all tasks."""
    num_tasks = None if num_tasks is None else _count(num_tasks)
    config = source.config
    folder = Path(config.out) / f"{config.name}-rollout"
    check_writable(folder.parent, instead=ANOTHER_FOLDER)
    tasks = build.build_train_tasks(source)
    check = functools.partial(build.check_first_tasks, source, {"data.train": tasks})
    parts = build.build_parts(build.untrained(source), checkpoint=build.model_folder(checkpoint), check=check)
    parts = build.with_workers(parts)
    tasks = build.fitting(parts, tasks, name="data.train")
    if num_tasks is not None and num_tasks > len(tasks):
        logger.warning("data.train has %d tasks, fewer than the requested %d; all of them run", len(tasks), num_tasks)
    tasks = some_of(tasks, len(tasks) if num_tasks is None else num_tasks, of_each=isinstance(config.env, list))
    build.check_run(parts, tasks, name="data.train")
    folder = new_run_folder(folder)
    write_resolved(resolved, folder / "config.yaml", base=source.base)
    keep_tokenizer(parts, folder)

    async def run_all(observer: RunObserver) -> list[TrajectoryGroup]:
        pool = build.pool_of(parts).apart(on_group=lambda group: observer.on_rollout(group, total=len(tasks)))
        specs = [
            GroupSpec(id=f"g{i}", task=task, size=config.train.group_size, seed=config.seed) for i, task in enumerate(tasks)
        ]
        observer.watch(pool.context.running)
        observer.begin_phase("tasks", len(tasks))
        try:
            return await pool.run(specs)
        finally:
            await pool.close()

    also = AlsoRecord(success_at=config.evaluation.success_at)
    with RunObserver(folder, total_steps=0, console=stderr_console(), also=also) as observer:
        groups = run_loop(until_done(run_all(observer), signals(message=CANCELLING)))
        observer.end_rollout(groups)
    return RolledOut(folder, groups)
