"""`polyturn rollout`: run some of the training tasks, record what happened, print it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from polyturn import build
from polyturn.cli.console import Output, command, stderr_console
from polyturn.cli.runs import keep_tokenizer, new_run_folder, open_place
from polyturn.cli.show import trajectory_table
from polyturn.config.load import write_resolved
from polyturn.core.run_loop import run_loop
from polyturn.core.task import Task
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.rollout.group import GroupSpec
from polyturn.rollout.pool import RolloutPool
from polyturn.training.observer import RunObserver


def some_of(tasks: Sequence[Task], num: int, *, of_each: bool) -> Sequence[Task]:
    """Return the first `num` tasks; with `of_each` the first of every environment, then the second of every one, …"""
    if not of_each:
        return tasks[:num]
    by_source: dict[str | None, list[Task]] = {}
    for task in tasks:
        by_source.setdefault(task.data_source, []).append(task)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_source.values()))
    return list(itertools.islice((task for task in in_turn if task is not None), num))


def run(path: Path, overrides: Sequence[str], *, checkpoint: Path | None, num_tasks: int) -> None:
    """Run `num_tasks` groups of `train.group_size` members and record them."""
    place, resolved = open_place(path, overrides)
    config = place.config
    parts = build.build_parts(place, checkpoint=build.model_folder(checkpoint))
    tasks = build.build_train_tasks(place)
    tasks = some_of(build.fitting(parts, tasks, name="data.train"), num_tasks, of_each=isinstance(config.env, list))
    build.check_run(parts, tasks, name="data.train")
    folder = new_run_folder(Path(config.out) / f"{config.name}-rollout")
    write_resolved(resolved, folder / "config.yaml")
    keep_tokenizer(parts, folder)

    async def run_all(observer: RunObserver) -> list[TrajectoryGroup]:
        pool = RolloutPool(
            parts.context,
            max_concurrent=config.rollout.max_concurrent,
            max_failed_share=config.rollout.max_failed_share,
            on_group=lambda group: observer.on_rollout(group, total=len(tasks)),
        )
        specs = [
            GroupSpec(id=f"g{i}", task=task, size=config.train.group_size, seed=config.seed) for i, task in enumerate(tasks)
        ]
        groups = await pool.run(specs)
        await parts.context.close()
        return groups

    with RunObserver(folder, total_steps=0, console=stderr_console()) as observer:
        groups = run_loop(run_all(observer))
    out = Output()
    out.table(trajectory_table([t for g in groups for t in g.trajectories]))
    out.fact("look at one", command("show", folder, groups[0].trajectories[0].id))
