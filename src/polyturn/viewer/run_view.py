"""RunView: one run as plain data for JSON, as the pages show it.

The run may still be running, so each answer first reads new data of the store and the metrics file. Unreadable data is
listed in `problems`; it is never hidden and never fatal.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polyturn.core.errors import DataError, did_you_mean, one_line
from polyturn.core.reward import as_score
from polyturn.core.trajectory import Trajectory
from polyturn.infra.contained import read_contained
from polyturn.store.parquet_store import FOLDER
from polyturn.store.schema import KEY
from polyturn.store.stored_run import StoredRun
from polyturn.tracking.metric_docs import meaning
from polyturn.viewer.curves import Window, draw
from polyturn.viewer.distributions import (
    OF_TOKENS,
    OF_TRAJECTORIES,
    TokenValues,
    distribution,
    of_tokens,
    of_trajectories,
    reward_parts,
    token_values,
)
from polyturn.viewer.filters import PLAIN, check_size, facets, narrow
from polyturn.viewer.highlights import highlights
from polyturn.viewer.labels import Label, Labels, known_labels
from polyturn.viewer.metric_file import MAX_BYTES, MetricFile
from polyturn.viewer.overview import before_after, facts, settings, stop_reasons, tool_calls, tools
from polyturn.viewer.panels import panels_of
from polyturn.viewer.progress import NOTHING, progress
from polyturn.viewer.run_config import MAX_BYTES as MAX_CONFIG_BYTES
from polyturn.viewer.run_config import read_config, reward_weights
from polyturn.viewer.tokens import TokenTexts
from polyturn.viewer.trajectory_page import MAX_TOKENS, cut, plain, trajectory_page
from polyturn.viewer.why_advantage import why_advantage

MAX_CURVES = 60
"""Largest number of a run's curves in one request."""
WARM_START = "warm_start/"
"""Prefix of the names of the warm start's metrics."""
FIRST = (
    "warm_start/loss/total", "warm_start/loss/sft", "eval/*/success", "rollout/success", "reward/mean", "rollout/turns",
    "rollout/stop_*", "tokens/per_trajectory", "rollout/tool_errors", "policy/entropy", "policy/approx_kl",
    "policy/kl_to_reference", "policy/kl_to_teacher", "policy/teacher_gap", "loss/total", "loss/grad_norm",
    "buffer/groups_kept", "time/step_s", "time/other_share",
    "system/cpu_share", "system/gpu*/busy_share", "engine/queue", "engine/kv_use",
)  # fmt: skip
"""Metrics to show first."""
LATEST = ("reward/mean", "eval/*/success")
"""Metrics whose last value is in the list of runs."""


