"""Tasks from a data set of the Hugging Face hub, read by `datasets`.

    open_hub_dataset("openai/gsm8k", split="train", part="train", subset="main", columns={"prompt": "question"})

Separate from `dataset.py`, which reads files without a library. Rows become tasks by the same rules; `columns` maps our
names to those in the data set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, DataError, one_line
from polyturn.data.dataset import TaskDataset, inside
from polyturn.tokens.hub import unreachable

ROW_FILES = ("jsonl", "parquet", "json", "csv", "arrow", "ndjson", "tsv", "txt", "tar", "zip", "gz", "zst", "xz", "bz2")
"""Suffixes of files with rows; a folder without one is refused before `datasets` looks at every file."""


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
        split: "train" or "eval"; starts the ids of tasks that have none.
        part: The data set's split, or a part of one: `train[:1000]`.
        subset: Which of its configurations, where it has several.
        first: Fetch only so many rows, from the first on; None fetches all.
        columns: The name that a task's column has in the data set, where it is another.
        base: The folder that a relative folder starts from.

    Raises:
        ConfigError: `datasets` is not installed.
        DataError: there is no such data set, part or column, or it cannot be fetched.
    """
    try:
        import datasets
        from datasets.load import CachedDatasetModuleFactory
    except ImportError as problem:
        raise ConfigError(
            f"the data set {name!r} is read by the package datasets, which is not installed: pip install 'polyturn[hub]'"
        ) from problem
    folder = (base or Path()) / Path(name).expanduser()
    why = _why_out_of_reach(name, folder)
    fetch = datasets.DownloadConfig(local_files_only=True) if why else None
    try:
        if why:
            CachedDatasetModuleFactory(name).get_module()  # raises where the cache does not hold it
        source = str(folder) if folder.is_dir() else name
        dataset = datasets.load_dataset(source, subset, split=part, streaming=first is not None, download_config=fetch)
        rows: Sequence[Mapping[str, Any]] = dataset if first is None else list(dataset.take(first))
    except Exception as problem:  # whatever a data set's files, its loader or the network bring about
        cause = (isinstance(problem, datasets.exceptions.DatasetGenerationError) and problem.__cause__) or problem
        reason = f"the hub cannot be reached ({why}) and its cache does not hold it" if why else one_line(cause)[:300]
        local = "see `subset` and `split`" + (", or name its files by `files`" if folder.is_dir() else "")
        advice = "try again where the hub can be reached, or name files by `files`" if why else local
        raise DataError(f"the data set {name!r} cannot be opened: {reason}; {advice}") from problem
    if not len(rows):
        raise DataError(f"the data set {name!r} has no row in {part!r}; {split!r} needs at least one task")
    return TaskDataset.of(rows, split=split, name=name, columns=columns)


def _why_out_of_reach(name: str, folder: Path) -> str | None:
    """Return why the hub cannot be asked for a data set; None where it can, or where the name is of a folder.

    Raises:
        DataError: it is neither the name of one on the hub nor of a folder with rows.
    """
    if folder.is_file():
        raise DataError(f"`dataset` names the file {name!r}; name files by `files`")
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") != 1:
            raise DataError(
                f"there is no folder {str(folder)!r}; `dataset` names a data set on the hub as owner/name, or a folder"
            )
        return unreachable()  # one attempt; the library itself would try for a minute
    if not any(path.suffix.lower().removeprefix(".") in ROW_FILES for path in folder.rglob("*")):
        kinds = ", ".join(ROW_FILES[:4])
        raise DataError(f"the folder {str(folder)!r} has no file of rows ({kinds}, …); name one that has.{inside(folder)}")
    return None
