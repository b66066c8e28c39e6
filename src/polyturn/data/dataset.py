"""TaskDataset: a sequence of tasks from jsonl and parquet files, or from a generator that a config names.

    TaskDataset.open("data/train.parquet", split="train")[0]  ->  Task(id="train-0", ...)
    TaskDataset.open(["a.jsonl", "more/*.jsonl"], split="train")

Rows stay in the compact form of their file (Arrow columns, jsonl bytes) and become tasks on access, so a million rows need
little more memory than their file. `check_tasks` reads everything once before training starts.
"""

from __future__ import annotations

import bisect
import glob
import inspect
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from polyturn.core.code_origin import defined_at
from polyturn.core.errors import ConfigError, DataError, did_you_mean, one_line
from polyturn.core.task import Task, select_tools
from polyturn.data.rows import task_from_row
from polyturn.data.sequences import TaskSequence
from polyturn.infra.live import NameOrObject
from polyturn.infra.plugins import import_attr
from polyturn.interactions.registry import missing_interaction_name, unknown_interaction

_HALF_PAIR = re.compile("[\ud800-\udfff]")
"""A character that JSON may contain and UTF-8 may not."""


class Rows(Protocol):
    """The rows of one file, or of a data set."""

    path: Path

    def __len__(self) -> int: ...

    def row(self, index: int) -> Any:
        """Return row `index` as stored in the file."""
        ...

    def where(self, index: int) -> str:
        """Return the file and line of row `index`, for messages."""
        ...


class JsonlRows:
    """The rows of a jsonl file: its bytes, and the start of each line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # the byte-order mark that some editors write
        bounds, start, number = [], 0, 0
        while start < len(self._data):
            end, number = self._data.find(b"\n", start), number + 1
            end = len(self._data) if end < 0 else end
            if self._data[start:end].strip():
                bounds.append((start, end, number))
            start = end + 1
        self._bounds = np.array(bounds, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._bounds)

    def row(self, index: int) -> Any:
        start, end, _ = self._bounds[index]
        try:
            return json.loads(self._data[start:end])
        except (ValueError, RecursionError) as problem:
            text = self._data[start : min(end, start + 60)].decode("utf-8", "replace")
            raise DataError(f"{self.where(index)}: this is not JSON ({one_line(problem)}): {text!r}") from problem

    def where(self, index: int) -> str:
        return f"{self.path}, line {self._bounds[index][2]}"


class _ParquetPart:
    """The rows of a parquet file, as an Arrow table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._table: pa.Table = pq.read_table(path, memory_map=True)
        except (pa.ArrowException, OSError, ValueError) as problem:
            raise DataError(f"{path} cannot be read as parquet ({one_line(problem)}); write the file again") from problem

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> Any:
        try:
            return self._table.slice(index, 1).to_pylist()[0]
        except (pa.ArrowException, ValueError, OverflowError) as problem:
            raise DataError(
                f"{self.where(index)}: the row cannot be read ({one_line(problem)}); write the file again"
            ) from problem

    def where(self, index: int) -> str:
        return f"{self.path}, row {index}"


class _RowsPart:
    """Rows in memory: a list, or a data set of Hugging Face."""

    def __init__(self, rows: Sequence[Any], *, name: str) -> None:
        self.path = Path(name)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Any:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self.path}, row {index}"


_PARTS: dict[str, Callable[[Path], Rows]] = {".jsonl": JsonlRows, ".ndjson": JsonlRows, ".parquet": _ParquetPart}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSummary:
    """The result of `check_tasks`."""

    num_tasks: int
    data_sources: Mapping[str | None, int]
    """Data source -> number of its tasks; None counts tasks without one."""
    interactions: Mapping[str | None, int]
    """Interaction -> number of its tasks; None counts tasks without one."""
    tools: Mapping[str, int]
    """Tool -> number of tasks that name it."""
    num_with_tools: int
    """Number of tasks with at least one configured tool."""
    unknown_tools: Mapping[str, int]
    """Tool that is not configured -> number of tasks that name it in columns that may serve other runs."""


