"""Files to tasks: jsonl, parquet, globs, generators, and the check before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polyturn.core.errors import ConfigError, DataError, MissingAttributeError
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.data.dataset import TaskDataset, check_tasks, generate_tasks
from polyturn.data.sequences import WithSystem


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def rows(n: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", **more} for i in range(n)]


def prompts(dataset: Any) -> list[str]:
    return [t.prompt[0].text for t in dataset]


def test_jsonl_with_blank_lines_a_byte_order_mark_and_no_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "p0"}\n\n  \n{"prompt": "p\xc3\xa9"}')
    dataset = TaskDataset.open(path, split="val")
    assert prompts(dataset) == ["p0", "pé"]
    assert [t.id for t in dataset] == ["val-0", "val-1"]


def test_parquet_rows_with_different_tools_keep_their_own(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(
        [
            {"prompt": "a", "extra_info": {"tools_kwargs": {"calc": {"create_kwargs": {"x": 1}}}}},
            {"prompt": "b", "extra_info": {"tools_kwargs": {"search": {"create_kwargs": {"y": "z"}}}}},
        ],
        schema=pa.schema(
            {
                "prompt": pa.string(),
                "extra_info": pa.struct(
                    {
                        "tools_kwargs": pa.struct(
                            {
                                "calc": pa.struct({"create_kwargs": pa.struct({"x": pa.int64()})}),
                                "search": pa.struct({"create_kwargs": pa.struct({"y": pa.string()})}),
                            }
                        )
                    }
                ),
            }
        ),
    )
    pq.write_table(table, tmp_path / "t.parquet")
    first, second = TaskDataset.open(tmp_path / "t.parquet", split="train")
    assert (first.tools, second.tools) == (("calc",), ("search",))
    assert second.tools_kwargs["search"].create_kwargs == {"y": "z"}


def test_parquet_rows_of_mixed_tasks_keep_what_is_theirs(tmp_path: Path) -> None:
    """Parquet gives every row the keys of all of them, filled with None."""
    talks = {"prompt": "a", "extra_info": {"interaction_kwargs": {"name": "gsm8k", "query": "a", "ground_truth": "4"}}}
    calls = {
        "prompt": "b",
        "extra_info": {"need_tools_kwargs": True, "tools_kwargs": {"calc": {"create_kwargs": {"x": "4"}}}},
    }
    plain = {"prompt": "c", "extra_info": {"index": 2}}
    pq.write_table(
        pa.Table.from_pylist([{**r, "agent_name": None} for r in with_all_keys(talks, calls, plain)]), tmp_path / "t.parquet"
    )
    tasks = list(TaskDataset.open(tmp_path / "t.parquet", split="train"))
    assert [t.interaction is not None for t in tasks] == [True, False, False]
    assert [t.tools for t in tasks] == [None, ("calc",), None]
    assert tasks[0].interaction.kwargs == {"name": "gsm8k", "query": "a", "ground_truth": "4"}  # type: ignore[union-attr]
    found = check_tasks(tasks, tools=["calc"], interactions=["gsm8k"])
    assert (found.interactions, found.num_with_tools) == ({"gsm8k": 1, None: 2}, 3)


def with_all_keys(*found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows that have the keys of all of them at every level, as a writer of columns makes them."""
    keys = dict.fromkeys(key for row in found for key in row)
    out: list[dict[str, Any]] = []
    for row in found:
        out.append({})
        for key in keys:
            nested = [r[key] for r in found if isinstance(r.get(key), dict)]
            inner = with_all_keys(row.get(key) or {}, *nested)[0] if nested else row.get(key)
            out[-1][key] = inner
    return out


def test_many_files_and_globs_in_order_with_indices_slices_and_negative_indices(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b1.jsonl", [{"prompt": "b1"}])
    write_jsonl(tmp_path / "b0.jsonl", [{"prompt": "b0"}])
    pq.write_table(pa.Table.from_pylist([{"prompt": "a0"}, {"prompt": "a1"}]), tmp_path / "a.parquet")
    dataset = TaskDataset.open(["a.parquet", "b*.jsonl"], split="train", base=tmp_path)
    assert prompts(dataset) == ["a0", "a1", "b0", "b1"]
    assert prompts(dataset[1:3]) == ["a1", "b0"]
    assert dataset[-1].id == "train-3"
    with pytest.raises(IndexError):
        dataset[4]


def test_a_bad_row_is_named_by_its_file_and_its_row_there(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows(3))
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "ok"}, {"question": "?"}])
    dataset = TaskDataset.open([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], split="train")
    with pytest.raises(DataError, match=r"b\.jsonl, row 1: there is no 'prompt'"):
        dataset[4]


