"""Reading a run: while it is written, narrowed by conditions, and with the results of training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_parquet_store import TASK, group, trajectory

import polyturn
from polyturn.core.errors import DataError
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.store.options import StoreSettings
from polyturn.store.parquet_store import ParquetStore, list_parts
from polyturn.store.schema import Trained
from polyturn.store.stored_run import open_store
from support.refusals import refuses

pytestmark = pytest.mark.timeout(300)  # each condition on a run starts a process


def write(folder: Path, *, steps: int = 3, settings: StoreSettings | None = None, size: int = 2) -> None:
    with ParquetStore(folder, settings) as store:
        for step in range(steps):
            store.add(group(f"g{step}", size=size, reward=float(step)), step=step, split="train")
            store.flush()


def test_run_is_narrowed_by_conditions_and_values(tmp_path: Path) -> None:
    write(tmp_path)
    run = polyturn.Run(tmp_path)
    assert [t.id for t in run.filter("reward >= 1 and num_turns = 1").trajectories()] == ["g1/0", "g1/1", "g2/0", "g2/1"]
    assert [g.id for g in run.select(step=2).groups()] == ["g2"]
    assert [t.id for t in run.filter("step > 0").select(group="g2").trajectories()] == ["g2/0", "g2/1"]
    best = run.sql("select step, max(reward) as best from trajectories group by step order by step")
    assert best.to_pylist() == [{"step": 0, "best": 0.0}, {"step": 1, "best": 1.0}, {"step": 2, "best": 2.0}]
    refuses(lambda: run.filter("rewrd > 1"), DataError, "not valid: ", "rewrd", " Columns: id, group, step")
    refuses(lambda: run.select(stepp=1), DataError, "there is no column 'stepp'. Did you mean 'step'")
    refuses(lambda: run.table(["step", "nope"]), DataError, "'nope'", "Known: ")


def test_training_results_stand_on_sampled_tokens(tmp_path: Path) -> None:
    trained = Trained(advantages=np.float32([0.5, -0.5]), policy_logprobs=np.float32([-1, -2]), weights=np.float32([0, 1]))
    trained = dataclasses.replace(trained, entropies=np.float32([0.25, 2]))
    with ParquetStore(tmp_path) as store:
        store.add(group(size=2), step=1, split="train", trained={"g0/0": trained, "g0/1": Trained(dropped="zero_variance")})
    first, second = open_store(tmp_path).records()
    assert first.trained.advantages is not None and first.trained.weights is not None
    on_tokens, *_ = first.on_tokens(first.trained.advantages)
    sampled = first.trajectory.segments[0].sampled_mask
    assert np.isnan(on_tokens[~sampled]).all() and on_tokens[sampled].tolist() == [0.5, -0.5]
    assert first.trained.entropies is not None and first.trained.entropies.tolist() == [0.25, 2]
    assert first.trained.weights.tolist() == [0, 1] and second.trained.dropped == "zero_variance"
    rows = open_store(tmp_path).table(["num_trained_tokens", "dropped"]).to_pylist()
    assert rows == [{"num_trained_tokens": 1, "dropped": None}, {"num_trained_tokens": 0, "dropped": "zero_variance"}]


def test_growing_run_is_read_as_far_as_written(tmp_path: Path) -> None:
    with ParquetStore(tmp_path) as store:
        store.add(group("g0"), step=0, split="train")
        store.flush()
        run = open_store(tmp_path)
        assert len(run) == 2 and not run.refresh()
        store.add(group("g1"), step=1, split="train")
        store.flush()
        assert run.refresh() and len(run) == 4


def test_reader_finds_records_after_parts_are_joined(tmp_path: Path) -> None:
    write(tmp_path, steps=3)
    before = open_store(tmp_path)
    with ParquetStore(tmp_path, join_at=2) as store:
        for step in range(3, 7):
            store.add(group(f"g{step}", reward=1.0), step=step, split="train")
            store.flush()
            if step == 3:
                before = open_store(tmp_path)
    assert [p.name for p in list_parts(tmp_path / "trajectories")] == [f"part-{n:05d}.parquet" for n in (0, 1, 2, 4, 6)]
    assert before.trajectory("g3/1").id == "g3/1", "its part is gone, its record is not"
    after = open_store(tmp_path)
    assert [g.id for g in after.groups()] == [f"g{i}" for i in range(7)]
    assert after.trajectory("g4/0").same_as(trajectory("g4/0", reward=1.0))


def test_reader_finds_records_after_a_part_is_written_again(tmp_path: Path) -> None:
    with ParquetStore(tmp_path) as store:
        for step in (2, 1):
            store.add(group(f"g{step}"), step=step, split="train")
    before = open_store(tmp_path)
    store.forget_after(1)
    assert before.trajectory("g1/1").id == "g1/1", "its row has another number now"
    assert [t.id for t in before.trajectories()] == ["g1/0", "g1/1"]
    refuses(lambda: before.trajectory("g2/0"), DataError, "'g2/0' is in ", "deleted, or written again")


def test_search_and_scan_use_parts_as_they_are_now(tmp_path: Path) -> None:
    with ParquetStore(tmp_path, join_at=2) as store:
        for step in (2, 1):
            store.add(group(f"g{step}"), step=step, split="train")
        store.flush()
        before, cache = open_store(tmp_path), dict[tuple[str, tuple[int, int]], int]()
        assert len(before.search("2+2")) == 4
        store.forget_after(1)
        assert before.search("2+2").table(["id"])["id"].to_pylist() == ["g1/0", "g1/1"], "g1 has other row numbers now"
        assert [(rows.tolist(), num) for _, rows, num in before.scan(lambda file: file.num_rows, cache)] == [([0, 1], 2)]
        store.add(group("g3"), step=3, split="train")
        store.flush()
    before = before.select(step=1)
    assert [p.name for p in list_parts(tmp_path / "trajectories")] == ["part-00001.parquet"], "both parts are joined"
    assert before.search("2+2").table(["id"])["id"].to_pylist() == ["g1/0", "g1/1"]
    assert [table["id"].to_pylist() for table, *_ in before.scan(lambda file: file.num_rows, cache)] == [["g1/0", "g1/1"]]


def test_scan_goes_on_when_another_thread_drops_old_parts(tmp_path: Path) -> None:
    class Shared(dict[tuple[str, tuple[int, int]], int]):
        def __iter__(self) -> Iterator[tuple[str, tuple[int, int]]]:
            keys = list(super().__iter__())
            self.clear()
            return iter(keys)

    write(tmp_path)
    cache = Shared({("part-00009.parquet", (0, 0)): 9})
    assert [num for *_, num in open_store(tmp_path).scan(lambda file: file.num_rows, cache)] == [2, 2, 2]


def test_kill_between_joining_and_deleting_duplicates_nothing(tmp_path: Path) -> None:
    write(tmp_path, steps=2)
    folder = tmp_path / "trajectories"
    parts = list_parts(folder)
    joined = pa.concat_tables([pq.read_table(p) for p in parts])
    pq.write_table(joined, parts[-1])
    (folder / ".part-00009.parquet.tmp").write_bytes(b"half")
    assert [g.id for g in open_store(tmp_path).groups()] == ["g0", "g1"]
    ParquetStore(tmp_path).close()
    assert not list(folder.glob(".*.tmp"))


def test_oldest_training_parts_go_when_the_store_is_full(tmp_path: Path) -> None:
    with ParquetStore(tmp_path, StoreSettings(max_gb=1e-9)) as store:
        store.add(group("e0"), step=0, split="eval/greedy")
        store.flush()
        for step in range(3):
            store.add(group(f"g{step}"), step=step, split="train")
            store.flush()
    assert [g.id for g in open_store(tmp_path).groups()] == ["e0", "g2"]


def test_share_of_groups_is_stable_and_evaluations_are_whole(tmp_path: Path) -> None:
    kept = []
    for name in ("a", "b"):
        with ParquetStore(tmp_path / name, StoreSettings(share=0.25)) as store:
            for i in range(400):
                store.add(
                    TrajectoryGroup(id=f"g{i}", task=TASK, trajectories=(trajectory(f"g{i}/0"),)), step=0, split="train"
                )
            store.add(group("e"), step=0, split="eval/greedy")
        kept.append([g.id for g in open_store(tmp_path / name).groups()])
    assert kept[0] == kept[1]
    assert 70 <= len(kept[0]) - 1 <= 130 and kept[0][-1] == "e"


@pytest.mark.parametrize("version", ["2", "9", None])
def test_part_of_another_version_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, version: str | None) -> None:
    write(tmp_path, steps=2)
    part = tmp_path / "trajectories" / "part-00000.parquet"
    metadata = None if version is None else {"polyturn_store": version}
    pq.write_table(pq.read_table(part).replace_schema_metadata(metadata), part)
    run = open_store(tmp_path)
    assert [g.id for g in run.groups()] == ["g1"]
    assert f"version {version or 'none'}," in run.problems["part-00000.parquet"]
    assert "this polyturn reads version 3" in caplog.text


def test_other_tools_read_tokens_and_messages(tmp_path: Path) -> None:
    write(tmp_path, steps=1)
    table = pq.read_table(tmp_path / "trajectories" / "part-00000.parquet")
    row = table.slice(0, 1).to_pylist()[0]
    recorded = trajectory("g0/0", reward=0.0)
    assert row["ids"] == [i for s in recorded.segments for i in s.token_ids.tolist()]
    data = json.loads(row["trajectory"])
    spans = [span for segment in data["segments"] for span in segment["spans"]]
    assert [(s["source"], s["length"]) for s in spans[:3]] == [("prompt", 2), ("sampled", 2), ("observation", 1)]
    assert [call["arguments"] for call in data["turns"][0]["message"]["tool_calls"]] == [{"a": 1}]
    assert "2+2?" in row["texts"]
    assert [(result["name"], result["error"]) for result in row["tool_results"]] == [("calc", None)]


def test_missing_row_is_named(tmp_path: Path) -> None:
    write(tmp_path, steps=0)
    run = polyturn.Run(tmp_path)
    refuses(lambda: run.metrics[-1], DataError, "there is no row -1; the table has 0 rows")
    refuses(lambda: run.trajectories[-1], DataError, "there is no trajectory -1; the run has none yet")
