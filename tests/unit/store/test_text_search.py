"""Text search: words anywhere in a trajectory, expressions in one text, within bounds, as the run goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from polyturn.core.errors import DataError
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.store import text_search
from polyturn.store.parquet_store import ParquetStore
from polyturn.store.stored_run import StoredRun
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.gsm8k import Gsm8kTool
from support.refusals import refuses

CALL = '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "seventeen"}}\n</tool_call>'


async def said(id: str, says: list[str], asks: str = "What is 2+2?") -> TrajectoryGroup:
    context = scripted_context(says, tools=[Gsm8kTool({})])
    return (await RolloutPool(context).run([GroupSpec(id=id, task=task(asks, id=f"task-{id}"), size=1)]))[0]


@pytest.fixture
async def run(tmp_path: Path) -> StoredRun:
    with ParquetStore(tmp_path) as store:
        store.add(await said("a", ["Four apples."]), step=1, split="train")
        store.add(await said("b", [CALL, "#### 17"], asks="How many apples?"), step=1, split="train")
        store.flush()
        store.add(await said("c", ["#### -3.5 pears"]), step=2, split="eval/greedy")
    return StoredRun(tmp_path)


def ids(run: StoredRun) -> list[str]:
    return [id.partition("/")[0] for id in run.table(["id"])["id"].to_pylist()]


@pytest.mark.parametrize(
    ("text", "is_expression", "found"),
    [
        ("APPLES", False, ["a", "b"]),
        ("apples seventeen", False, ["b"]),  # the one in the question, the other in the arguments of a call
        ("task-c", False, ["c"]),
        ("#### -?[0-9.]+", True, ["b", "c"]),
        ("^Four", True, ["a"]),
        ("a.ples", False, []),
        ("", False, ["a", "b", "c"]),
    ],
)
def test_words_and_expressions_find_messages(run: StoredRun, text: str, is_expression: bool, found: list[str]):
    assert ids(run.search(text, is_expression=is_expression)) == found
    assert ids(run.search(text, is_expression=is_expression)) == found, "again, from what is held"


async def test_later_records_are_found_and_damaged_parts_skipped(run: StoredRun, tmp_path: Path):
    assert ids(run.search("apples")) == ["a", "b"]
    with ParquetStore(tmp_path) as store:
        store.add(await said("d", ["More apples."]), step=3, split="train")
    run.refresh()
    assert ids(run.search("apples")) == ["a", "b", "d"]
    first = sorted((tmp_path / "trajectories").iterdir())[0]
    fresh = StoredRun(tmp_path)
    first.write_bytes(b"no longer parquet")
    assert ids(fresh.search("apples")) == ["d"] and first.name in fresh.problems


def test_search_has_bounds(run: StoredRun, monkeypatch: pytest.MonkeyPatch):
    for wrong in ("(", "(" * 400, "a{1000}{1000}{1000}"):
        with pytest.raises(DataError, match="not a regular expression"):
            run.search(wrong, is_expression=True)
    refuses(lambda: run.search("a" * 501), DataError, "characters")
    stop = threading.Event()
    stop.set()
    refuses(lambda: run.search("apples", stop=stop), DataError, "stopped")
    monkeypatch.setattr(text_search, "MAX_HELD", 0)
    assert ids(StoredRun(run.folder).search("apples")) == ["a", "b"], "read again for each search"
    monkeypatch.setattr(text_search, "TIMEOUT_S", -1.0)
    refuses(lambda: run.search("apples"), DataError, "longer than")
