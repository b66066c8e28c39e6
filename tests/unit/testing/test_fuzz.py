"""The short form of benchmarks/fuzz.py: damaged input ends in errors of ours. Then the findings of the long form.

Each of the single cases was a crash once; the long form has 100,000 others.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyturn.compat.swift.args.arguments import parse, read, read_value, to_native
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError, DataError
from polyturn.data.dataset import TaskDataset
from polyturn.data.rows import task_from_row
from polyturn.infra.nesting import is_deep
from polyturn.interactions.person import HumanQueue, HumanReply
from support.refusals import refuses

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fuzz() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("fuzz_benchmark", ROOT / "benchmarks/fuzz.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    before = signal.getsignal(signal.SIGVTALRM)
    spec.loader.exec_module(module)
    yield module
    signal.signal(signal.SIGVTALRM, before)
    del sys.modules[spec.name]


@pytest.mark.chance
def test_damaged_inputs_end_in_errors_of_ours(fuzz: Any, capsys: pytest.CaptureFixture[str]):
    found = asyncio.run(fuzz.fuzz(400, seed=7))
    assert (found["crashes"], found["hangs"]) == (0, 0), capsys.readouterr().err
    assert found["cases"] > 300 and found["surfaces"] >= 14
    assert found["answers"]["2xx"] > 2 and found["answers"]["4xx"] > 10, "damage gets past the first check"
    assert found["accepted"] > 100


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": [value]}
    return value


def test_depth_is_counted_without_recursion():
    assert not is_deep(nested(20)) and not is_deep([]) and not is_deep("x") and not is_deep(([(1,)],))
    assert is_deep(nested(40)) and is_deep(nested(100_000))


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "x", "extra": nested(200)}, "nested deeper than 64"),
        ({"messages": [{"role": {}, "content": "x"}]}, "role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "role"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": True}]}]}, "text of prompt"),
        ({"prompt": [{"role": "user", "content": "x", "name": []}]}, "the name of prompt"),
        (
            {"prompt": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x", "tool_call_id": 5}]},
            "tool_call_id",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "[" * 100_000}, "tools"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"function": []}]}, "tools"),
        ({"prompt": "x", "images": [[[1, 2], [3, [4]]]]}, "images"),
        ({"prompt": [{"role": "assistant", "tool_calls": [{"function": []}]}]}, "function of a tool call"),
    ],
)
def test_row_that_once_crashed_is_refused(row: dict[str, Any], sentence: str):
    refuses(lambda: task_from_row(row, index=0, split="train", source="a.jsonl"), DataError, sentence)


def test_damaged_file_of_rows_is_refused(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"a":' * 50_000)
    refuses(lambda: list(TaskDataset.open(tmp_path / "a.jsonl", split="train")), DataError, "line 1: this is not JSON")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["2+2?"], "tools_kwargs": ["x"]}), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data.replace(b"tools_kwargs", b"tools_k\xc7args"))
    refuses(lambda: list(TaskDataset.open(tmp_path / "a.parquet", split="train")), DataError, "a.parquet")


@pytest.mark.parametrize(
    "text",
    ["5", "- a", "model: [", "a: &a [*a]", "model: " + "[" * 200 + "]" * 200, "seed: " + "9" * 5000, "\x00", "model: \xc7"],
)
def test_configuration_that_once_crashed_is_refused(text: str, tmp_path: Path):
    (tmp_path / "c.yaml").write_bytes(text.encode("latin-1"))
    for load in (lambda path: load_config(RunConfig, path), lambda path: load_config(RunConfig, None, [f"model={text}"])):
        with pytest.raises(ConfigError):
            load(tmp_path / "c.yaml")


def test_damaged_arguments_of_swift_are_refused(tmp_path: Path):
    (tmp_path / "swift.yaml").write_bytes(b"dat\xff: 1")
    refuses(lambda: read(tmp_path / "swift.yaml"), ConfigError, "cannot be read as a config")
    for words in (["--num_generations", "0"], ["--generation_batch_size", "9" * 30], ["--model", "a" * 5000]):
        with pytest.raises(ConfigError):
            to_native(parse(["--model", "x", "--dataset", "a.jsonl", "--reward_funcs", "accuracy", *words]))
    assert read_value("9" * 5000) == float("inf")
    assert read_value("[" * 5000) == "[" * 5000


def test_damaged_files_do_not_stop_a_queue_of_people(tmp_path: Path):
    """The folder may be on a disk that others write to: unreadable files in it are ignored."""
    desk = HumanQueue(tmp_path)
    good = {"ticket": "7", "about": {}, "since": 1.0, "until": 4e9, "messages": []}
    deep = json.dumps({**good, "about": nested(60)})
    texts = ["", "{", "[]", "5", '{"ticket": "4"}', '{"ticket": "5", "until": "x"}', "[" * 5000, deep]
    for number, text in enumerate(texts):
        (tmp_path / "waiting" / f"{number}.json").write_text(text)
    (tmp_path / "waiting" / "7.json").write_text(json.dumps({**good, "about": {"goal": "\ud800"}}))
    assert desk.waiting() == []
    for score in (10**400, float("nan"), True, "1"):
        with pytest.raises(DataError, match="score"):
            HumanReply.of({"text": "x", "score": score})


async def test_damaged_answer_is_dropped_and_the_wait_goes_on(tmp_path: Path):
    desk = HumanQueue(tmp_path)
    asking = asyncio.create_task(desk.ask([{"role": "user", "content": "Hi."}], about={}, deadline_s=60.0))
    while not (waiting := desk.waiting()):  # noqa: ASYNC110 (a thread of the desk writes it)
        await asyncio.sleep(0.01)
    ticket = waiting[0]["ticket"]
    (tmp_path / "answers" / f"{ticket}.json").write_text('{"text": 5}')
    while (tmp_path / "answers" / f"{ticket}.json").exists():  # noqa: ASYNC110 (a thread of the desk removes it)
        await asyncio.sleep(0.01)
    desk.answer(ticket, HumanReply(text="yes"))
    assert await asking == HumanReply(text="yes")
