"""Convert and check rows from a program.

    rows_of(frame, "tasks")  ->  a sequence of dicts that can be read several times

`given.py` puts the rows into the configuration.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, DataError
from polyturn.core.reward import brief
from polyturn.core.task import Task
from polyturn.data.dataset import TaskDataset
from polyturn.data.rows import QUESTIONS, advice_for

FILES = (".jsonl", ".ndjson", ".parquet")
PROMPTS = {"prompt", "messages"}
"""A row needs one of these columns."""


def refuse_coroutine(value: Any, what: str) -> None:
    """Raise for a coroutine from an async function that was not awaited."""
    if inspect.iscoroutine(value):
        name = value.__name__
        value.close()
        raise ConfigError(
            f"{what} is a coroutine: {name} is async and was called without await; write {what}=await {name}(…), or "
            f"give the function itself: {name}"
        )


def checked(value: Any, what: str) -> Any:
    """Check the form of tasks, and return them; a single row becomes a list.

    Raises:
        ConfigError, DataError: the value does not contain rows.
    """
    refuse_coroutine(value, what)
    if isinstance(value, Mapping) and not hasattr(value, "column_names"):
        prompt = value.get("prompt", value.get("messages"))
        if prompt is None:
            raise DataError(f"{what} is a dict with {sorted(map(str, value))[:6]}; give one split, or a list of rows")
        if isinstance(prompt, list | tuple) and prompt and not isinstance(prompt[0], Mapping):
            raise DataError(f"{what} is a dict of columns; give rows: {what}=datasets.Dataset.from_dict({what})")
        return [value]
    if isinstance(value, type):
        raise ConfigError(f"{what} is the class {value.__name__}; give an instance: {what}={value.__name__}(…)")
    if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value) or hasattr(value, "__aiter__"):
        name = getattr(value, "__name__", type(value).__name__)
        raise ConfigError(f"{what} is async; give its result: {what}=await {name}(…)")
    if isinstance(value, str | Path) and str(value).endswith((".json", ".csv", ".tsv")):
        read = "json" if str(value).endswith(".json") else "csv"
        raise DataError(
            f"{what} is {str(value)!r}; files must be jsonl or parquet; read it first: "
            f"{what}=pandas.read_{read}({str(value)!r})"
        )
    is_path = isinstance(value, str) and (value.endswith(FILES) or os.path.exists(value))
    if isinstance(value, str) and len(value.split()) not in (1, 2) and not is_path:
        raise DataError(f"{what} is a text, {value!r:.60}; give a list of them: {what}=[…]")
    return value


def called(function: Any, what: str, name: str) -> Any:
    """Return the result of a function without arguments."""
    try:
        inspect.signature(function).bind()
    except TypeError as problem:
        raise ConfigError(
            f"{what} is the function {name}, which needs arguments ({problem}); call it, {what}={name}(…), or if it scores "
            f"trajectories give it as the reward: reward={name}"
        ) from problem
    return function()


def rows_of(value: Any, what: str) -> Sequence[Any]:
    """Return rows as a sequence that can be read several times."""
    if hasattr(value, "to_dicts"):
        return list(value.to_dicts())  # a polars frame
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        # A pandas frame, whose missing cells are NaN
        return list(value.astype(object).where(value.notna(), None).to_dict("records"))
    if hasattr(value, "to_pylist"):
        return list(value.to_pylist())  # an Arrow table
    if isinstance(value, Iterator):
        rows = list(value)
        if not rows:
            raise DataError(
                f"{what} is a generator, which can be read only once; make a list, rows = list(…), and give {what}=rows"
            )
        return rows
    if hasattr(value, "keys"):
        names = ", ".join(map(str, value))
        raise DataError(f"{what} has the splits {names}; give one: {what}=dataset[{next(iter(value), 'train')!r}]")
    if isinstance(value, set | frozenset):
        raise DataError(f"{what} is a set, which has no fixed order; give a list: {what}=sorted({what})")
    if not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        if hasattr(value, "__iter__"):
            write = f"{what}=list(itertools.islice({what}, 1000))"
            raise DataError(f"{what} is a {type(value).__name__}, which has no length; give a list: {write}")
        raise DataError(f"{what} is {brief(value)}; give rows, the path of a jsonl or parquet file, or a dataset")
    return value  # type: ignore[no-any-return]


def check_first(row: Any, what: str, *, has_columns: bool) -> None:
    """Raise if the first row is not a dict or has no prompt."""
    if isinstance(row, Task):
        return
    if isinstance(row, list) and row and isinstance(row[0], Mapping):
        raise DataError(f"{what} has conversations as rows; write {what}=[{{'prompt': messages}} for messages in {what}]")
    if not isinstance(row, Mapping):
        raise DataError(f"the first row of {what} is {brief(row)}; a row must be a dict: {{'prompt': 'What is 2 + 2?'}}")
    if "prompt" in row or "messages" in row:
        return
    if "conversations" in row and (advice := advice_for(row)):
        raise DataError(f"{what} has no 'prompt'.{advice}")
    columns = [str(name) for name in row]
    column = next((name for wanted in QUESTIONS for name in columns if name.lower() == wanted), None) or (
        columns[0] if columns else "question"
    )
    write = (
        f"{what}={what}.rename_column({column!r}, 'prompt')"
        if has_columns
        else f"{what}=[{{**row, 'prompt': row[{column!r}]}} for row in {what}]"
    )
    raise DataError(f"{what} has the columns {columns[:8]}, without 'prompt'; write {write}")


def tasks_of(rows: Sequence[Any], *, split: str, name: str) -> Sequence[Task]:
    """Return rows as lazily made tasks."""
    if isinstance(rows[0], Task):
        return rows
    return TaskDataset.of(rows, split=split, name=name)
