"""Files to tasks: jsonl, parquet, globs, generators, the check before a run, and sequences of tasks."""

from __future__ import annotations

import dataclasses
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
from polyturn.data.sequences import Changed, Joined, Subset, WithSystem
from support.refusals import refuses


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def prompts(dataset: Any) -> list[str]:
    return [t.prompt[0].text for t in dataset]


def opened(tmp_path: Path, *rows: Any) -> TaskDataset:
    rows = tuple({"prompt": "p", **row} for row in rows)
    return TaskDataset.open(write_jsonl(tmp_path / "a.jsonl", list(rows)), split="t")


def test_jsonl_may_have_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "p0"}\n\n  \n{"prompt": "p\xc3\xa9"}')
    dataset = TaskDataset.open(path, split="val")
    assert prompts(dataset) == ["p0", "pé"]
    assert [t.id for t in dataset] == ["val-0", "val-1"]


def test_parquet_rows_of_mixed_tasks_keep_their_own_keys(tmp_path: Path) -> None:
    """Parquet gives every row the keys of all of them, filled with None."""
    talks = {"prompt": "a", "extra_info": {"interaction_kwargs": {"name": "gsm8k", "query": "a", "ground_truth": "4"}}}
    calls = {
        "prompt": "b",
        "extra_info": {"need_tools_kwargs": True, "tools_kwargs": {"calc": {"create_kwargs": {"x": "4"}}}},
    }
    searches = {"prompt": "c", "extra_info": {"tools_kwargs": {"search": {"create_kwargs": {"y": "z"}}}}}
    plain = {"prompt": "d", "extra_info": {"index": 2}}
    rows = [{**r, "agent_name": None} for r in with_all_keys(talks, calls, searches, plain)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    tasks = list(TaskDataset.open(tmp_path / "t.parquet", split="train"))
    assert [t.interaction is not None for t in tasks] == [True, False, False, False]
    assert [t.tools for t in tasks] == [None, ("calc",), ("search",), None]
    assert tasks[0].interaction.kwargs == {"name": "gsm8k", "query": "a", "ground_truth": "4"}  # type: ignore[union-attr]
    assert tasks[2].tools_kwargs["search"].create_kwargs == {"y": "z"}
    found = check_tasks(tasks, tools=["calc", "search"], interactions=["gsm8k"])
    assert (found.interactions, found.num_with_tools) == ({"gsm8k": 1, None: 3}, 4)


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


def test_files_and_globs_come_in_order_and_are_indexed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b1.jsonl", [{"prompt": "b1"}])
    write_jsonl(tmp_path / "b0.jsonl", [{"prompt": "b0"}])
    pq.write_table(pa.Table.from_pylist([{"prompt": "a0"}, {"prompt": "a1"}]), tmp_path / "a.parquet")
    dataset = TaskDataset.open(["a.parquet", "b*.jsonl"], split="train", base=tmp_path)
    assert prompts(dataset) == ["a0", "a1", "b0", "b1"]
    assert prompts(dataset[1:3]) == ["a1", "b0"]
    assert dataset[-1].id == "train-3"
    with pytest.raises(IndexError):
        dataset[4]


def test_glob_starts_in_its_base_whatever_the_name_of_the_folder(tmp_path: Path) -> None:
    base = tmp_path / "run[1]*"
    base.mkdir()
    write_jsonl(base / "a0.jsonl", [{"prompt": "p"}])
    for files in ("*.jsonl", "a[0-9].jsonl"):
        assert prompts(TaskDataset.open(files, split="train", base=base)) == ["p"]


def test_empty_list_of_files_of_an_evaluation_is_refused_by_its_key() -> None:
    refuses(lambda: TaskDataset.open([], split="eval"), DataError, "evaluation.data.files")


def test_unreadable_row_is_named_by_its_file_and_place(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p"}] * 3)
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "ok"}, {"question": "?"}])
    dataset = TaskDataset.open([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], split="train")
    refuses(lambda: dataset[4], DataError, "b.jsonl, line 2:")
    (tmp_path / "c.jsonl").write_text('{"prompt": "p"}\n\n{"prompt": \n')
    with pytest.raises(DataError, match=r"c\.jsonl, line 3: .*'\{\"prompt\": '"):
        check_tasks(TaskDataset.open(tmp_path / "c.jsonl", split="train"), tools=(), interactions=())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trian.jsonl", "trian.jsonl 'train.jsonl'"),
        ("zzzzzzzz", "zzzzzzzz damaged.parquet, empty.jsonl, notes.txt, train.jsonl"),
        ("nowhere/x.jsonl", "folder"),
        ("x*.parquet", "x*.parquet damaged.parquet"),
        ("empty.jsonl", "row empty.jsonl"),
        ("notes.txt", "'.txt' .jsonl, .ndjson, .parquet"),
        ("damaged.parquet", "damaged.parquet"),
        (".", "folder"),
        ([], "data.train.files"),
        ("~nobodyhere/x.jsonl", "~nobodyhere folder"),
        ("x" * 300 + ".jsonl", "xxx.jsonl"),
        ("x" * 300 + "/a.jsonl", "xxx folder"),
        ("openai/gsm8k", "`dataset: openai/gsm8k` `files`"),
    ],
)
def test_unusable_file_is_refused_with_what_is_there(tmp_path: Path, name: Any, words: str) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "p"}])
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError) as caught:
        TaskDataset.open(name, split="train", base=tmp_path)
    assert [word for word in words.split() if word not in str(caught.value)] == [], caught.value


