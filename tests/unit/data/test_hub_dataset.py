"""A data set by its name, or as a folder in the form of the hub's repositories: no network, no script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from polyturn.build.tasks import build_tasks
from polyturn.config.models import TaskSourceConfig
from polyturn.core.errors import DataError
from support.refusals import refuses

ASKS = {"prompt": "question", "ground_truth": "answer"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder as the hub has it: a split to a file, two configurations in the head of its README."""
    folder = tmp_path / "sums"
    for subset, add in (("main", 0), ("large", 100)):
        (folder / subset).mkdir(parents=True)
        for split, count in (("train", 5), ("test", 2)):
            rows = [{"question": f"{i + add} + 1?", "answer": str(i + add + 1), "level": i} for i in range(count)]
            pq.write_table(pa.Table.from_pylist(rows), folder / subset / f"{split}-00000-of-00001.parquet")
    parts = "".join(f"- config_name: {s}\n  data_dir: {s}\n" for s in ("main", "large"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{parts}---\n")
    return folder


def source(**given: Any) -> TaskSourceConfig:
    return TaskSourceConfig(**given)


def test_rows_become_tasks_under_renamed_columns(repository: Path) -> None:
    wanted = source(dataset="sums", subset="main", columns=ASKS)
    tasks = build_tasks(wanted, base=repository.parent, split="train")
    assert [t.prompt[0].text for t in tasks] == [f"{i} + 1?" for i in range(5)]
    assert tasks[4].id == "train-4" and tasks[4].ground_truth == "5" and tasks[4].extra == {"level": 4}


def test_evaluation_takes_the_test_split_by_default(repository: Path) -> None:
    wanted = source(dataset="sums", subset="large", columns=ASKS)
    assert len(build_tasks(wanted, base=repository.parent, split="eval")) == 2
    part = source(dataset="sums", subset="large", split="train[1:4]", columns=ASKS)
    tasks = build_tasks(part, base=repository.parent, split="eval")
    assert [t.prompt[0].text for t in tasks] == ["101 + 1?", "102 + 1?", "103 + 1?"]


def test_streaming_fetches_the_first_rows(repository: Path) -> None:
    wanted = source(dataset="sums", subset="main", columns=ASKS, streaming=True, limit=3)
    assert len(build_tasks(wanted, base=repository.parent, split="train")) == 3


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dataset": "sums"}, "large.*main.*see `subset`"),
        ({"dataset": "sums", "subset": "main", "split": "dev"}, "dev.*see `subset` and `split`"),
        ({"dataset": "sums", "subset": "main", "columns": {"prompt": "questions"}}, "Did you mean 'question'"),
        ({"dataset": "sums/README.md"}, "use `files` for files"),
        ({"dataset": "./nothing"}, "there is no folder"),
        ({"dataset": "~nobodyhere/sums"}, "there is no folder '.*~nobodyhere/sums'"),
        ({"dataset": "x" * 300}, "there is no folder '.*xxx'"),
        ({"dataset": "code"}, r"the folder '.*code' has no file with rows \(jsonl, parquet.* In that folder: game\.py\.$"),
        ({"dataset": "damaged"}, "JSON.*; see `subset` and `split`, or use `files`"),
    ],
)
def test_missing_part_is_one_sentence(repository: Path, given: dict[str, Any], says: str) -> None:
    for path, text in (("code/game.py", ""), ("damaged/rows.jsonl", '{"prompt": "1 + 1?"}\n{"prom')):
        (repository.parent / path).parent.mkdir()
        (repository.parent / path).write_text(text)
    with pytest.raises(DataError, match=says) as told:
        build_tasks(source(**given), base=repository.parent, split="train")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_columns_of_files_are_renamed_too(tmp_path: Path, suffix: str) -> None:
    rows = [{"question": f"{i}?", "prompt": "not this", "answer": str(i), "level": i} for i in range(3)]
    for name in ("a", "b"):
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}{suffix}")
        else:
            (tmp_path / f"{name}{suffix}").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = build_tasks(source(files=f"*{suffix}", columns=ASKS), base=tmp_path, split="train")
    assert [t.prompt[0].text for t in tasks] == ["0?", "1?", "2?"] * 2
    assert tasks[5].ground_truth == "2" and tasks[5].extra == {"level": 2}
    with pytest.raises(DataError, match=r"has no column 'questoin'\. Did you mean 'question'"):
        build_tasks(source(files=f"*{suffix}", columns={"prompt": "questoin"}), base=tmp_path, split="train")


def test_row_without_a_prompt_names_the_key_columns(repository: Path) -> None:
    tasks = build_tasks(source(dataset="sums", subset="main"), base=repository.parent, split="train")
    refuses(lambda: tasks[0], DataError, "'prompt'", "columns: {prompt: question}")


def test_name_without_a_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyturn.data.hub_dataset.unreachable", lambda: "no route")
    with pytest.raises(DataError, match=r"'openai/gsm8k' cannot be opened: the hub cannot be reached \(no route\)"):
        build_tasks(source(dataset="openai/gsm8k", subset="main"), base=tmp_path, split="train")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dataset": "a/b", "files": "c.jsonl"}, "exactly one of files, dataset and generator"),
        ({"files": "c.jsonl", "split": "test"}, "split requires `dataset`"),
        ({"generator": "c.py:f", "columns": {"prompt": "q"}}, "columns requires `files` or `dataset`"),
        ({"dataset": "a/b", "streaming": True}, "set limit"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(given: dict[str, Any], says: str) -> None:
    refuses(lambda: source(**given), ValidationError, says)