def test_a_line_that_is_not_json_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "p"}\n\n{"prompt": \n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: this is not JSON .*'\{\"prompt\": '"):
        check_tasks(TaskDataset.open(tmp_path / "a.jsonl", split="train"), tools=(), interactions=())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("trian.jsonl", r"there is no file .*trian\.jsonl'.* Did you mean 'train\.jsonl'"),
        ("zzzzzzzz", r"there is no file .*In that folder: damaged\.parquet, empty\.jsonl, notes\.txt, train\.jsonl"),
        ("nowhere/x.jsonl", r"Its folder does not exist either"),
        ("x*.parquet", r"no file matches .*In that folder: damaged\.parquet"),
        ("empty.jsonl", r"there is no row in .*empty\.jsonl"),
        ("notes.txt", r"unknown kind '\.txt'.*\.jsonl, \.ndjson, \.parquet"),
        ("damaged.parquet", r"damaged\.parquet cannot be read as parquet"),
        (".", r"is a folder; name its files"),
        ([], r"no file is named for the tasks of 'train'"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_with_what_is_there(tmp_path: Path, name: Any, says: str) -> None:
    write_jsonl(tmp_path / "train.jsonl", rows(1))
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=says):
        TaskDataset.open(name, split="train", base=tmp_path)


def test_the_check_counts_what_the_tasks_ask_for(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [
            {"prompt": "a", "data_source": "x", "tools": ["calc"]},
            {"prompt": "b", "data_source": "x", "interaction": "gsm8k"},
            {"prompt": "c"},
        ],
    )
    found = check_tasks(TaskDataset.open(path, split="train"), tools=["calc"], interactions=["gsm8k"])
    assert found.num_tasks == 3
    assert found.data_sources == {"x": 2, None: 1}
    assert found.interactions == {"gsm8k": 1, None: 2}
    assert found.tools == {"calc": 1}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": "p", "tools": ["clac"]},
            r"tasks, task 'train-0' .*the tool 'clac' is not configured. Did you mean 'calc'",
        ),
        (
            {"prompt": "p", "interaction": "gsm9k"},
            r"^Interaction 'gsm9k' not found in interaction_map. Available interactions: \['gsm8k'\]. Did you mean 'gsm8k'",
        ),
    ],
)
def test_the_check_names_what_is_not_configured(tmp_path: Path, row: Any, says: str) -> None:
    dataset = TaskDataset.open(write_jsonl(tmp_path / "a.jsonl", [row]), split="train")
    with pytest.raises(DataError, match=says):
        check_tasks(dataset, tools=["calc"], interactions=["gsm8k"])


def opened(tmp_path: Path, *found: Any) -> TaskDataset:
    return TaskDataset.open(write_jsonl(tmp_path / "a.jsonl", list(found)), split="t")


@pytest.mark.parametrize("kwargs", [{"query": "q"}, {"name": "gsm8k", "query": "q"}])
def test_the_interaction_kwargs_column_is_ignored_where_no_interaction_is_configured(tmp_path: Path, kwargs: Any) -> None:
    """Rows made for tools carry the column too."""
    found = check_tasks(opened(tmp_path, *rows(1, interaction_kwargs=kwargs)), tools=(), interactions=())
    assert found.interactions == {None: 1}
    with pytest.raises(DataError, match=r"^Interaction 'gsm8k' not found in interaction_map"):
        check_tasks(opened(tmp_path, *rows(1, interaction_kwargs=kwargs)), tools=(), interactions=["weather"])