def test_check_counts_what_the_tasks_ask_for(tmp_path: Path) -> None:
    rows = ({"data_source": "x", "tools": ["calc"]}, {"data_source": "x", "interaction": "gsm8k"}, {})
    found = check_tasks(opened(tmp_path, *rows), tools=["calc"], interactions=["gsm8k"])
    assert found.num_tasks == 3
    assert found.data_sources == {"x": 2, None: 1}
    assert found.interactions == {"gsm8k": 1, None: 2}
    assert found.tools == {"calc": 1}


NO_INTERACTION = r"^Interaction 'gsm8k' not found in interaction_map. Available interactions: "
NEEDS = {"need_tools_kwargs": True}


@pytest.mark.parametrize(
    ("row", "tools", "interactions", "says"),
    [
        ({"tools": ["clac"]}, ["calc"], [], r"task 't-0' .*'clac'.*'calc'"),
        ({"interaction": "gsm8k"}, [], [], NO_INTERACTION),
        ({"interaction": "gsm8k"}, [], ["gsm9k"], NO_INTERACTION + r"\['gsm9k'\].*'gsm9k'"),
        ({"interaction_kwargs": {"query": "q"}}, [], ["weather"], NO_INTERACTION),
        ({"tools_kwargs": {"calk": {}}, **NEEDS}, ["calc"], [], r"task 't-0' .*need_tools_kwargs.*\['calk'\]"),
        (NEEDS, [], [], r"need_tools_kwargs.*\[\].*\[\]"),
    ],
)
def test_check_names_what_is_not_configured(
    tmp_path: Path, row: Any, tools: list[str], interactions: list[str], says: str
) -> None:
    """verl's users match on the beginning of the messages about interactions."""
    with pytest.raises(DataError, match=says):
        check_tasks(opened(tmp_path, row), tools=tools, interactions=interactions)


@pytest.mark.parametrize("kwargs", [{"query": "q"}, {"name": "gsm8k", "query": "q"}])
def test_interaction_kwargs_are_ignored_without_interactions(tmp_path: Path, kwargs: Any) -> None:
    """Rows made for tools carry the column too."""
    tasks = opened(tmp_path, {"interaction_kwargs": kwargs})
    assert check_tasks(tasks, tools=(), interactions=(), require_interaction_name=True).interactions == {None: 1}


def test_kwargs_without_a_name_can_be_refused(tmp_path: Path) -> None:
    """Users match on the beginning of the message."""
    tasks = opened(tmp_path, {"interaction_kwargs": {"query": "q"}})
    assert check_tasks(tasks, tools=(), interactions=["gsm8k"]).interactions == {"gsm8k": 1}
    with pytest.raises(DataError, match=r"^'name' key is required in interaction_kwargs; .*task 't-0'"):
        check_tasks(tasks, tools=(), interactions=["gsm8k"], require_interaction_name=True)


def test_unknown_tools_of_kwargs_are_left_out(tmp_path: Path) -> None:
    rows = ({"tools_kwargs": {"calc": {}, "gone": {}}, **NEEDS}, {"tools_kwargs": {"gone": {}}}, {})
    found = check_tasks(opened(tmp_path, *rows), tools=["calc"], interactions=())
    assert (found.tools, found.num_with_tools, found.unknown_tools) == ({"calc": 1}, 2, {"gone": 2})


