"""A run's results in tables: facts, evaluations before and after training, stop reasons, tools and settings.

    facts {"steps": "600", …}    before_after {"greedy: success": "0.103 → 0.871"}    stop_reasons {"stop": "960 (75.0 %)"}
    tools [{"name": "search", "calls": 812, "failed": 9, "p50_s": 0.02, "p99_s": 0.4, "errors": {"timeout": 9}}]

Values are formatted as texts, except for tools, so that a page can compare runs in columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polyturn.store.part_file import PartFile

Lines = Sequence[Mapping[str, Any]]
CALLS = pa.schema({"row": pa.int64(), "name": pa.string(), "error": pa.string(), "duration_s": pa.float64()})
"""Tool calls of a part: row in the part, tool, kind of error (null for none), duration in seconds."""
MAX_KINDS = 12
"""Largest number of kinds of a tool's errors to count separately."""
_OF_EVALUATIONS = ("success", "first_turn_success", "mean_turns", "valid_tool_calls", "repaired", "mean_reward")


def facts(lines: Lines, num_trajectories: int) -> dict[str, str]:
    """Return the run's progress, and how its time was spent."""
    rows = {"steps": str(max((line["step"] for line in lines), default=0)), "trajectories": f"{num_trajectories:,}"}
    sampled = sum(line.get("tokens/sampled") or 0 for line in lines)
    seconds = sum(line.get("time/step_s") or 0 for line in lines)
    if sampled:
        rows["sampled tokens"] = f"{sampled:,.0f}"
    if seconds:
        rows["time of the steps"] = f"{seconds:,.0f} s"
        rows["sampled tokens per second"] = f"{sampled / seconds:,.0f}"
    last = lines[-1] if lines else {}
    slowest = {k: v for k, v in last.items() if k.startswith(("time/tool/", "time/interaction/")) and k.endswith("/share")}
    for name, share in sorted(slowest.items(), key=lambda item: -(item[1] or 0))[:3]:
        rows[f"share of the rollout in {name.split('/')[2]}"] = f"{100 * (share or 0):.1f} %"
    return rows


def before_after(lines: Lines) -> dict[str, str]:
    """Return each evaluation's values before the first update ("-" if missing) and at the end."""
    names = {
        k for line in lines for k in line if k.startswith("eval/") and k.count("/") == 2 and k.endswith(_OF_EVALUATIONS)
    }

    def order(name: str) -> tuple[str, int]:
        _, split, word = name.split("/")
        return split, _OF_EVALUATIONS.index(word) if word in _OF_EVALUATIONS else len(_OF_EVALUATIONS)

    figures = {}
    for name in sorted(names, key=order):
        seen = {line["step"]: line[name] for line in lines if line.get(name) is not None}
        if seen:
            before = f"{seen[0]:.3f}" if 0 in seen else "-"  # step 0 is the evaluation before the first update
            figures[name.removeprefix("eval/").replace("/", ": ").replace("_", " ")] = f"{before} → {seen[max(seen)]:.3f}"
    return figures


def stop_reasons(table: pa.Table) -> dict[str, str]:
    """Return stop reason -> number of trajectories, most frequent first."""
    counts = sorted(pc.value_counts(table["stop_reason"]).to_pylist(), key=lambda c: -c["counts"])
    return {str(c["values"]): f"{c['counts']:,} ({100 * c['counts'] / max(1, len(table)):.1f} %)" for c in counts}


def tool_calls(file: PartFile) -> pa.Table:
    """Return the tool calls of a part, with the columns of `CALLS`."""
    leaves = CALLS.names[1:]
    paths = [path for leaf in leaves for path in file.paths("tool_results", leaf)]
    column = file.read(paths)["tool_results"].combine_chunks()
    values = [pc.list_parent_indices(column), *(column.flatten().field(leaf) for leaf in leaves)]
    return pa.table([v.cast(kind) for v, kind in zip(values, CALLS.types, strict=True)], schema=CALLS)


def tools(calls: Iterable[pa.Table]) -> list[dict[str, Any]]:
    """Return for each tool its number of calls, durations, and failures by kind; most called first."""
    table = pa.concat_tables([CALLS.empty_table(), *calls])
    named = pc.fill_null(table["name"], "")
    rows = []
    for name in pc.unique(named).to_pylist():
        mine = table.filter(pc.equal(named, name))
        spent = mine["duration_s"].drop_null().to_numpy()
        spent = spent[np.isfinite(spent)]
        at = np.quantile(spent, (0.5, 0.99, 1.0)).tolist() if len(spent) else (None, None, None)
        kinds = sorted(pc.value_counts(mine["error"].drop_null()).to_pylist(), key=lambda c: -c["counts"])
        rows.append(
            {
                "name": name or "(no name)",
                "calls": len(mine),
                "failed": len(mine) - mine["error"].null_count,
                **dict(zip(("p50_s", "p99_s", "longest_s"), at, strict=True)),
                "errors": {str(c["values"])[:120]: c["counts"] for c in kinds[:MAX_KINDS]},
            }
        )
    return sorted(rows, key=lambda row: -row["calls"])


def settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return dotted name -> value of a configuration, as texts."""
    texts: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        texts |= settings(value, f"{name}.") if isinstance(value, Mapping) and value else {name: str(value)[:500]}
    return texts