class RunView:
    """One run; only its labels are written."""

    def __init__(self, folder: Path) -> None:
        """Open the run in `folder`, which may be incomplete."""
        self.folder = folder
        self.name = folder.resolve().name
        self._store = StoredRun(folder)
        self._texts: TokenTexts | None = None
        self._labels = Labels(folder)
        self._metrics = MetricFile(folder, "metrics.jsonl")
        self._warm_start = MetricFile(folder, "sft_metrics.jsonl")
        self._config: tuple[int, Mapping[str, Any]] = (0, {})
        self._calls: dict[Any, pa.Table] = {}
        self._values: dict[Any, dict[str, TokenValues]] = {}

    def summary(self) -> dict[str, Any]:
        """Return the run's row in the list of runs."""
        self.refresh()

        def known(column: str) -> list[str]:
            return sorted(v for v in pc.unique(self._store.table([column])[column]).to_pylist() if v)

        state = self._progress()
        return {
            "name": self.name,
            "folder": str(self.folder),
            "num_trajectories": len(self._store),
            "splits": known("split"),
            "stop_reasons": known("stop_reason"),
            "data_sources": known("data_source"),
            **state,
            "latest": self._latest(),
            "num_metrics": len(self._metrics.lines) + len(self._warm_start.lines),
            "problems": self.problems(is_running=state["state"] == "running"),
            "has_tokenizer": self._tokens().is_known,
        }

    def _progress(self) -> dict[str, Any]:
        try:
            stamp = (self.folder / "config.yaml").stat().st_mtime_ns
        except (OSError, RuntimeError):  # a run that has just begun may not have this file yet
            stamp = 0
        if stamp != self._config[0]:
            self._config = stamp, read_config(self.folder).values
        return progress(self.folder, self._metrics, self._warm_start, self._config[1])

    def _latest(self) -> dict[str, Any]:
        """Return the last value of the first metric that matches each pattern of `LATEST`."""
        values_by_name: dict[str, Any] = {}
        for pattern in LATEST:
            names = [name for name in self._metrics.names if fnmatchcase(name, pattern)]
            values = ((name, line.get(name)) for name in names for line in reversed(self._metrics.lines))
            values_by_name |= dict(itertools.islice((one for one in values if one[1] is not None), 1))
        return values_by_name

    def unreadable(self, why: str) -> dict[str, Any]:
        """Return the row of a run that cannot be read."""
        nothing: dict[str, Any] = {
            "num_trajectories": 0,
            "splits": [],
            "stop_reasons": [],
            "data_sources": [],
            "latest": {},
            **NOTHING,
        }
        known = {"name": self.name, "folder": str(self.folder), "num_metrics": 0, "has_tokenizer": False}
        return {**known, **nothing, "problems": [f"the run cannot be read: {why}"]}

    def problems(self, *, is_running: bool = False) -> list[str]:
        """Return one sentence for each part that cannot be read, or that a run without a running process lacks."""
        unreadable = dict(self._store.problems)  # a copy, because other requests may add to them meanwhile
        sentences = [f"{FOLDER}/{name} was skipped: {reason}" for name, reason in unreadable.items()]
        is_begun = is_running or (bool(self._warm_start.lines) and not self._metrics.is_there)
        if not (self.folder / FOLDER).is_dir() and not is_begun:
            sentences.append(f"the run recorded no trajectories (there is no {FOLDER}/)")
        if not self._metrics.is_there and not is_begun and not self._metrics.problem:
            sentences.append("the run recorded no metrics (there is no metrics.jsonl)")
        sentences += [self._labels.problem] if self._labels.problem else []
        return sentences + self._metrics.problems() + self._warm_start.problems()

    def refresh(self) -> None:
        """Read data written since the last call."""
        self._store.refresh()
        self._metrics.refresh()
        self._warm_start.refresh()

    def _recorded(self) -> StoredRun:
        """Return the trajectories recorded so far; other requests may read new ones meanwhile."""
        self._store.refresh()
        return self._store.snapshot()

    def metrics(self) -> dict[str, Any]:
        """Return the metrics with their meanings, beginning with `FIRST`, and the panels and alarms."""
        self.refresh()
        names = [*(WARM_START + name for name in self._warm_start.names), *self._metrics.names]
        known = {name: meaning(bare) or "" for name in names if (bare := name.removeprefix(WARM_START)) != "step"}
        ranks = {name: next((i for i, p in enumerate(FIRST) if fnmatchcase(name, p)), len(FIRST)) for name in known}
        ordered = sorted(known, key=lambda name: (ranks[name], name))
        num_first = sum(rank < len(FIRST) for rank in ranks.values())
        return {
            "names": {name: known[name] for name in ordered},
            "num_first": num_first,
            "panels": panels_of(ordered),
            "alarms": self._alarms(),
        }

    def curves(self, names: Sequence[str], window: Window) -> dict[str, Any]:
        """Return the curves of at most `MAX_CURVES` metrics; names of warm-start metrics begin with `warm_start/`.

        Raises:
            DataError: there are too many names, or the window is invalid.
        """
        if len(names) > MAX_CURVES:
            raise DataError(f"{len(names)} curves are requested; at most {MAX_CURVES} are allowed")
        self.refresh()
        warm = [name for name in names if name.startswith(WARM_START)]
        own = draw(self._metrics.lines, [name for name in names if name not in warm], window)
        return own | draw(self._warm_lines(), warm, window)

    def _warm_lines(self) -> list[dict[str, Any]]:
        return [{k if k == "step" else WARM_START + k: v for k, v in line.items()} for line in self._warm_start.lines]

    def config(self) -> str:
        """Return the text of the run's configuration; "" if it is missing.

        Raises:
            DataError: the path leaves the run's folder, or the file is too large.
        """
        return read_contained(self.folder, "config.yaml", max_bytes=MAX_CONFIG_BYTES) or ""

    def overview(self) -> dict[str, Any]:
        """Return the run's results in tables, described in `viewer/overview.py`, and its configuration."""
        self.refresh()
        store = self._store.snapshot()
        lines, read = self._metrics.steps(), read_config(self.folder)
        calls = [
            calls.filter(pc.is_in(calls["row"], pa.array(rows))) for _, rows, calls in store.scan(tool_calls, self._calls)
        ]
        return {
            "facts": facts(lines, len(store)),
            "before_after": before_after(lines),
            "stop_reasons": stop_reasons(store.table(["stop_reason"])),
            "tools": tools(calls),
            "settings": settings(read.values),
            "config_problem": read.problem,
        }

    def distributions(self, split: str) -> dict[str, Any]:
        """Return the distributions of a split's trajectories and tokens over its steps."""
        chosen = self._recorded().select(split=split)
        parts = list(chosen.scan(token_values, self._values))
        known = of_trajectories(chosen.table()) | {name: of_tokens(name, parts) for name in OF_TOKENS}
        drawn = [
            {"name": name, "title": title, **counts}
            for name, title in (OF_TRAJECTORIES | OF_TOKENS).items()
            if (counts := distribution(*known[name])) is not None
        ]
        return {
            "distributions": drawn,
            "parts": reward_parts(chosen.table(), reward_weights(read_config(self.folder).values)),
        }

    def highlights(self, num: int) -> list[dict[str, Any]]:
        """Return the keys of at most `num` informative trajectories, with the reasons."""
        return [
            {"id": r.trajectory.id, "step": r.step, "split": r.split, "title": title, "why": why}
            for title, why, r in highlights(self._recorded(), num)
        ]

    def page(
        self,
        wanted: Mapping[str, str],
        *,
        sort: str = "",
        descending: bool = False,
        offset: int = 0,
        limit: int = 100,
        stop: threading.Event | None = None,
    ) -> dict[str, Any]:
        """Return one page of the table of trajectories.

        Args:
            wanted: Filters for `narrow`.
            sort: A column; "" sorts by step, with training before evaluations.
            descending: Whether the largest or latest rows come first.
            offset: Index of the first row.
            limit: Largest number of rows.
            stop: Ends the search when set.

        Raises:
            DataError: a filter is invalid.
        """
        labels = self._labels.read()
        table = self._chosen(wanted, labels, stop=stop).table()
        counted = facets(table)
        total = table.num_rows
        if sort and sort not in PLAIN:
            raise DataError(f"there is no column {sort!r} to sort by.{did_you_mean(sort, PLAIN)}")
        direction = "descending" if descending else "ascending"
        is_evaluation = pc.invert(pc.starts_with(table["split"], "train"))
        table = table.append_column("at", pa.array(np.arange(total))).append_column("is_evaluation", is_evaluation)
        # "Latest first" sorts by step; within a step, training comes before evaluations.
        keys = [(sort, direction)] if sort else [("step", direction), ("is_evaluation", "ascending"), ("at", direction)]
        order = pc.sort_indices(table, keys)
        rows = _table_rows(table.drop_columns(["at", "is_evaluation"]).take(order[offset : offset + limit]))
        for row in rows:
            label = labels.get((row["id"], row["step"], row["split"]), Label("", ""))
            row |= {"label": label.label, "note": label.note}
        known = known_labels(labels.values())
        return {"total": total, "rows": rows, "facets": counted, "labels": known, "has_labels": bool(labels)}

    def export(self, wanted: Mapping[str, str], *, stop: threading.Event | None = None) -> StoredRun:
        """Return the trajectories that pass the filters, for one file.

        Raises:
            DataError: a filter is invalid, or there are too many trajectories.
        """
        chosen = self._chosen(wanted, self._labels.read(), stop=stop)
        check_size(chosen)
        return chosen

    def label(self, value: Mapping[str, Any]) -> dict[str, str]:
        """Write a label or note on a trajectory to the run's folder.

        Raises:
            DataError: the value is not a label, there is no such trajectory, or writing fails.
        """
        id, step = value.get("id"), value.get("step")
        if not isinstance(id, str) or type(step) is not int:
            raise DataError("a label needs the `id` of a trajectory, a text, and its `step`, a whole number")
        self._recorded().record(id, step=step, split=str(value.get("split")))
        return self._labels.write(value)._asdict()

    def _chosen(
        self, wanted: Mapping[str, str], labels: Mapping[tuple[str, int, str], Label], *, stop: threading.Event | None = None
    ) -> StoredRun:
        return narrow(self._recorded(), wanted, labels, stop=stop)

    def groups(self, wanted: Mapping[str, str], *, offset: int = 0, limit: int = 100) -> dict[str, Any]:
        """Return groups with the rewards of their members and their spread, latest first."""
        table = self._chosen(wanted, self._labels.read()).table()
        table = table.append_column("at", pa.array(np.arange(table.num_rows)))
        rows = (
            table.group_by(["split", "step", "group"])
            .aggregate([("at", "max"), ("reward", "mean"), ("reward", "stddev", pc.VarianceOptions(ddof=1)),
                        ("reward", "list"), ("id", "count"), ("dropped", "min"), ("question", "min"), ("num_turns", "mean")])
            .sort_by([("at_max", "descending")])
        )  # fmt: skip
        return {"total": rows.num_rows, "rows": _table_rows(rows.slice(offset, limit))}

    def timeline(self, *, step: int | None, split: str, limit: int = 400) -> dict[str, Any]:
        """Return the start and time use of each turn in a step's episodes; `step` None is the last step."""
        chosen = self._recorded().select(step=step, split=split)
        if step is None and len(chosen):
            step = pc.max(chosen.table(["step"])["step"]).as_py()
            chosen = chosen.select(step=step)
        episodes: list[tuple[Trajectory, list[dict[str, float]]]] = []
        for record in chosen.records():
            turns = [_seconds(turn.timings) for turn in record.trajectory.turns]
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
        return {"step": step, "episodes": lanes, "total": len(chosen)}

    def trajectory(
        self, id: str, *, step: int | None, split: str | None, segment: int = 0, start: int = 0, page_size: int = MAX_TOKENS
    ) -> dict[str, Any]:
        """Return one trajectory as a conversation and as tokens: `page_size` of them, in `segment` from `start`.

        Raises:
            DataError: there is no trajectory with this id.
        """
        record = self._store.snapshot().record(id, step=step, split=split)
        labels = self._labels.read()
        label = labels.get((record.trajectory.id, record.step, record.split), Label("", ""))
        page = trajectory_page(record, self._tokens(), segment=segment, start=start, page_size=page_size)
        return {**page, **label._asdict(), "labels": known_labels(labels.values())}

    def advantage(self, id: str, *, step: int | None, split: str | None) -> dict[str, Any]:
        """Explain a trajectory's advantage: return its group, and the estimator's formula with numbers.

        Raises:
            DataError: there is no trajectory with this id.
        """
        store = self._store.snapshot()
        chosen = store.record(id, step=step, split=split)
        group = store.select(step=chosen.step, split=chosen.split, group=chosen.group)
        return why_advantage(chosen, group.records(), read_config(self.folder).values)

    def _tokens(self) -> TokenTexts:
        if self._texts is None or not self._texts.is_known:
            self._texts = TokenTexts(self.folder)  # a run that has just begun may not have a tokenizer yet
        return self._texts

    def _alarms(self) -> list[dict[str, Any]]:
        try:
            text = read_contained(self.folder, "alarms.jsonl", max_bytes=MAX_BYTES)
        except DataError as problem:
            return [_damaged(str(problem))]
        return [_alarm(line) for line in (text or "").splitlines()]


def _table_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows with long texts cut, except the keys that identify a trajectory."""
    return [{k: v if k in KEY else cut(plain(v)) for k, v in row.items()} for row in table.to_pylist()]


def _seconds(timings: Mapping[str, Any]) -> dict[str, float]:
    """Return the timings whose values are numbers."""
    return {name: known for name, value in timings.items() if (known := as_score(value)) is not None}


def _alarm(line: str) -> dict[str, Any]:
    """Parse a line of alarms.jsonl: step, name and message."""
    try:
        read = json.loads(line)
    except (ValueError, RecursionError) as problem:
        return _damaged(f"this line is damaged: {one_line(problem)}")
    if not isinstance(read, dict) or type(read.get("step")) not in (int, type(None)):
        return _damaged("this line is damaged: it is not an alarm of a step")
    texts = {name: str(read.get(name, "")).encode(errors="replace").decode() for name in ("alarm", "message")}
    return {"step": read.get("step"), **texts}


def _damaged(message: str) -> dict[str, Any]:
    return {"step": None, "alarm": "damaged", "message": f"alarms.jsonl: {message}"}
