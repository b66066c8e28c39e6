"""The table's filters, counts, labels and files, as the pages ask for them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from polyturn.core.serde import from_json
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.serving.auth import ServerRules
from polyturn.store.parquet_store import ParquetStore
from polyturn.store.schema import INDEX_COLUMNS, SCHEMA
from polyturn.store.stored_run import open_store
from polyturn.testing.episodes import scripted_context, task
from polyturn.viewer import filters
from polyturn.viewer.app import create_app
from polyturn.viewer.run_view import RunView


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rewards = iter([0.0, 1.0, 1.0, 0.5])
    context = scripted_context(["Four apples."], rewards={"x": lambda trajectory: next(rewards)})
    with ParquetStore(tmp_path / "run") as store:
        for step, split in ((1, "train"), (2, "eval/greedy")):
            spec = GroupSpec(id=f"g{step}", task=task("What is 2+2?", id="t", data_source="x"), size=2)
            (group,) = asyncio.run(RolloutPool(context).run([spec]))
            store.add(group, step=step, split=split)
    return tmp_path / "run"


@pytest.fixture
def client(run: Path) -> TestClient:
    return TestClient(create_app([RunView(run)], rules=ServerRules()), base_url="http://127.0.0.1")


def label(client: TestClient, id: str, said: str, note: str = "", step: object = 1) -> int:
    body = {"id": id, "step": step, "split": "train", "label": said, "note": note}
    return client.post("/api/runs/0/label", json=body).status_code


def test_facets_are_counted_with_training_first(client: TestClient):
    counted = {f["name"]: f["values"] for f in client.get("/api/runs/0/trajectories").json()["facets"]}
    assert [v["value"] for v in counted["split"]] == ["train", "eval/greedy"]
    assert counted["reward"] == [{"value": v, "count": n} for v, n in (("0.0", 1), ("0.5", 1), ("1.0", 2))]
    assert "stop_reason" not in counted, "all are of one kind"
    assert client.get("/api/runs/0/trajectories?text=apples&reward=1.0").json()["total"] == 2
    assert client.get("/api/runs/0/trajectories?text=(&regex=1").status_code == 422
    assert client.get("/api/runs/0/trajectories?min_version=0&max_version=0").json()["total"] == 4


def test_step_recorded_while_a_page_is_filtered_appears_later(run: Path):
    view = RunView(run)

    class Growing(dict[str, str]):
        def items(self):
            with ParquetStore(run) as store:
                store.add(next(open_store(run).groups(step=1)), step=3, split="train")
            view.refresh()
            return super().items()

    assert view.page(Growing(split="train"))["total"] == 2
    assert view.page({"split": "train"})["total"] == 4


def test_ranges_of_a_number_hold_every_row_once(client: TestClient):
    steps = [*range(100), 7, 7]
    nothing = {name: pa.nulls(len(steps), SCHEMA.field(name).type) for name in INDEX_COLUMNS}
    reward = pa.array([None, float("nan"), *(float(i // 50) for i in range(100))])
    found = {f["name"]: f for f in filters.facets(pa.table({**nothing, "step": steps, "reward": reward}))}
    ranges = found["step"]["values"]
    assert len(ranges) == filters.NUM_RANGES and sum(one["count"] for one in ranges) == len(steps)
    assert ranges[0] == {"low": "0", "high": "10", "count": 13} and ranges[-1]["high"] == "99"
    assert all(int(b["low"]) == int(a["high"]) + 1 for a, b in itertools.pairwise(ranges))
    assert found["reward"]["values"] == [{"value": v, "count": 50} for v in ("0.0", "1.0")]
    assert client.get("/api/runs/0/trajectories?min_step=2&max_step=2").json()["total"] == 2


def test_label_is_kept_and_narrows_the_table(client: TestClient, run: Path):
    assert [label(client, f"g1/{i}", "odd <b>", "why?") for i in (0, 1)] == [200, 200]
    assert label(client, "g1/1", "fine") == 200 and label(client, "g1/0", "") == 200 and label(client, "g1/0", "odd") == 200
    found = client.get("/api/runs/0/trajectories?label=odd").json()
    assert [r["id"] for r in found["rows"]] == ["g1/0"] and found["labels"] == ["fine", "odd"]
    assert client.get("/api/runs/0/trajectories?label=*").json()["total"] == 2
    assert client.get("/api/runs/0/trajectory?id=g1/1").json()["label"] == "fine"
    assert len((run / "labels.jsonl").read_text().splitlines()) == 5
    (run / "labels.jsonl").open("a").write("half a li\n")
    assert client.get("/api/runs/0/trajectories?label=*").json()["total"] == 2


def test_note_is_found_and_half_a_line_costs_no_label(client: TestClient, run: Path):
    (run / "labels.jsonl").write_text('{"id": "g1/0", "step": 1, "sp')
    assert [label(client, "g1/0", "", "Copies the TEST"), label(client, "g1/1", "odd", "a test")] == [200, 200]
    asked = ("note=test copies", "note=test", "note=test&label=odd", "note=nothing", "label=*")
    totals = [client.get(f"/api/runs/0/trajectories?{one}").json()["total"] for one in asked]
    assert totals == [1, 2, 1, 0, 2]
    found = client.get("/api/runs/0/trajectories").json()
    assert found["has_labels"] and found["labels"] == ["odd"]


def test_spread_of_a_group_is_that_of_its_advantages(client: TestClient):
    (row,) = client.get("/api/runs/0/groups?split=train").json()["rows"]
    why = client.get("/api/runs/0/advantage?id=g1/0&split=train").json()
    assert row["reward_stddev"] == pytest.approx(why["std"]) == pytest.approx(0.5**0.5) and row["id_count"] == 2


def test_wrong_label_is_refused_and_no_link_is_followed(client: TestClient, run: Path, tmp_path: Path):
    whole = {"id": "g1/0", "step": 1, "split": "train", "label": "a"}
    changes: tuple[dict[str, object], ...] = (
        {"id": "g9/9"},
        {"label": "a" * 61},
        *({"id": id} for id in ("", 3, None)),
        *({"step": step} for step in (True, 1.0, "1", 10**30, None)),
        {"split": "eval"},
    )
    for body in (*(whole | change for change in changes), *({k: v for k, v in whole.items() if k != n} for n in whole)):
        if body != {k: v for k, v in whole.items() if k != "label"}:
            assert client.post("/api/runs/0/label", json=body).status_code == 422, body
    assert client.post("/api/runs/0/label", json=[1]).status_code in (400, 422)
    assert not (run / "labels.jsonl").exists()
    outside = tmp_path / "outside.jsonl"
    outside.write_text("")
    os.symlink(outside, run / "labels.jsonl")
    assert label(client, "g1/0", "a") == 422 and outside.read_text() == ""
    hostile = client.post("/api/runs/0/label", json={}, headers={"Origin": "http://evil.example"})
    assert hostile.status_code == 403


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_selection_is_exported_whole(client: TestClient, run: Path, tmp_path: Path, kind: str):
    answer = client.get(f"/api/runs/0/export?format={kind}&split=train&text=apples")
    assert answer.status_code == 200 and f'filename="trajectories.{kind}"' in answer.headers["content-disposition"]
    store = open_store(run)
    if kind == "jsonl":
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert [line["group"] for line in lines] == ["g1", "g1"]
        assert from_json(Trajectory, lines[0]["trajectory"]).same_as(store.trajectory("g1/0", step=1))
    else:
        (tmp_path / "a.parquet").write_bytes(answer.content)
        assert pq.read_table(tmp_path / "a.parquet")["id"].to_pylist() == ["g1/0", "g1/1"]


def test_export_has_bounds_and_a_known_format(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    assert client.get("/api/runs/0/export?format=exe").status_code == 422
    monkeypatch.setattr(filters, "MAX_EXPORT", 1)
    assert "filter the table" in client.get("/api/runs/0/export").json()["detail"]


def test_state_of_a_run_is_read_from_its_files(tmp_path: Path):
    metrics = tmp_path / "metrics.jsonl"
    (tmp_path / "config.yaml").write_text("train: {steps: 3}\n")
    metrics.write_text('{"step": 1, "time/step_s": 20.0}\n{"step": 2, "time/step_s": 1e308}\n')
    assert RunView(tmp_path).summary()["state"] == "running"
    metrics.write_text('{"step": 1, "time/step_s": 20.0}\n{"step": 2, "time/step_s": 40.0}\n')
    os.utime(metrics, (1000, 1000))
    found = RunView(tmp_path).summary()
    assert found["state"] == "silent" and found["spent_s"] == 60.0 and found["silent_s"] > 1e6
    with metrics.open("a") as file:
        file.write('{"step": 3}\n')
    assert RunView(tmp_path).summary()["state"] == "finished"