def test_a_native_interaction_must_be_configured(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^Interaction 'gsm8k' not found in interaction_map. Available interactions: "):
        check_tasks(opened(tmp_path, *rows(1, interaction="gsm8k")), tools=(), interactions=())


def test_kwargs_without_a_name_can_be_refused_where_an_interaction_is_configured(tmp_path: Path) -> None:
    """Users match on the beginning of the message."""
    tasks = opened(tmp_path, *rows(1, interaction_kwargs={"query": "q"}))
    assert check_tasks(tasks, tools=(), interactions=["gsm8k"]).interactions == {"gsm8k": 1}
    with pytest.raises(DataError, match=r"^'name' key is required in interaction_kwargs; .*task 't-0'"):
        check_tasks(tasks, tools=(), interactions=["gsm8k"], require_interaction_name=True)
    assert check_tasks(tasks, tools=(), interactions=(), require_interaction_name=True).interactions == {None: 1}


def test_tools_that_are_not_configured_are_left_out_unless_none_remains_and_the_row_needs_one(tmp_path: Path) -> None:
    both = {"prompt": "p", "tools_kwargs": {"calc": {}, "gone": {}}, "need_tools_kwargs": True}
    optional = {"prompt": "p", "tools_kwargs": {"gone": {}}}
    found = check_tasks(opened(tmp_path, both, optional, {"prompt": "p"}), tools=["calc"], interactions=())
    assert (found.tools, found.num_with_tools, found.unknown_tools) == ({"calc": 1}, 2, {"gone": 2})
    lost = {"prompt": "p", "tools_kwargs": {"calk": {}}, "need_tools_kwargs": True}
    with pytest.raises(
        DataError, match=r"task 't-0' .*it needs tools \(need_tools_kwargs\) and has none: it names \['calk'\]"
    ):
        check_tasks(opened(tmp_path, lost), tools=["calc"], interactions=())
    with pytest.raises(DataError, match=r"has none: it names \[\] and configured are \[\]"):
        check_tasks(opened(tmp_path, *rows(1, need_tools_kwargs=True)), tools=(), interactions=())


def test_two_tasks_may_not_share_an_id(tmp_path: Path) -> None:
    dataset = TaskDataset.open(write_jsonl(tmp_path / "a.jsonl", rows(2, id="same")), split="train")
    with pytest.raises(DataError, match=r"task 'same' .number 1.: task number 0 has the same id"):
        check_tasks(dataset, tools=(), interactions=())


GENERATORS = """
from polyturn.core.messages import Message
from polyturn.core.task import Task

def good(*, n, seed=0):
    return [Task(id=str(i), prompt=(Message(role="user", content=str(seed)),)) for i in range(n)]

def not_tasks(*, n):
    return list(range(n))

def not_a_sequence():
    return (i for i in range(3))

a_value = 3
"""


def test_tasks_from_a_generator_that_a_file_holds(tmp_path: Path) -> None:
    (tmp_path / "gen.py").write_text(GENERATORS)
    tasks = generate_tasks("gen.py:good", base=tmp_path, n=2, seed=5)
    assert list(tasks) == [Task(id=str(i), prompt=(Message(role="user", content="5"),)) for i in range(2)]


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "says"),
    [
        ("gen.py:good", {"m": 2}, ConfigError, "does not accept .*'m': 2.*missing a required argument: 'n'"),
        ("gen.py:good", {"n": 0}, DataError, "returned no task for .*'n': 0"),
        ("gen.py:not_tasks", {"n": 2}, DataError, "returned a sequence of int, not of Task"),
        ("gen.py:not_a_sequence", {}, DataError, "returned a generator; it must return a sequence of Task"),
        ("gen.py:a_value", {}, ConfigError, "is 3, which cannot be called"),
        ("gen.py:goood", {}, MissingAttributeError, "Did you mean 'good'"),
    ],
)
def test_a_generator_that_cannot_be_used_is_said(
    tmp_path: Path, name: str, kwargs: dict[str, Any], error: type[Exception], says: str
) -> None:
    (tmp_path / "gen.py").write_text(GENERATORS)
    with pytest.raises(error, match=says):
        generate_tasks(name, base=tmp_path, **kwargs)


def test_a_system_message_is_put_before_the_prompts_that_have_none() -> None:
    said = Message(role="user", content="Hi"), Message(role="system", content="Mine.")
    tasks = WithSystem([Task(id="a", prompt=said[:1]), Task(id="b", prompt=said[::-1])], "Be kind.")
    assert [[m.text for m in task.prompt] for task in tasks] == [["Be kind.", "Hi"], ["Mine.", "Hi"]]
    assert [task.prompt[0].text for task in tasks[:2]] == ["Be kind.", "Mine."] and len(tasks) == 2
