"""Reads tasks from a data set of the Hugging Face hub with the package `datasets`.

    open_hub_dataset("openai/gsm8k", split="train", part="train", subset="main", columns={"prompt": "question"})

Rows become tasks by the same rules as rows of files. `columns` maps a task's columns to their names in the data set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, DataError, one_line
from polyturn.data.dataset import TaskDataset, inside
from polyturn.tokens.hub import unreachable

ROW_FILES = ("jsonl", "parquet", "json", "csv", "arrow", "ndjson", "tsv", "txt", "tar", "zip", "gz", "zst", "xz", "bz2")
"""Endings of files with rows; a folder without such a file is refused before `datasets` inspects every file."""


def open_hub_dataset(
    name: str,
    *,
    split: str,
    part: str,
    subset: str | None = None,
    first: int | None = None,
    columns: Mapping[str, str] | None = None,
    base: Path | None = None,
) -> TaskDataset:
    """Open a data set by its name on the hub, or a folder with one.

    Args:
        name: owner/name on the hub, or a folder.
        split: "train" or "eval"; prefix of the ids of tasks without an id.
        part: A split of the data set, or a slice of one: `train[:1000]`.
        subset: The data set's configuration, if it has several.
        first: Number of rows to fetch, from the beginning; None fetches all.
        columns: Task column -> its name in the data set, if different.
        base: The folder that a relative folder is resolved against.

    Raises:
        ConfigError: `datasets` is not installed.
        DataError: the data set, the part or a column does not exist, or fetching fails.
    """
    try:
        import datasets
        from datasets.load import CachedDatasetModuleFactory
    except ImportError as problem:
        raise ConfigError(
            f"reading the data set {name!r} needs the package datasets, which is not installed: pip install 'polyturn[hub]'"
        ) from problem
    folder = (base or Path()) / os.path.expanduser(name)
    why = _why_out_of_reach(name, folder)
    fetch = datasets.DownloadConfig(local_files_only=True) if why else None
    try:
        if why:
            CachedDatasetModuleFactory(name).get_module()  # raises if the data set is not in the cache
        source = str(folder) if folder.is_dir() else name
        dataset = datasets.load_dataset(source, subset, split=part, streaming=first is not None, download_config=fetch)
        rows: Sequence[Mapping[str, Any]] = dataset if first is None else list(dataset.take(first))
    except Exception as problem:  # a data set's files, its loader or the network may raise anything
        cause = (isinstance(problem, datasets.exceptions.DatasetGenerationError) and problem.__cause__) or problem
        reason = f"the hub cannot be reached ({why}) and the data set is not in its cache" if why else one_line(cause)[:300]
        local = "see `subset` and `split`" + (", or use `files`" if folder.is_dir() else "")
        advice = "try again with access to the hub, or use `files`" if why else local
        raise DataError(f"the data set {name!r} cannot be opened: {reason}; {advice}") from problem
    if not len(rows):
        raise DataError(f"the data set {name!r} has no rows in {part!r}; {split!r} needs at least one task")
    return TaskDataset.of(rows, split=split, name=name, columns=columns)


def _why_out_of_reach(name: str, folder: Path) -> str | None:
    """Return why the hub cannot be reached for a data set; None if it can, or if the name is a folder.

    Raises:
        DataError: the name is neither a name on the hub nor a folder with rows.
    """
    if os.path.isfile(folder):  # is_file raises for a name that is too long
        raise DataError(f"`dataset` is the file {name!r}; use `files` for files")
    if not os.path.isdir(folder):
        if name.startswith((".", "/", "~")) or name.count("/") != 1:
            raise DataError(
                f"there is no folder {str(folder)!r}; `dataset` is owner/name of a data set on the hub, or a folder"
            )
        return unreachable()  # one attempt; the library itself would try for a minute
    if not any(path.suffix.lower().removeprefix(".") in ROW_FILES for path in folder.rglob("*")):
        kinds = ", ".join(ROW_FILES[:4])
        raise DataError(
            f"the folder {str(folder)!r} has no file with rows ({kinds}, …); use another folder.{inside(folder)}"
        )
    return None