class TaskDataset(TaskSequence):
    """The tasks of one or more files, in the order of the files."""

    def __init__(self, parts: Sequence[Rows], *, split: str, columns: Mapping[str, str] | None = None) -> None:
        """Create a dataset from rows; `columns` maps names of a task's columns to their names in the rows.

        Raises:
            DataError: the first row of a part lacks one of these columns.
        """
        self.split = split
        self._parts = list(parts)
        self._columns = dict(columns or {})
        for part in self._parts if self._columns else []:
            first = part.row(0) if len(part) else {}
            for key, own in self._columns.items():
                if isinstance(first, Mapping) and first and own not in first:
                    raise DataError(
                        f"columns has {key}: {own}, but {str(part.path)!r} has no column {own!r}.{did_you_mean(own, first)}"
                    )
        self._ends = list(itertools.accumulate(len(p) for p in self._parts))

    @classmethod
    def open(
        cls,
        files: str | Path | Sequence[str | Path],
        *,
        split: str,
        base: Path | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> TaskDataset:
        """Open jsonl and parquet files.

        Args:
            files: One path or several; `~` and globs are expanded, with matches in sorted order.
            split: "train" or "eval"; prefix of the ids of tasks without an id.
            base: The folder that relative paths are resolved against.
            columns: Task column -> its name in the files, if different: `{"prompt": "question"}`.

        Raises:
            DataError: a file is missing, unsupported or damaged, lacks a column, or there are no rows.
        """
        named = [files] if isinstance(files, str | Path) else list(files)
        paths = [path for name in named for path in _find(Path(name), base or Path())]
        if not paths:
            key = "data.train.files" if split == "train" else "evaluation.data.files"
            raise DataError(f"{key} is empty; name at least one .jsonl or .parquet file")
        dataset = cls([open_rows(path) for path in paths], split=split, columns=columns)
        if not len(dataset):
            raise DataError(f"there are no rows in {', '.join(map(str, paths))}; {split!r} needs at least one task")
        return dataset

    @classmethod
    def of(
        cls, rows: Sequence[Any], *, split: str, name: str = "tasks", columns: Mapping[str, str] | None = None
    ) -> TaskDataset:
        """Create a dataset from a sequence of rows.

        Args:
            rows: The rows: a list, or another object with a length and rows by index.
            split: "train" or "eval".
            name: The rows' name in messages.
            columns: Task column -> its name in the rows, if different.

        Raises:
            DataError: there are no rows, or they lack a column.
        """
        if not len(rows):
            raise DataError(f"{name} has no rows; {split!r} needs at least one task")
        return cls([_RowsPart(rows, name=name)], split=split, columns=columns)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def where(self, index: int) -> str:
        """Return the file and the line or row of task `index`, for messages."""
        part, number = self._located(index)
        return part.where(number)

    def _located(self, index: int) -> tuple[Rows, int]:
        """Return the part with task `index`, and the number of its row there."""
        part = bisect.bisect_right(self._ends, index)
        return self._parts[part], index - (self._ends[part - 1] if part else 0)

    def _task(self, index: int) -> Task:
        part, number = self._located(index)
        row = part.row(number)
        if self._columns and isinstance(row, Mapping):
            # A renamed column is kept under its new name only: interactions and rewards get all further columns of a row.
            others = {key: value for key, value in row.items() if key not in self._columns.values()}
            row = others | {key: row[own] for key, own in self._columns.items() if own in row}
        return task_from_row(row, index=index, split=self.split, source=str(part.path), where=part.where(number))


def generate_tasks(
    path: NameOrObject, kwargs: Mapping[str, Any] | None = None, *, split: str, base: Path | None = None
) -> Sequence[Task]:
    """Call the task generator that `path` names and return its tasks.

    Args:
        path: `package.module:function` or `file.py:function`; the function returns a sequence of tasks or rows.
        kwargs: The generator's arguments.
        split: "train" or "eval"; prefix of the ids of rows without an id.
        base: The folder that a relative file path is resolved against.

    Raises:
        ConfigError: the name does not exist, or the generator does not take these arguments.
        DataError: the generator returned no tasks.
    """
    kwargs = kwargs or {}
    key = "data.train.generator" if split == "train" else "evaluation.data.generator"
    make = import_attr(path, base=base, key=key)
    if not callable(make):
        raise ConfigError(f"the task generator {path!r} is {make!r}, which cannot be called; name a function")
    try:
        inspect.signature(make).bind(**kwargs)
    except TypeError as problem:
        raise ConfigError(
            f"the task generator {path!r} does not accept {kwargs!r}: {one_line(problem)}; change the key `kwargs`, or the "
            f"function's parameters{defined_at(make)}"
        ) from problem
    tasks = make(**kwargs)
    if not isinstance(tasks, Sequence) or isinstance(tasks, str):
        raise DataError(
            f"the task generator {path!r} returned a {type(tasks).__name__}; return a sequence of rows or of Task"
            f"{defined_at(make)}"
        )
    if not tasks:
        raise DataError(
            f"the task generator {path!r} returned no task for {kwargs!r}; return at least one{defined_at(make)}"
        )
    if isinstance(tasks[0], Mapping):
        return TaskDataset.of(tasks, split=split, name=str(path))
    if not isinstance(tasks[0], Task):
        raise DataError(
            f"the task generator {path!r} returned a sequence of {type(tasks[0]).__name__}; return rows or Task"
            f"{defined_at(make)}"
        )
    return tasks


def check_tasks(
    tasks: Sequence[Task],
    *,
    tools: Collection[str],
    interactions: Collection[str],
    name: str = "tasks",
    require_interaction_name: bool = False,
    also: Callable[[Task], None] | None = None,
) -> DatasetSummary:
    """Read every task once, so that an invalid row stops the run before it starts, and return a summary.

    A task's optional interaction is ignored if the run configures none.

    Args:
        tasks: The tasks.
        tools: The names of the configured tools.
        interactions: The names of the configured interactions.
        name: The tasks' name in messages, for instance the file.
        require_interaction_name: Whether to refuse tasks whose interaction has only the default name.
        also: A further check, called with every valid task.

    Raises:
        DataError: a row is invalid, a name is not configured, two tasks have the same id, or an id cannot be written.
    """
    sources: Counter[str | None] = Counter()
    num_by_interaction: Counter[str | None] = Counter()
    ids: Counter[str] = Counter()
    num_with_tools = 0
    unknown: Counter[str] = Counter()
    seen: dict[str, int] = {}
    for index, task in enumerate(tasks):
        at = tasks.where(index) if isinstance(tasks, TaskSequence) else f"number {index}"
        where = f"{name}, task {task.id!r} ({at})"
        if seen.setdefault(task.id, index) != index:
            raise DataError(f"{where}: task number {seen[task.id]} has the same id; an id must be unique in its dataset")
        for key, text in (("id", task.id), ("data_source", task.data_source or "")):
            if (half := _HALF_PAIR.search(text)) is not None:
                raise DataError(
                    f"{where}: the {key} has half of a surrogate pair, {half[0]!a}, which is not a character; remove it"
                )
        try:
            chosen, skipped = select_tools(task, tools)
        except DataError as problem:
            raise DataError(f"{where}: {problem}") from problem
        ids.update(chosen if task.tools is not None else ())
        num_with_tools += bool(chosen)
        unknown.update({*skipped, *task.tools_kwargs}.difference(tools))
        interaction = task.interaction
        if interaction is not None and interaction.is_optional and not interactions:
            interaction = None
        if interaction is not None and require_interaction_name and "name" not in interaction.kwargs:
            raise DataError(f"{missing_interaction_name(interactions)} ({where})")
        if interaction is not None and interaction.name not in interactions:
            raise DataError(f"{unknown_interaction(interaction.name, interactions)} ({where})")
        num_by_interaction[None if interaction is None else interaction.name] += 1
        sources[task.data_source] += 1
        if also is not None:
            also(task)
    return DatasetSummary(
        num_tasks=len(tasks),
        data_sources=sources,
        interactions=num_by_interaction,
        tools=ids,
        num_with_tools=num_with_tools,
        unknown_tools=unknown,
    )


def _find(path: Path, base: Path) -> list[Path]:
    name = os.path.expanduser(path)
    full = base / name
    if os.path.isfile(full):  # is_file raises for a name that is too long
        return [full]
    if any(c in name for c in "*?["):
        matches = sorted(p for m in glob.glob(name, root_dir=base, recursive=True) if (p := base / m).is_file())
        if not matches:
            raise DataError(f"no file matches {str(full)!r}.{inside(full.parent)}")
        return matches
    if os.path.isdir(full):
        raise DataError(
            f"{str(full)!r} is a folder; name its files, for instance {str(full / '*.parquet')!r}.{inside(full)}"
        )
    raise DataError(f"there is no file {str(full)!r}.{inside(full.parent, full.name)}{_on_hub(path)}")


def _on_hub(path: Path) -> str:
    """Return a hint if a path looks like a data set on the hub (owner/name), else an empty string."""
    if path.suffix in _PARTS or path.is_absolute() or len(path.parts) != 2 or path.parts[0] in (".", "..", "~"):
        return ""
    return f" If {str(path)!r} is a data set on the Hugging Face hub, name it by `dataset: {path}` in place of `files`."


def inside(folder: Path, wanted: str = "") -> str:
    """Return a sentence that lists the content of `folder`, or only the name that is close to `wanted`."""
    if not os.path.isdir(folder):
        return f" Its folder does not exist either: {str(folder)!r}."
    names = sorted(p.name for p in folder.iterdir())
    if not names:
        return " Its folder is empty."
    near = did_you_mean(wanted, names) if wanted else ""
    if near.startswith(" Did"):
        return near
    return f" In that folder: {', '.join(names[:10])}{', …' if len(names) > 10 else ''}."


def open_rows(path: Path) -> Rows:
    """Open a jsonl or parquet file.

    Raises:
        DataError: the file has an unsupported ending, or is damaged.
    """
    kind = _PARTS.get(path.suffix)
    if kind is None:
        raise DataError(
            f"{path} has the unsupported ending {path.suffix!r}; tasks are read from {', '.join(sorted(_PARTS))}"
        )
    return kind(path)
