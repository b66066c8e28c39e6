"""Write the quick start's tasks as verl's parquet rows.

python tests/data/verl_project/quickstart/rows.py --out FOLDER [--train 4000] [--test 512]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from polyturn.core.task import Task
from polyturn.infra.plugins import import_attr

TASKS = Path(__file__).parents[4] / "examples/quickstart/tasks.py"
tasks: Any = import_attr(f"{TASKS}:tasks")


def row(task: Task, index: int) -> dict[str, Any]:
    """Return a task in verl's columns; each may call both tools."""
    is_lookup = task.interaction is None
    extra: dict[str, Any] = {
        "index": index,
        "need_tools_kwargs": True,
        "tools_kwargs": {
            "lookup": {"create_kwargs": {"item": task.extra["item"] if is_lookup else ""}},
            "calculator": {"create_kwargs": {"unused": ""}},
        },
        "interaction_kwargs": None if task.interaction is None else dict(task.interaction.kwargs),
    }
    return {
        "data_source": task.data_source,
        "prompt": [{"role": m.role, "content": m.text} for m in task.prompt],
        "ability": "quickstart",
        "reward_model": {"style": "rule", "ground_truth": task.ground_truth or ""},
        "extra_info": extra,
    }


def main() -> None:
    """Write train.parquet and test.parquet."""
    parser = argparse.ArgumentParser(description="Write the quick start's tasks as verl's parquet rows.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", type=int, default=4000)
    parser.add_argument("--test", type=int, default=512)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split, found in (
        ("train", tasks(seed=0, num_tasks=arguments.train)),
        ("test", tasks(seed=7, num_tasks=arguments.test, is_held_out=True)),
    ):
        rows = [row(task, index) for index, task in enumerate(found)]
        pq.write_table(pa.Table.from_pylist(rows), arguments.out / f"{split}.parquet")


if __name__ == "__main__":
    main()
