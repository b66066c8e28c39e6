"""Geometry3K and questions for searching, as the rows of a multi-turn run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polyturn.core.errors import DataError
from polyturn.data.dataset import TaskDataset
from polyturn.data.prepare import prepare_geo3k, prepare_search
from support.refusals import refuses

PNG = b"\x89PNG\r\n\x1a\n"
PROBLEM = {"images": [{"bytes": PNG, "path": None}], "problem": "<image>Find x.", "answer": "3"}
QUESTION = {"question": "Who wrote Hamlet?", "golden_answers": ["Shakespeare"], "data_source": "nq"}


def source(folder: Path, row: dict[str, Any]) -> Path:
    (folder / "data").mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist([row]), folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def test_figure_is_in_the_prompt_and_given_to_the_tool(tmp_path: Path) -> None:
    written = prepare_geo3k(source(tmp_path / "in", PROBLEM), out=tmp_path / "out")
    assert [path.name for path in written] == ["train.parquet", "test.parquet"]
    task = TaskDataset.open(written[0], split="train")[0]
    assert task.data_source == "hiyouga/geometry3k" and task.ground_truth == "3"
    shown = next(part for part in task.prompt[1].content if part["type"] == "image")
    assert shown["image"] == task.tools_kwargs["image_zoom_in_tool"].create_kwargs["image"]
    assert shown["image"].startswith("data:image/png;base64,")


def test_problem_without_a_pointer_shows_its_figure_first(tmp_path: Path) -> None:
    written = prepare_geo3k(source(tmp_path / "in", {**PROBLEM, "problem": "Find x."}), out=tmp_path / "out")
    assert TaskDataset.open(written[0], split="train")[0].prompt[1].content[0]["type"] == "image"


def test_question_has_the_search_tool_and_its_answers(tmp_path: Path) -> None:
    written = prepare_search(source(tmp_path / "in", QUESTION), out=tmp_path / "out")
    task = TaskDataset.open(written[1], split="test")[0]
    assert task.data_source == "searchR1_nq" and task.tools == ("search",)
    assert task.ground_truth == {"target": ["Shakespeare"]}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({**PROBLEM, "problem": "<image> and <image>"}, "refers to 2 figures, but 'images' has 1"),
        ({"images": [{"bytes": PNG}], "problem": "Find x."}, "needs the texts 'problem' and 'answer'"),
        ({**PROBLEM, "images": ["figure.png"]}, "a figure must be bytes"),
    ],
)
def test_unusable_problem_is_refused_with_its_place(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as refused:
        prepare_geo3k(source(tmp_path / "in", row), out=tmp_path / "out")
    assert "train-00000-of-00001.parquet, row 0" in str(refused.value)


def test_unusable_questions_are_refused(tmp_path: Path) -> None:
    refuses(lambda: prepare_search(tmp_path / "gone", out=tmp_path / "out"), DataError, "there is no folder", "gone'")
    refuses(
        lambda: prepare_search(source(tmp_path / "row", {"question": "Who?"}), out=tmp_path / "out"),
        DataError,
        "'golden_answers'",
    )
    folder = source(tmp_path / "in", QUESTION)
    (folder / "data" / "train-00000-of-00001.parquet").write_text("no")
    refuses(lambda: prepare_search(folder, out=tmp_path / "out"), DataError, "parquet")
    folder = source(tmp_path / "half", QUESTION)
    (folder / "data" / "test-00000-of-00001.parquet").unlink()
    refuses(
        lambda: prepare_search(folder, out=tmp_path / "out"), DataError, "test*.parquet", "['train-00000-of-00001.parquet']"
    )
