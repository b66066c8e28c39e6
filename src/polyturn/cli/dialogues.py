"""Evaluation dialogues before and after training, side by side.

task eval-3           before: reward 0             after: reward 1
user                  What is 21 + 18? ...         What is 21 + 18? ...
assistant             To solve this, we need       21 + 18 = 39
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from polyturn.api.run import message_text
from polyturn.core.printable import printable
from polyturn.core.trajectory import Trajectory
from polyturn.store.stored_run import StoredRun

MAX_CHARS = 240
"""Largest number of characters of a message in a column."""


def dialogues(folder: Path, split: str, *, limit: int = 2) -> list[Table]:
    """Return tables of tasks whose reward rose from the first evaluation to the last, with both dialogues.

    One task with several turns in the last evaluation comes first, if there is one; then the tasks with one turn; then the
    other tasks with several turns. If no reward rose, the first tasks of the evaluation are shown.

    Args:
        folder: The run's folder.
        split: The evaluation, for instance `eval/greedy`.
        limit: Largest number of tasks.
    """
    run = StoredRun(folder).select(split=split)
    if not len(run):
        return []
    first, last = (pick(run.table(["step"])["step"]).as_py() for pick in (pc.min, pc.max))
    if first == last:
        return []
    columns = ["id", "task_id", "reward", "num_turns"]
    before = {row["task_id"]: row for row in run.select(step=first).table(columns).to_pylist()}
    after = {row["task_id"]: row for row in run.select(step=last).table(columns).to_pylist()}
    common = [task for task in after if task in before]
    improved = [task for task in common if (after[task]["reward"] or 0) > (before[task]["reward"] or 0)]
    repaired = [task for task in improved if after[task]["num_turns"] > 1]
    at_once = [task for task in improved if after[task]["num_turns"] == 1]
    chosen = [*repaired[:1], *at_once, *repaired[1:]] or common
    return [
        _side_by_side(
            run.trajectory(before[task]["id"], first, split), run.trajectory(after[task]["id"], last, split), task=task
        )
        for task in chosen[:limit]
    ]


def _side_by_side(before: Trajectory, after: Trajectory, *, task: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"task {printable(task)}", title_justify="left")
    table.add_column("")
    for name, one in (("before", before), ("after", after)):
        table.add_column(f"{name}: reward {one.reward.total:g}" if one.reward else f"{name}: no reward", ratio=1)
    shared = 0
    for old, new in zip(before.messages, after.messages, strict=False):
        if (old.role, message_text(old)) != (new.role, message_text(new)):
            break
        shared += 1
    for number in range(max(len(before.messages), len(after.messages))):
        roles = [one.messages[number].role for one in (before, after) if number < len(one.messages)]
        cells = [_cell(one, number) for one in (before, after)]
        if not any(cell.plain for cell in cells) and "assistant" not in roles:
            continue  # the empty answer of an interaction that ended the episode
        table.add_row("/".join(dict.fromkeys(roles)), cells[0], cells[1] if number >= shared else Text("the same", "dim"))
    return table


def _cell(trajectory: Trajectory, number: int) -> Text:
    if number >= len(trajectory.messages):
        return Text("")
    message = trajectory.messages[number]
    text = printable(message_text(message))
    if not text and message.role == "assistant":
        return Text("(no text)", "dim")
    return Text(text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ... ({len(text)} characters)")