def test_two_tasks_may_not_share_an_id(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task 'same' .*\.jsonl, line 2.: .*0"):
        check_tasks(opened(tmp_path, {"id": "same"}, {"id": "same"}), tools=(), interactions=())


@pytest.mark.parametrize("key", ["id", "data_source"])
def test_half_of_a_surrogate_pair_in_an_id_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(DataError, match=rf"line 1.: the {key} has half of a surrogate pair, '\\ud83d'"):
        check_tasks(opened(tmp_path, {key: "a\ud83d"}), tools=(), interactions=())


GENERATORS = """
from polyturn.core.messages import Message
from polyturn.core.task import Task

def good(*, n, seed=0):
    return [Task(id=str(i), prompt=(Message(role="user", content=str(seed)),)) for i in range(n)]

def rows(*, n):
    return [{"prompt": f"{i} + 1?", "ground_truth": str(i + 1)} for i in range(n)]

def named(*, split, base, path):
    return [{"prompt": f"{split} {base} {path}"}]

def not_tasks(*, n):
    return list(range(n))

def not_a_sequence():
    return (i for i in range(3))

a_value = 3
"""


def test_generator_of_a_file_makes_tasks(tmp_path: Path) -> None:
    (tmp_path / "gen.py").write_text(GENERATORS)
    tasks = generate_tasks("gen.py:good", {"n": 2, "seed": 5}, split="train", base=tmp_path)
    assert list(tasks) == [Task(id=str(i), prompt=(Message(role="user", content="5"),)) for i in range(2)]


def test_generator_may_return_rows(tmp_path: Path) -> None:
    (tmp_path / "gen.py").write_text(GENERATORS)
    tasks = generate_tasks("gen.py:rows", {"n": 2}, split="eval", base=tmp_path)
    assert [(task.id, task.prompt[0].text, task.ground_truth) for task in tasks] == [
        ("eval-0", "0 + 1?", "1"),
        ("eval-1", "1 + 1?", "2"),
    ]


def test_generator_may_have_arguments_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "gen.py").write_text(GENERATORS)
    kwargs = {"split": "dev", "base": 2, "path": "p"}
    (task,) = generate_tasks("gen.py:named", kwargs, split="train", base=tmp_path)
    assert (task.id, task.prompt[0].text) == ("train-0", "dev 2 p")


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "says"),
    [
        ("good", {"m": 2}, ConfigError, "'m': 2.*'n'"),
        ("good", {"n": 0}, DataError, "'n': 0"),
        ("not_tasks", {"n": 2}, DataError, "int.*Task"),
        ("not_a_sequence", {}, DataError, "generator"),
        ("a_value", {}, ConfigError, "3"),
        ("goood", {}, MissingAttributeError, "'good'"),
    ],
)
def test_unusable_generator_is_refused(
    tmp_path: Path, name: str, kwargs: dict[str, Any], error: type[Exception], says: str
) -> None:
    (tmp_path / "gen.py").write_text(GENERATORS)
    with pytest.raises(error, match=says):
        generate_tasks(f"gen.py:{name}", kwargs, split="train", base=tmp_path)


def test_system_message_comes_before_prompts_that_have_none() -> None:
    user, system = Message(role="user", content="Hi"), Message(role="system", content="Mine.")
    tasks = WithSystem([Task(id="a", prompt=(user,)), Task(id="b", prompt=(system, user))], "Be kind.")
    assert [[m.text for m in task.prompt] for task in tasks] == [["Be kind.", "Hi"], ["Mine.", "Hi"]]
    assert [task.prompt[0].text for task in tasks[:2]] == ["Be kind.", "Mine."] and len(tasks) == 2


TASKS = [Task(id=name, prompt=(Message(role="user", content="?"),)) for name in "abcdef"]
JOINED = Joined([TASKS[:2], [], TASKS[2:]])


def ids(tasks: object) -> str:
    return "".join(task.id for task in tasks)  # type: ignore[attr-defined]


def test_sequences_are_one_behind_the_other() -> None:
    assert len(JOINED) == 6 and ids(JOINED) == "abcdef"
    assert [JOINED[i].id for i in (0, 1, 2, 5, -1, -6)] == ["a", "b", "c", "f", "f", "a"]


def test_slice_is_a_list_of_tasks() -> None:
    assert ids(JOINED[1:4]) == "bcd" and ids(JOINED[::-2]) == "fdb" and JOINED[9:] == []


@pytest.mark.parametrize("index", [6, -7])
def test_index_beyond_the_ends_is_an_index_error(index: int) -> None:
    refuses(lambda: JOINED[index], IndexError, f"task {index} of 6")


def test_subset_and_changed_tasks_are_lazy() -> None:
    changed = Changed(TASKS, lambda task: dataclasses.replace(task, id=task.id.upper()))
    assert ids(Subset(changed, [4, 0])) == "EA" and Subset(changed, [4, 0])[-1].id == "A"
