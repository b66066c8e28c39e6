"""Hostile runs and requests: each affects only itself, and shows nothing from outside the folder of the run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from polyturn.api import console as console_module
from polyturn.cli.console import Output
from polyturn.cli.main import main
from polyturn.core.errors import DataError
from polyturn.core.messages import Message
from polyturn.core.trajectory import ToolResult, Trajectory
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.serving.auth import ServerRules
from polyturn.store import sql
from polyturn.store.parquet_store import ParquetStore
from polyturn.store.part_file import MAX_ROWS
from polyturn.store.schema import SCHEMA
from polyturn.store.stored_run import StoredRun, open_store
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from polyturn.viewer.app import create_app
from polyturn.viewer.run_view import RunView
from support.runs import call_command

SECRET = "what only the owner of this machine may read"


def make_run(folder: Path) -> Path:
    with ParquetStore(folder) as store:
        spec = GroupSpec(id="g0", task=task("2+2?", id="t0", ground_truth="4"), size=2)
        (group,) = asyncio.run(RolloutPool(scripted_context(["It is 5."])).run([spec]))
        store.add(group, step=1, split="train")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    (folder / "config.yaml").write_text("name: one\n")
    tiny_codec().tokenizer.save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "one")


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "runs" / "one")


def client_of(*folders: Path) -> TestClient:
    app = create_app([RunView(f) for f in folders], rules=ServerRules())
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


BAD_LINES = [
    b'{"step": "two"}',
    b'{"step": [1]}',
    b'{"step": true}',
    b'{"step": 1e400}',
    b'{"step": ' + b"9" * 400 + b"}",
    b'{"step": ' + b"9" * 5000 + b"}",
    b'{"step": 2, "a": {"b": NaN}}',
    b'{"step": 2, "a": "text"}',
    b'{"step": 2, "\\ud800": 1}',
    b'{"step": 2, "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"step": 2, "a": ' + b"1" * 400 + b"}",
    b'{"step": 3, "rew',
    b"[]",
    b"null",
    b"\xff\xfe\x00",
    b"\x00" * 1000,
]


def add_lines(run: Path, *lines: bytes) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\n".join([*lines, json.dumps({"step": 3, "reward/mean": 0.75}).encode(), b""]))


def test_bad_lines_of_metrics_cost_themselves_alone(run: Path, made: Path, tmp_path: Path) -> None:
    add_lines(run, *BAD_LINES)
    client = client_of(run, made)
    listed = client.get("/api/runs")
    assert listed.status_code == 200
    assert [one["last_step"] for one in listed.json()] == [3, 1]
    assert any("lines of metrics.jsonl" in p for p in listed.json()[0]["problems"])
    drawn = client.get("/api/runs/0/curves?name=reward/mean").json()["reward/mean"]
    assert (drawn["x"], drawn["y"][-1]) == ([1.0, 3.0], 0.75)
    shown = call_command(main, "show", run.parent)
    assert shown.code == 0 and "0.750" in shown.out, shown.err
    reported = call_command(main, "report", run, made, "-o", tmp_path / "report.html")
    assert reported.code == 0, reported.err


def test_run_whose_reader_breaks_costs_itself_alone(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = make_run(tmp_path / "two")
    broken, whole = RunView(run), RunView(good)

    def breaks(self: RunView) -> None:
        if self is broken:
            raise ZeroDivisionError("something that nobody thought of")

    monkeypatch.setattr(RunView, "refresh", breaks)
    client = TestClient(create_app([broken, whole], rules=ServerRules()), base_url="http://127.0.0.1")
    first, second = client.get("/api/runs").json()
    assert "nobody thought of" in first["problems"][0] and not second["problems"]
    assert set(first) == set(second)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "absolute") for name in ("config.yaml", "metrics.jsonl", "alarms.jsonl", "tokenizer", "trajectories")),
        ("trajectories", "relative"),
        ("config.yaml", "circle"),
        *((name, "pipe") for name in ("config.yaml", "metrics.jsonl", "trajectories")),
    ],
)
def test_link_out_of_the_run_is_never_followed(run: Path, tmp_path: Path, name: str, kind: str) -> None:
    """A pipe is not waited for either."""
    outside = tmp_path / "private"
    make_run(outside)
    for file in ("config.yaml", "metrics.jsonl", "alarms.jsonl"):
        (outside / file).write_text(json.dumps({"step": 987654321, "alarm": "a", "message": SECRET}) + "\n")
    place = run / name
    if place.is_dir():
        place.rename(run / "set-aside")
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to({"absolute": outside / name, "relative": Path("../../private") / name, "circle": place}[kind])
    client = client_of(run)
    answers = [client.get(f"/api/runs{path}") for path in ("", "/0/metrics", "/0/config", "/0/trajectories")]
    assert [a.status_code for a in answers if a.status_code not in (200, 422)] == []
    said = " ".join(a.text for a in answers)
    assert SECRET not in said and "987654321" not in said
    call_command(main, "show", run.parent)
    reported = call_command(main, "report", run, "-o", tmp_path / "report.html")
    assert reported.code in (0, 2)
    if reported.code == 0:
        assert SECRET not in (tmp_path / "report.html").read_text()
    if name == "trajectories" and kind in ("absolute", "relative"):
        assert len(open_store(run)) == 0


def test_link_to_the_folder_of_a_run_is_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    (run / "curves").mkdir()
    (run / "config.yaml").rename(run / "curves" / "config.yaml")
    (run / "config.yaml").symlink_to("curves/config.yaml")  # inside
    assert RunView(tmp_path / "link").config() == "name: one\n"


def rows_that_repeat(**columns: pa.Array) -> pa.Table:
    num = len(next(iter(columns.values())))
    return pa.table({f.name: columns.get(f.name, pa.nulls(num, f.type)) for f in SCHEMA}, schema=SCHEMA)


def many_rows() -> pa.Table:
    num = MAX_ROWS + 1
    return rows_that_repeat(step=pa.array(np.zeros(num, np.int64)))


def test_part_with_too_many_rows_is_skipped(run: Path) -> None:
    part = run / "trajectories" / "part-00007.parquet"
    pq.write_table(many_rows().replace_schema_metadata(SCHEMA.metadata), part, compression="zstd")
    store = StoredRun(run)
    assert len(store) == 2 and "part-00007.parquet" in store.problems
    assert store.trajectory("g0/0").id == "g0/0"


HOSTILE = "\x1b]0;mine\x07\x1b[31m[/red][/][bold\u202e"
"""What a terminal obeys, and what rich takes for markup."""


def hostile(trajectory: Trajectory, *, says: bool) -> Trajectory:
    """Return a trajectory with such text in its messages and results, or in its roles and names."""
    (turn,) = trajectory.turns
    message = Message(role="tool", content=HOSTILE, tool_call_id="c")
    result = ToolResult(call_id="c", name=HOSTILE, content=HOSTILE, error=HOSTILE)
    assert trajectory.reward is not None
    if says:
        own = Message(role="assistant", content=HOSTILE)
        told = dataclasses.replace(turn, message=own, tool_results=(result,), observation=(message,))
        reward = dataclasses.replace(trajectory.reward, components={f"tool/{HOSTILE}": 1.0})
        return dataclasses.replace(trajectory, turns=(told,), error=HOSTILE, reward=reward)
    heard = dataclasses.replace(turn, observation=(Message(role=HOSTILE, content="x"),))
    asked = dataclasses.replace(trajectory.task, id=HOSTILE, data_source=HOSTILE, ground_truth=HOSTILE)
    return dataclasses.replace(trajectory, turns=(heard,), task=asked, id=HOSTILE)


@pytest.mark.parametrize("says", [True, False])
def test_contents_of_a_run_are_printed_without_control_codes(run: Path, tmp_path: Path, says: bool) -> None:
    group = next(open_store(run).groups())
    first = hostile(group.trajectories[0], says=says)
    made = tmp_path / "made" / f"one{HOSTILE.replace('/', '')}"
    with ParquetStore(made) as store:
        store.add(dataclasses.replace(group, trajectories=(first, group.trajectories[1])), step=1,
                  split=f"eval/{'greedy' if says else HOSTILE}")  # fmt: skip
    for words in (
        ("show", made.parent),
        ("show", made),
        ("show", made, first.id),
        ("show", made, first.id, "--tokens"),
        ("show", made, "--where", "cast(id || task_id || split as int) > 1"),
        ("show", made, "--split", "none"),
        ("compare", made, made),
        ("rescore", made, "--reward", "gsm8k"),
        ("report", made, "-o", tmp_path / "report.html"),
    ):
        called = call_command(main, *words)
        assert called.code in (0, 2), (words, called.err)
        assert not set("\x1b\x07\u202e") & set(called.out + called.err), words
        if words == ("show", made, first.id):
            assert called.out.count("[/red][/][bold") >= (3 if says else 1), "its text, its tool's and its error; its name"


def test_log_and_results_have_no_markup_or_control_codes(capsys: pytest.CaptureFixture[str]) -> None:
    console_module.stderr_console.cache_clear()
    record = logging.LogRecord("polyturn", logging.INFO, "", 0, "the tool said \x1b[2J[/red] [step, weight]", None, None)
    console_module.ConsoleHandler().emit(record)
    Output().fact("name", "\x1b[2J[/red] [step, weight]")
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert "\x1b" not in text and "\ufffd[2J[/red] [step, weight]" in text
    console_module.stderr_console.cache_clear()


def test_console_hides_secrets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    console_module.stderr_console.cache_clear()
    monkeypatch.setenv("MY_TOKEN", "s3cr3t-token")
    console_module.ConsoleHandler().handle(logging.LogRecord("polyturn", logging.INFO, "", 0, "s3cr3t-token", None, None))
    assert capsys.readouterr().err == "***\n"
    console_module.stderr_console.cache_clear()


def test_part_with_odd_digits_in_its_name_is_ignored(run: Path) -> None:
    (run / "trajectories" / "part-²³.parquet").write_bytes(b"")
    assert len(StoredRun(run)) == 2


@pytest.mark.parametrize(
    "condition",
    [
        "(select count(*) from range(1000000) a, range(1000000) b) > 1",
        "(select count(distinct range) from range(100000000)) > 1",
    ],
    ids=["time", "memory"],
)
def test_condition_ends_at_its_bounds(run: Path, condition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql.run_query, "__kwdefaults__", {"stop": None, "timeout_s": 2.0, "max_bytes": 32 << 20})
    with pytest.raises(DataError, match=r"took longer than 2 s|more than 32 MiB"):
        StoredRun(run).filter(condition)


def test_condition_reads_writes_and_sets_nothing_outside(run: Path, tmp_path: Path) -> None:
    (tmp_path / "private.csv").write_text(f"a\n{SECRET}\n")
    for condition in (
        f"(select count(*) from read_csv('{tmp_path}/private.csv')) > 0",
        f"(select count(*) from '{tmp_path}/private.csv') > 0",
        "getenv('HOME') is not null",
        "(select count(*) from numbered) > 0",
    ):
        with pytest.raises(DataError) as refused:
            StoredRun(run).filter(condition)
        assert SECRET not in str(refused.value)
    with pytest.raises(DataError):
        StoredRun(run).sql(f"copy trajectories to '{tmp_path}/out.csv'")
    assert not (tmp_path / "out.csv").exists()
    with pytest.raises(DataError):
        StoredRun(run).filter("true); set memory_limit='100GB'; select (1=1")
    assert len(StoredRun(run).filter("reward is null or id like 'g0/%'")) == 2


def test_condition_ends_when_its_client_left(run: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(DataError, match="stopped"):
        StoredRun(run).filter("(select count(*) from range(1000000) a, range(1000000) b) > 1", stop=stop)


ODD_REQUESTS = (
    "trajectories?sort=components",
    "trajectories?components=a",
    "trajectories?reward=a",
    "trajectories?generate_s=1e999",
    "trajectories?step=" + "9" * 30,
    "trajectories?min_step=nan",
    "trajectories?offset=" + "9" * 5000,
    "curves?name=reward/mean&axis=a",
    "curves?name=reward/mean&smooth=nan",
    "curves?name=reward/mean&low=nan",
    "curves?" + "&".join(["name=a"] * 61),
    "groups?where=true",
    "groups?offset=" + "9" * 5000,
    "timeline?step=x",
    "timeline?step=" + "9" * 30,
    "trajectory",
    "trajectory?id=g0/0&step=x",
    "trajectory?id=g0/0&step=" + "9" * 400,
    "trajectory?id=g0/0&segment=-1",
)


def test_odd_request_is_answered_with_a_short_sentence(run: Path) -> None:
    client = client_of(run)
    for request in ODD_REQUESTS:
        answer = client.get(f"/api/runs/0/{request}")
        assert answer.status_code in (200, 422), request
        if answer.status_code == 422:
            assert isinstance(answer.json()["detail"], str) and len(answer.json()["detail"]) < 300, request


def test_viewer_stops_the_condition_of_a_client_that_left(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = threading.Event(), threading.Event()

    def page(self: RunView, wanted: object, *, stop: threading.Event, **given: object) -> dict[str, object]:
        began.set()
        assert stop.wait(120)
        ended.set()
        raise DataError("stopped")

    monkeypatch.setattr(RunView, "page", page)
    app = create_app([RunView(run)], rules=ServerRules())

    async def ask() -> None:
        scope = {"type": "http", "method": "GET", "path": "/api/runs/0/trajectories", "raw_path": b"", "query_string": b"",
                 "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "scheme": "http",
                 "server": ("127.0.0.1", 80), "http_version": "1.1", "root_path": ""}  # fmt: skip
        asked = False

        async def receive() -> dict[str, object]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": b"", "more_body": False}
            if not began.is_set():
                await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        async def send(message: object) -> None:
            pass

        await app(scope, receive, send)

    asyncio.run(ask())
    assert ended.is_set()
