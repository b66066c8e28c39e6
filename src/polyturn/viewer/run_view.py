"""RunView: what the pages show of one run, as plain data for JSON.

A run goes on while it is looked at, so everything is read as far as it is written; each answer first asks the store and the
metrics file whether there is more. What cannot be read is named in `problems`, never hidden and never fatal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polyturn.core.errors import DataError, did_you_mean, one_line
from polyturn.core.media import Source
from polyturn.core.messages import Message
from polyturn.core.serde import to_json
from polyturn.core.trajectory import SpanSource, ToolResult, Trajectory
from polyturn.store.parquet_store import FOLDER
from polyturn.store.schema import INDEX_COLUMNS, StoredTrajectory
from polyturn.store.stored_run import StoredRun
from polyturn.viewer.tokens import DROPPED, STOPPED, TokenTexts, why, why_weight

MAX_TOKENS = 20_000
"""Tokens of one segment that a page shows; the rest is counted."""
MAX_TEXT = 100_000
"""Characters of one text that a page shows."""
_NUMERIC = ("step", "reward", "num_turns", "num_tokens", "num_sampled_tokens", "num_tool_calls", "num_tool_errors")


class RunView:
    """One run, read-only."""

    def __init__(self, folder: Path) -> None:
        """Open the run in `folder`, whatever it holds so far."""
        self.folder = folder
        self.name = folder.resolve().name
        self._store = StoredRun(folder)
        self._texts: TokenTexts | None = None
        self._metrics: list[dict[str, Any]] = []
        self._read_to = 0
        self._bad_lines = 0

    def summary(self) -> dict[str, Any]:
        """Return what the list of runs shows."""
        self.refresh()

        def known(column: str) -> list[str]:
            return sorted(v for v in pc.unique(self._store.table([column])[column]).to_pylist() if v)

        steps = [m["step"] for m in self._metrics if "step" in m]
        return {
            "name": self.name,
            "folder": str(self.folder),
            "num_trajectories": len(self._store),
            "splits": known("split"),
            "stop_reasons": known("stop_reason"),
            "data_sources": known("data_source"),
            "last_step": max(steps, default=None),
            "num_metrics": len(self._metrics),
            "problems": self.problems(),
            "has_tokenizer": self._tokens().is_known,
        }

    def problems(self) -> list[str]:
        """Return a sentence for each thing of the run that cannot be read."""
        found = [f"{FOLDER}/{name} was skipped: {reason}" for name, reason in self._store.problems.items()]
        if not (self.folder / FOLDER).is_dir():
            found.append(f"the run recorded no trajectories (there is no {FOLDER}/)")
        if not (self.folder / "metrics.jsonl").is_file():
            found.append("the run recorded no metrics (there is no metrics.jsonl)")
        if self._bad_lines:
            found.append(f"{self._bad_lines} lines of metrics.jsonl are damaged and were skipped")
        return found

    def refresh(self) -> None:
        """Read what was written since the last time."""
        self._store.refresh()
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return
        if path.stat().st_size < self._read_to:  # a resumed run drops the steps that it takes again
            self._metrics, self._read_to, self._bad_lines = [], 0, 0
        with path.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.splitlines():
            try:
                values = json.loads(line)
            except ValueError:
                self._bad_lines += 1
                continue
            if isinstance(values, dict):
                self._metrics.append({k: _number(v) for k, v in values.items()})

    def metrics(self, since: int = 0) -> dict[str, Any]:
        """Return the lines of metrics from number `since` on."""
        self.refresh()
        return {"lines": self._metrics[since:], "next": len(self._metrics), "alarms": self._alarms()}

    def config(self) -> str:
        """Return the run's configuration as it was written; "" if it is not there."""
        path = self.folder / "config.yaml"
        return path.read_text(errors="replace") if path.is_file() else ""

    def page(
        self, wanted: Mapping[str, str], *, sort: str = "", descending: bool = False, offset: int = 0, limit: int = 100
    ) -> dict[str, Any]:
        """Return one page of the table of trajectories.

        Args:
            wanted: Filters: a column's name for equality (`split`, `group`, `stop_reason`, …), `min_` or `max_` before a
                numeric one, `errors` ("1": failed or with a failed tool call), `text` (in question, task or id), `where`
                (an SQL condition).
            sort: A column; "" is the order of recording.
            descending: Largest first.
            offset: The first row.
            limit: Rows at most.

        Raises:
            DataError: a filter or the condition cannot be understood.
        """
        self._store.refresh()
        store = self._store if not wanted.get("where") else self._store.filter(wanted["where"])
        table = store.table()
        mask = _mask(table, {k: v for k, v in wanted.items() if k != "where"})
        if mask is not None:
            table = table.filter(mask)
        total = table.num_rows
        if sort:
            if sort not in INDEX_COLUMNS:
                raise DataError(f"there is no column {sort!r}.{did_you_mean(sort, INDEX_COLUMNS)}")
            order = pc.sort_indices(table, [(sort, "descending" if descending else "ascending")])
            table = table.take(order[offset : offset + limit])
        else:
            if descending:
                offset = max(0, total - offset - limit) if total - offset > 0 else total
            table = table.slice(offset, limit)
        rows = [_plain(row) for row in table.to_pylist()]
        if not sort and descending:
            rows.reverse()
        return {"total": total, "rows": rows}

    def groups(self, wanted: Mapping[str, str], *, offset: int = 0, limit: int = 100) -> dict[str, Any]:
        """Return groups with the rewards of their members and their spread, the latest first."""
        self._store.refresh()
        table = self._store.table()
        mask = _mask(table, wanted)
        if mask is not None:
            table = table.filter(mask)
        table = table.append_column("at", pa.array(np.arange(table.num_rows)))
        found = (
            table.group_by(["split", "step", "group"])
            .aggregate([("at", "max"), ("reward", "mean"), ("reward", "stddev"), ("reward", "list"), ("id", "list"),
                        ("stop_reason", "list"), ("dropped", "min"), ("question", "min"), ("num_turns", "mean")])
            .sort_by([("at_max", "descending")])
        )  # fmt: skip
        rows = found.slice(offset, limit).to_pylist()
        return {"total": found.num_rows, "rows": [_plain(row) for row in rows]}

    def timeline(self, *, step: int, split: str, limit: int = 400) -> dict[str, Any]:
        """Return, for the episodes of one step, when each turn began and what its time went into."""
        chosen = self._store.select(step=step, split=split)
        episodes: list[tuple[Trajectory, list[dict[str, float]]]] = []
        for record in chosen.records():
            turns = [dict(t.timings) for t in record.trajectory.turns]
            if turns and all("start" in t for t in turns):
                episodes.append((record.trajectory, turns))
            if len(episodes) >= limit:
                break
        begin = min((turns[0]["start"] for _, turns in episodes), default=0.0)
        lanes = [
            {
                "id": trajectory.id,
                "stop": trajectory.stop_reason.value,
                "turns": [{**turn, "start": turn["start"] - begin} for turn in turns],
            }
            for trajectory, turns in episodes
        ]
        return {"episodes": lanes, "total": len(chosen)}

    def trajectory(self, id: str, *, step: int | None, split: str | None) -> dict[str, Any]:
        """Return one trajectory: as a conversation and as tokens.

        Raises:
            DataError: there is none of this id.
        """
        record = self._store.record(id, step=step, split=split)
        one = record.trajectory
        reward = None if one.reward is None else _plain(to_json(one.reward))
        task = {
            "id": one.task.id,
            "data_source": one.task.data_source,
            "ground_truth": one.task.ground_truth,
            "extra": one.task.extra,
        }
        return {
            "id": one.id,
            "group": record.group,
            "step": record.step,
            "split": record.split,
            "task": _cut(_plain(to_json(task))),
            "reward": reward,
            "stop_reason": one.stop_reason.value,
            "stop_meaning": STOPPED[one.stop_reason],
            "error": one.error,
            "dropped": record.trained.dropped,
            "dropped_meaning": DROPPED.get(record.trained.dropped or "", record.trained.dropped),
            "metrics": _plain(to_json(one.metrics)),
            "messages": list(_conversation(one)),
            "segments": [self._segment(record, number) for number in range(len(one.segments))],
            "has_tokenizer": self._tokens().is_known,
        }

    def _segment(self, record: StoredTrajectory, number: int) -> dict[str, Any]:
        segment, trained = record.trajectory.segments[number], record.trained
        ids = segment.token_ids[:MAX_TOKENS]
        count = len(ids)
        made = {
            "advantages": trained.advantages,
            "policy_logprobs": trained.policy_logprobs,
            "trained_weights": trained.weights,
        }
        on_tokens = {k: None if v is None else record.on_tokens(number, v) for k, v in made.items()}
        spans, start = [], 0
        for span in segment.spans:
            spans.append(
                {
                    "source": span.source.value,
                    "turn": span.turn,
                    "start": start,
                    "length": len(span),
                    "version": span.policy_version,
                    "why": why(record.trajectory, segment, span, trained, split=record.split),
                }
            )
            start += len(span)
        notes = {}
        if (used := on_tokens["trained_weights"]) is not None:
            for t in np.flatnonzero(segment.sampled_mask[:count]).tolist():
                if (note := why_weight(float(segment.loss_weights[t]), float(used[t]))) is not None:
                    notes[t] = note
        return {
            "agent": segment.agent,
            "parent": None if segment.parent is None else list(segment.parent),
            "num_tokens": len(segment),
            "ids": ids.tolist(),
            "texts": self._tokens().texts(ids.tolist()),
            "weights": segment.loss_weights[:count].tolist(),
            "spans": spans,
            "notes": notes,
            "logprobs": _numbers(np.where(segment.sampled_mask, segment.logprobs, np.nan)[:count]),
            **{name: None if values is None else _numbers(values[:count]) for name, values in on_tokens.items()},
        }

    def _tokens(self) -> TokenTexts:
        if self._texts is None or not self._texts.is_known:
            self._texts = TokenTexts(self.folder)  # a run that has just begun may have none yet
        return self._texts

    def _alarms(self) -> list[dict[str, Any]]:
        path = self.folder / "alarms.jsonl"
        if not path.is_file():
            return []
        found = []
        for line in path.read_text(errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError as problem:
                found.append({"step": None, "alarm": "damaged", "message": f"this line is damaged: {one_line(problem)}"})
        return found


def _conversation(trajectory: Trajectory) -> Any:
    """Yield the messages in their order, calls with their results."""
    for message in trajectory.task.prompt:
        yield _message(message, turn=-1, results={})
    for number, turn in enumerate(trajectory.turns):
        results = {r.call_id: r for r in turn.tool_results}
        spans = [trajectory.span(ref) for ref in turn.spans]
        yield _message(turn.message, turn=number, results=results) | {
            "finish_reason": turn.finish_reason.value,
            "score": _number(turn.score),
            "scores": _plain(to_json(turn.scores)),
            "timings": _plain(to_json(turn.timings)),
            "info": _cut(_plain(to_json(turn.info))),
            "num_tokens": sum(len(s) for s in spans if s.source is SpanSource.SAMPLED),
        }
        for message in turn.observation:
            yield _message(message, turn=number, results={})


def _message(message: Message, *, turn: int, results: Mapping[str, ToolResult]) -> dict[str, Any]:
    calls = []
    for call in message.tool_calls:
        result = results.get(call.id)
        calls.append(
            {
                "name": call.name,
                "arguments": _short(json.dumps(to_json(call.arguments), ensure_ascii=False, indent=1)),
                "raw": _short(call.raw),
                "error": call.error,
                "result": None
                if result is None
                else {
                    "text": _short(_text(result.content)),
                    "error": result.error,
                    "reward": _number(result.reward),
                    "duration_s": result.duration_s,
                    "metrics": _cut(_plain(to_json(result.metrics))),
                },
            }
        )
    return {
        "turn": turn,
        "role": message.role,
        "name": message.name,
        "text": _short(message.text),
        "num_characters": len(message.text),
        "reasoning": None if message.reasoning is None else _short(message.reasoning),
        "tool_calls": calls,
        "media": [{"kind": m.kind, "source": _picture(m.source)} for m in message.media],
    }


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(to_json(content))


def _picture(source: Source) -> str | None:
    """Return a picture that a page may show: one that is recorded whole; None for files and videos."""
    return source if isinstance(source, str) and source.startswith("data:image/") else None


def _mask(table: pa.Table, wanted: Mapping[str, str]) -> Any:
    """Return which rows all filters let through; None if there is no filter."""
    masks = []
    for key, value in wanted.items():
        if value == "":
            continue
        kind, _, column = key.partition("_") if key.startswith(("min_", "max_")) else ("", "", key)
        if key == "errors":
            failed = pc.is_valid(table["error"])
            masks.append(pc.or_(failed, pc.fill_null(pc.greater(table["num_tool_errors"], 0), False)))
        elif key == "text":
            fields = [pc.match_substring(table[c], value, ignore_case=True) for c in ("question", "task_id", "id")]
            masks.append(pc.or_(pc.or_(*(pc.fill_null(f, False) for f in fields[:2])), pc.fill_null(fields[2], False)))
        elif kind and column in _NUMERIC:
            compare = pc.greater_equal if kind == "min" else pc.less_equal
            masks.append(pc.fill_null(compare(table[column], _as_number(key, value)), False))
        elif column in INDEX_COLUMNS and not kind:
            given: Any = _as_number(key, value) if pa.types.is_integer(table[column].type) else value
            masks.append(pc.fill_null(pc.equal(table[column], given), False))
        else:
            known = [*INDEX_COLUMNS, "errors", "text", "where", *(f"min_{c}" for c in _NUMERIC)]
            raise DataError(f"there is no filter {key!r}.{did_you_mean(key, known)}")
    if not masks:
        return None
    mask = masks[0]
    for other in masks[1:]:
        mask = pc.and_(mask, other)
    return mask


def _as_number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as problem:
        raise DataError(f"the filter {key} is {value!r}; it must be a number") from problem


def _plain(value: Any) -> Any:
    """Return JSON data without the numbers that JSON lacks."""
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(values: Any) -> list[Any]:
    """Return numbers for JSON: None for NaN (nothing there), a string for an infinite one."""
    return [None if v != v else v if math.isfinite(v) else str(v) for v in values.tolist()]


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT]


def _cut(value: Any) -> Any:
    """Return JSON data with long texts cut."""
    if isinstance(value, str):
        return value if len(value) <= 2000 else f"{value[:2000]}… ({len(value)} characters)"
    if isinstance(value, dict):
        return {k: _cut(v) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [_cut(v) for v in value]
    return value
