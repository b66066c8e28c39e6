"""What is damaged in a run on purpose: rows of its trajectories, and its files. Each name says what is wrong.

change_row(run, SHOWN["numbers"])       one row with odd values
FILES["truncated"](run)                 one file that is broken
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from polyturn.store.parquet_store import list_parts

Row = dict[str, Any]
LONG = "x" * 5000
HOSTILE = "<img src=x onerror='window.pwned = 1'>\u202e\x1b[31m"


def join_parts(run: Path) -> None:
    """Make one part of all."""
    first, *others = list_parts(run / "trajectories")
    table = pa.concat_tables([pq.read_table(part) for part in (first, *others)])
    for part in others:
        part.unlink()
    pq.write_table(table, first)


def change_row(run: Path, change: Callable[[Row], object], at: int = 0) -> str:
    """Change one row of a run and return its id."""
    (part,) = list_parts(run / "trajectories")
    table = pq.read_table(part)
    rows = table.to_pylist()
    name: str = rows[at]["id"]
    change(rows[at])
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), part)
    return name


def record(change: Callable[[Any], object]) -> Callable[[Row], object]:
    """Return a function that changes the trajectory in a row, which is JSON."""

    def change_json(row: Row) -> None:
        data = json.loads(row["trajectory"])
        change(data)
        row["trajectory"] = json.dumps(data)

    return change_json


def spans(**values: Any) -> Callable[[Row], object]:
    """Return a function that sets fields of every span."""
    return record(lambda data: [span.update(values) for segment in data["segments"] for span in segment["spans"]])


def turns(**values: Any) -> Callable[[Row], object]:
    """Return a function that sets fields of every turn."""
    return record(lambda data: [turn.update(copy.deepcopy(values)) for turn in data["turns"]])


def results(**values: Any) -> Callable[[Row], object]:
    """Return a function that sets fields of every tool result, in the record and in its column."""

    def change(row: Row) -> None:
        record(lambda data: [r.update(copy.deepcopy(values)) for turn in data["turns"] for r in turn["tool_results"]])(row)
        for struct in row["tool_results"]:
            struct.update({k: v for k, v in values.items() if k in struct})

    return change


def long_names(data: Any) -> None:
    for turn in data["turns"]:
        for one in (*turn["message"]["tool_calls"], *turn["tool_results"], turn["message"], *turn["observation"]):
            one.update(name=LONG)
    data["segments"][0].update(agent=LONG)


UNREADABLE: dict[str, Callable[[Row], object]] = {
    **{f"short {name}": lambda row, name=name: row.update({name: row[name][:-3]})
       for name in ("ids", "logprobs", "advantages", "policy_logprobs", "entropies")},
    **{f"long {name}": lambda row, name=name: row.update({name: [*(row[name] or []), 1, 1]})
       for name in ("ids", "logprobs", "weights", "advantages", "policy_logprobs", "entropies", "trained_weights")},
    "no JSON": lambda row: row.update(trajectory="{"),
    "deep JSON": lambda row: row.update(trajectory="[" * 100_000),
    "stop reason": record(lambda data: data.update(stop_reason="odd")),
    "no task": record(lambda data: data.pop("task")),
    "no message": record(lambda data: [turn.pop("message") for turn in data["turns"]]),
    "no spans": record(lambda data: [segment.update(spans=[]) for segment in data["segments"]]),
    "no segments": record(lambda data: data.update(segments=[])),
    "span of no length": spans(length=-3),
    "span of great length": spans(length=2**31 - 1),
    "turn of no span": turns(spans=[[0, 999]]),
    "span of odd length": spans(length="x"),
}  # fmt: skip
SHOWN: dict[str, Callable[[Row], object]] = {
    "long question": lambda row: row.update(question="q" * 3_000_000),
    "long error": lambda row: row.update(error="x" * 2_000_000),
    "names": lambda row: row.update(id=HOSTILE, group=HOSTILE, data_source=HOSTILE, dropped=HOSTILE, task_id="'; drop"),
    "lengths": lambda row: [
        row.update(
            dict.fromkeys(("id", "group", "data_source", "dropped", "task_id", "error"), LONG), components=[(LONG, 1.0)]
        ),
        record(long_names)(row),
        results(name=LONG, error=LONG)(row),
    ],
    "numbers": lambda row: row.update(reward=float("nan"), generate_s=float("inf"), num_turns=-1, min_version=-9, step=-5),
    "parts": lambda row: row.update(components=[("a", float("inf")), ("b", float("nan"))]),
    "logprobs": lambda row: row.update(logprobs=[float("nan")] * len(row["logprobs"])),
    "advantages": lambda row: row.update(advantages=[float("-inf")] * len(row["advantages"])),
    "strange ids": lambda row: row.update(ids=[2**31 - 1] * len(row["ids"])),
    "durations": results(duration_s=float("nan"), reward=float("inf")),
    "timings": turns(timings={"start": float("nan"), "generate": float("inf")}),
    "timings of texts": turns(timings={"start": "x", "generate": "y"}),
}


def rewrite(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], object]:
    def damage(run: Path) -> None:
        (part,) = list_parts(run / "trajectories")
        pq.write_table(change(pq.read_table(part)), part)

    return damage


def of_type(column: str, kind: pa.DataType, value: object) -> Callable[[Path], object]:
    return rewrite(
        lambda table: table.set_column(table.schema.get_field_index(column), column, pa.array([value] * len(table), kind))
    )


def break_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def damage(run: Path) -> None:
        (part,) = list_parts(run / "trajectories")
        part.write_bytes(change(part.read_bytes()))

    return damage


def write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes(data)


def line(**values: object) -> bytes:
    return json.dumps({"step": 1, **values}).encode() + b"\n"


def leave_no_folder(run: Path) -> None:
    shutil.rmtree(run / "trajectories")
    (run / "trajectories").write_text("x")


def lead_out(run: Path) -> None:
    (part,) = list_parts(run / "trajectories")
    part.rename(run.parent / "elsewhere.parquet")
    part.symlink_to(run.parent / "elsewhere.parquet")


FILES: dict[str, Callable[[Path], object]] = {
    "truncated": break_bytes(lambda data: data[:-200]),
    "flipped": break_bytes(lambda data: bytes(b ^ (255 * (i % 97 == 5)) for i, b in enumerate(data[:-3000])) + data[-3000:]),
    "noise": break_bytes(lambda data: bytes(reversed(data))),
    "twice": rewrite(lambda table: pa.concat_tables([table, table])),
    "one id": of_type("id", pa.string(), "same"),
    "no value": of_type("task_id", pa.string(), None),
    "steps as texts": of_type("step", pa.string(), "three"),
    "ids as texts": of_type("ids", pa.list_(pa.string()), ["a"]),
    "ids as floats": of_type("ids", pa.list_(pa.float64()), [1e300]),
    "texts as one": of_type("texts", pa.string(), "hi"),
    "splits as times": of_type("split", pa.timestamp("s"), 5),
    **{f"without {name}": rewrite(lambda table, name=name: table.drop_columns([name]))
       for name in ("ids", "texts", "reward", "id", "trajectory", "tool_results", "components")},
    "no folder": leave_no_folder,
    "a link": lead_out,
    "long name": write("metrics.jsonl", line(**{"x" * 1_000_000: 1.0, HOSTILE: 2})),
    "long names": write("metrics.jsonl", line(**{f"{'rollout/stop_' * (i > 9)}{chr(97 + i) * 900}": i for i in range(20)})),
    "many names": write("metrics.jsonl", line(**{f"a/{i}": i for i in range(20_000)})),
    "not finite": write("metrics.jsonl", b'{"step":1,"time/step_s":NaN,"eval/a/success":-Infinity}\n'),
    "extremes": write("metrics.jsonl", line(**{"time/step_s": 1e308, "reward/mean": 1e308, "tokens/sampled": 1e308}) * 3),
    "a far step": write("metrics.jsonl", b'{"step":-1,"a":1}\n{"step":0,"a":1}\n{"step":9007199254740991,"a":1}\n'),
    "noise of metrics": write("metrics.jsonl", bytes(range(256)) * 400),
    "config's aliases": write("config.yaml", b"a: &a [x]\n" + b"".join(b"b%d: [*a, *a]\n" % i for i in range(50))),
    "config's depth": write("config.yaml", b"[" * 50_000),
    "config's types": write("config.yaml", b"train: [1]\nalgorithm: 3\nreward: {weights: [1]}\nwarm_start: {steps: x}\n"),
    "config's keys": write("config.yaml", b"train: {steps: .nan}\nalgorithm: {advantage: {name: [1]}}\n? [1, 2]\n: 3\n"),
    "config's tags": write("config.yaml", b"a: !!python/object/apply:os.abort []\n"),
    "alarms": write("alarms.jsonl", b'{"step": 1, "alarm": {}, "message": "<script>"}\n[]\n\xff\n' + b"[" * 9000 + b"\n"),
    "config's size": write("config.yaml", b"a: b\n" * 300_000),
    "a link to labels": lambda run: (run / "labels.jsonl").symlink_to("/etc/passwd"),
    "labels": write("labels.jsonl", b'{"id": 1}\n\xff\xff\n[]\n{"id":"a","step":1e400}\n' + b"{" * 5000),
    "lock": write(".lock", f"process 1 on {socket.gethostname()}\nended: {HOSTILE}".encode()),
    "tokenizer": write("tokenizer/tokenizer.json", os.urandom(500)),
}  # fmt: skip
