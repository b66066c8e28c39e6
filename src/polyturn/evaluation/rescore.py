"""Scores recorded trajectories again with another reward function, without sampling.

table = await rescore(open_store("runs/quickstart"), router)
id  group  step  split  reward  new_reward  info  error
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pyarrow as pa

from polyturn.core.errors import RewardError
from polyturn.core.serde import to_json
from polyturn.rewards.router import RewardRouter
from polyturn.store.schema import StoredTrajectory
from polyturn.store.stored_run import StoredRun

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "group": pa.string(),
        "step": pa.int64(),
        "split": pa.string(),
        "reward": pa.float64(),
        "new_reward": pa.float64(),
        "info": pa.string(),
        "error": pa.string(),
    }
)


async def rescore(store: StoredRun, router: RewardRouter, *, max_concurrent: int = 256) -> pa.Table:
    """Return the recorded and the new reward of each trajectory of `store` that did not fail.

    If a trajectory cannot be scored, its new reward is null and `error` has the reason.

    Args:
        store: The trajectories, possibly filtered.
        router: Scores them; scores of tools and interactions are read from the record.
        max_concurrent: Largest number of trajectories scored concurrently.
    """
    slots = asyncio.Semaphore(max_concurrent)

    async def one(record: StoredTrajectory) -> dict[str, Any]:
        trajectory = record.trajectory
        row: dict[str, Any] = {"new_reward": None, "info": None, "error": None}
        old = trajectory.reward
        known = {} if old is None else old.components
        tools = {name.removeprefix("tool/"): value for name, value in known.items() if name.startswith("tool/")}
        async with slots:
            try:
                new = await router.score(trajectory, tools)
                row |= {"new_reward": new.total, "info": json.dumps(to_json(new.info))}
            except RewardError as problem:
                row["error"] = str(problem)
        keys = {"id": trajectory.id, "group": record.group, "step": record.step, "split": record.split}
        return {**keys, "reward": None if old is None else old.total, **row}

    rows = []
    pending: list[asyncio.Task[dict[str, Any]]] = []
    for record in store.records():
        if record.trajectory.is_failed:
            continue
        pending.append(asyncio.create_task(one(record)))
        if len(pending) >= 4 * max_concurrent:  # limits the unscored trajectories in memory
            rows += await asyncio.gather(*pending)
            pending = []
    rows += await asyncio.gather(*pending)
    return pa.Table.from_pylist(rows, schema=SCHEMA)
