"""The record of a run: comes back equal bit for bit, survives crashes and damage, and loses nothing."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.core.errors import DataError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message, ToolCall
from polyturn.core.reward import Reward
from polyturn.core.task import InteractionRef, Task, ToolKwargs
from polyturn.core.trajectory import (
    Branch,
    Segment,
    Span,
    SpanRef,
    SpanSource,
    ToolResult,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from polyturn.store.parquet_store import ROW_GROUP, ParquetStore
from polyturn.store.stored_run import open_store
from support.refusals import refuses

TASK = Task(
    id="train-0",
    prompt=(Message(role="user", content="2+2?"),),
    data_source="openai/gsm8k",
    ground_truth="4",
    tools=("calc",),
    tools_kwargs={"calc": ToolKwargs(create_kwargs={"x": [1, {"y": None}]})},
    interaction=InteractionRef(name="gsm8k", kwargs={"ground_truth": "4"}),
    extra={"split": "train"},
)


def trajectory(id: str = "g0/0", *, reward: float | None = 1.0, logprobs: list[float] | None = None) -> Trajectory:
    logprobs = logprobs or [-0.1, -math.inf]
    spans = (
        Span(ids=np.array([1, 2]), source=SpanSource.PROMPT),
        Span(
            ids=np.arange(len(logprobs)),
            source=SpanSource.SAMPLED,
            turn=0,
            logprobs=np.array(logprobs),
            policy_version=3,
            weights=np.full(len(logprobs), 0.5),
        ),
        Span(ids=np.array([7]), source=SpanSource.OBSERVATION, turn=0),
    )
    call = ToolCall(id="c0", name="calc", arguments={"a": 1}, raw="<tool_call>…")
    turn = Turn(
        index=0,
        message=Message(role="assistant", content="é \ud800", tool_calls=(call,), reasoning="hm"),
        finish_reason=FinishReason.STOP,
        spans=(SpanRef(0, 1), SpanRef(0, 2)),
        tool_results=(ToolResult(call_id="c0", name="calc", content="4", reward=0.1, metrics={"n": 1}),),
        observation=(Message(role="tool", content=({"type": "text", "text": "4"},), tool_call_id="c0"),),
        scores={"interaction": 1.0, "tool/calc": 0.1},
        info={"deep": {"list": [1, 2.5, "x"]}},
        timings={"generate": 0.25},
    )
    return Trajectory(
        id=id,
        task=TASK,
        segments=(Segment(spans=spans), Segment(spans=spans[:1], parent=Branch(0, 2))),
        turns=(turn,),
        stop_reason=StopReason.ENV_DONE if reward is not None else StopReason.ERROR,
        reward=None if reward is None else Reward(total=reward, components={"outcome": reward}),
        error=None if reward is not None else "boom",
        metrics={"prefilled_tokens": 2.0},
    )


def group(id: str = "g0", size: int = 2, reward: float = 1.0) -> TrajectoryGroup:
    members = tuple(trajectory(f"{id}/{i}", reward=reward) for i in range(size))
    return TrajectoryGroup(id=id, task=TASK, trajectories=members)


def test_record_comes_back_equal_and_is_chosen_by_column(tmp_path: Path) -> None:
    store = ParquetStore(tmp_path)
    failed = TrajectoryGroup(id="g1", task=TASK, trajectories=(trajectory("g1/0", reward=None),))
    store.add(group(), step=1, split="train")
    store.add(failed, step=2, split="greedy")
    store.close()
    run = open_store(tmp_path)
    assert len(run) == 3
    assert run.trajectory("g0/1").same_as(trajectory("g0/1"))
    assert run.trajectory("g1/0", step=2, split="greedy").same_as(failed.trajectories[0])
    assert [g.same_as(expected) for g, expected in zip(run.groups(), [group(), failed], strict=True)] == [True, True]
    assert [g.id for g in run.groups(step=2)] == ["g1"]
    assert [t.id for t in run.trajectories(split="train")] == ["g0/0", "g0/1"]
    assert run.table().select(["id", "step", "split", "reward", "stop_reason", "error"]).to_pylist() == [
        {"id": "g0/0", "step": 1, "split": "train", "reward": 1.0, "stop_reason": "env_done", "error": None},
        {"id": "g0/1", "step": 1, "split": "train", "reward": 1.0, "stop_reason": "env_done", "error": None},
        {"id": "g1/0", "step": 2, "split": "greedy", "reward": None, "stop_reason": "error", "error": "boom"},
    ]
    row = run.table().slice(0, 1).to_pylist()[0]
    assert (row["task_id"], row["data_source"], row["group"]) == ("train-0", "openai/gsm8k", "g0")
    assert (row["num_turns"], row["num_sampled_tokens"], row["components"]) == (1, 2, [("outcome", 1.0)])
    assert "payload" not in row


@given(logprobs=st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_logprobs_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, logprobs: list[float]) -> None:
    folder = tmp_path_factory.mktemp("run")
    recorded = trajectory(logprobs=logprobs)
    with ParquetStore(folder) as store:
        store.add(TrajectoryGroup(id="g0", task=TASK, trajectories=(recorded,)), step=0, split="train")
    assert open_store(folder).trajectory("g0/0").same_as(recorded)


def test_routed_experts_come_back(tmp_path: Path) -> None:
    one = trajectory()
    routes = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    spans = (replace(one.segments[0].spans[0], routed_experts=routes), *one.segments[0].spans[1:])
    spans = (*spans[:2], replace(spans[2], routed_experts=routes[:1]))
    routed = replace(one, segments=(Segment(spans=spans), *one.segments[1:]))
    store = ParquetStore(tmp_path)
    for step, member in enumerate((routed, one)):
        store.add(TrajectoryGroup(id="g0", task=TASK, trajectories=(member,)), step=step, split="train")
    store.close()
    found = open_store(tmp_path).trajectories()
    assert [a.same_as(b) for a, b in zip(found, (routed, one), strict=True)] == [True, True]


def test_reopened_store_goes_on_after_the_last_part(tmp_path: Path) -> None:
    store = ParquetStore(tmp_path)
    store.flush()
    for step in range(2):
        store.add(group(f"g{step}"), step=step, split="train")
        store.flush()
    again = ParquetStore(tmp_path)
    again.add(group("g2"), step=2, split="train")
    again.close()
    names = sorted(p.name for p in (tmp_path / "trajectories").iterdir())
    assert names == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    assert [g.id for g in open_store(tmp_path).groups()] == ["g0", "g1", "g2"]


def test_repeated_step_counts_once_with_its_later_record(tmp_path: Path) -> None:
    for reward in (0.0, 1.0):
        with ParquetStore(tmp_path) as store:
            store.add(group(reward=reward), step=5, split="train")
    run = open_store(tmp_path)
    assert run.table()["reward"].to_pylist() == [1.0, 1.0]
    assert run.trajectory("g0/0").reward == Reward(total=1.0, components={"outcome": 1.0})


def test_interrupt_loses_no_added_group(tmp_path: Path) -> None:
    def run() -> None:
        with ParquetStore(tmp_path) as store:
            store.add(group(), step=0, split="train")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(open_store(tmp_path)) == 2


def test_interrupted_write_leaves_no_half_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ParquetStore(tmp_path)
    store.add(group(), step=0, split="train")
    with monkeypatch.context() as patched:
        patched.setattr(pq, "write_table", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.flush()
    assert len(open_store(tmp_path)) == 0
    store.close()
    assert len(open_store(tmp_path)) == 2


def _interrupted(table: object, path: Path, **_: object) -> None:
    path.write_bytes(b"PAR1 half of it")
    raise KeyboardInterrupt


@pytest.mark.parametrize("damage", ["cut", "foreign", "payload"])
def test_damaged_part_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    with ParquetStore(tmp_path) as store:
        for step in range(3):
            store.add(group(f"g{step}"), step=step, split="train")
            store.flush()
    part = tmp_path / "trajectories" / "part-00001.parquet"
    whole = part.read_bytes()
    if damage == "foreign":
        pq.write_table(pq.read_table(part).select(["id"]), part)
    elif damage == "payload":
        column = pq.ParquetFile(part).metadata.row_group(0).column(12)
        start = column.dictionary_page_offset or column.data_page_offset
        part.write_bytes(whole[:start] + bytes(column.total_compressed_size) + whole[start + column.total_compressed_size :])
    else:
        part.write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING):
        found = [g.id for g in open_store(tmp_path).groups()]
    assert found == ["g0", "g2"]
    assert len(caplog.messages) == 1
    assert "part-00001.parquet cannot be read and is skipped" in caplog.messages[0]


def test_missing_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    refuses(lambda: open_store(tmp_path), DataError, "has no recorded trajectories ", "It contains config.yaml")
    with ParquetStore(tmp_path) as store:
        store.add(group(), step=0, split="train")
    with pytest.raises(DataError, match=r"no trajectory 'g0/9', step 0 is recorded in .* Did you mean 'g0/"):
        open_store(tmp_path).trajectory("g0/9", step=0)
    refuses(lambda: open_store(tmp_path).trajectory("g0/0", split="trian"), DataError, "recorded for step 0, split train.")


def test_step_of_several_row_groups_is_read_whole(tmp_path: Path) -> None:
    """Each row group has dictionaries of its own, and the table for a condition is larger than a pipe."""
    store, size = ParquetStore(tmp_path), 3 * ROW_GROUP
    for number in range(size):
        store.add(group(f"g{number}-{'x' * 200}", size=1, reward=float(number % 2)), step=0, split="greedy")
    store.close()
    (part,) = (tmp_path / "trajectories").iterdir()
    assert pq.read_metadata(part).num_row_groups == 3
    run = open_store(tmp_path)
    assert len(run) == size and not run.problems
    assert len(run.filter("reward > 0.5")) == size // 2
    assert sum(1 for _ in run.trajectories()) == size
