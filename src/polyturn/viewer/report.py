"""The report of one or more runs: one page that needs nothing else, to be kept, mailed or attached.

    curves (inline SVG) · before/after · stop reasons · tool errors · config · ten telling trajectories, token by token

There is no script in it and nothing is loaded from elsewhere, and its own policy forbids both, so a hostile text of an
environment stays text wherever the page is opened. Several runs share the charts and have a column each in the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polyturn.core.errors import DataError
from polyturn.core.printable import printable
from polyturn.core.routing import has_route
from polyturn.core.trajectory import SpanSource
from polyturn.store.bounded import BoundedFile
from polyturn.store.parquet_store import FOLDER, list_parts
from polyturn.store.schema import StoredTrajectory
from polyturn.store.stored_run import StoredRun
from polyturn.tracking.jsonl import read_metrics
from polyturn.viewer.highlights import NUM_TELLING, Highlight, telling
from polyturn.viewer.run_config import read_config
from polyturn.viewer.svg import curve
from polyturn.viewer.tokens import TokenTexts, why

CHARTS = (
    ("success", "eval/*/success"),
    ("success in training", "rollout/success"),
    ("reward", "reward/mean"),
    ("turns per episode", "rollout/turns"),
    ("tokens per trajectory", "tokens/per_trajectory"),
    ("failed tool calls", "rollout/tool_errors"),
    ("entropy per token (nats)", "policy/entropy"),
    ("loss", "loss/total"),
    ("KL to the reference", "policy/kl_to_reference"),
    ("seconds per step", "time/step_s"),
)
MAX_TOKENS = 3000
"""Tokens of one trajectory that are shown, from its beginning."""
_STYLE = Path(__file__).parent / "static" / "report.css"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


class _ReportedRun(NamedTuple):
    name: str
    folder: Path
    store: StoredRun
    steps: list[dict[str, Any]]
    config: dict[str, Any]
    problems: list[str]


def write_report(runs: Sequence[Path], out: Path, *, num_trajectories: int = NUM_TELLING) -> Path:
    """Write the report of `runs` to `out` and return it.

    Raises:
        DataError: none of the folders holds metrics or trajectories.
    """
    found = [_open(folder) for folder in runs]
    if not any(run.steps or len(run.store) for run in found):
        raise DataError(f"there are no metrics and no trajectories in {', '.join(map(str, runs))}, so there is no report")
    text = "".join(_page(found, num_trajectories))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return out


def _open(folder: Path) -> _ReportedRun:
    if not folder.is_dir():
        raise DataError(f"there is no folder {str(folder)!r}; name a run's folder")
    problems: list[str] = []
    steps: list[dict[str, Any]] = []
    try:
        steps = read_metrics(folder / "metrics.jsonl")
        if not steps:
            problems.append("it has no metrics")
    except DataError as problem:
        problems.append(str(problem))
    config = read_config(folder)
    if config.problem:
        problems.append(config.problem)
    store = StoredRun(folder)
    problems += [f"{name} is damaged and was left out ({reason})" for name, reason in store.problems.items()]
    if not len(store):
        problems.append("it has no trajectories")
    return _ReportedRun(folder.resolve().name, folder, store, steps, config.values, problems)


def _page(runs: Sequence[_ReportedRun], num: int) -> Sequence[str]:
    title = " and ".join(run.name for run in runs)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE.read_text(encoding='utf-8')}</style></head><body>",
        f"<header><h1>{escape(title)}</h1></header><main>",
    ]
    for run in runs:
        if run.problems:
            parts.append(f'<p class="problem">{escape(run.name)}: {escape("; ".join(run.problems))}</p>')
    parts.append(_table("The runs", runs, _facts))
    parts.append(f'<section><h2>Curves</h2><div class="charts">{_charts(runs)}</div></section>')
    parts.append(_table("Before and after", runs, _before_after))
    parts.append(_table("Why episodes stopped", runs, _stop_reasons))
    parts.append(_table("Tool calls that failed", runs, _tool_errors))
    parts.append(_settings(runs))
    parts.append("<section><h2>Telling trajectories</h2>" + _legend() + '<div class="runs">')
    for run in runs:
        texts = TokenTexts(run.folder)
        heading = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        shown = [_trajectory(one, texts) for one in telling(run.store, num)]
        parts.append(f"<div>{heading}{''.join(shown) or '<p>none is recorded</p>'}</div>")
    parts.append("</div></section></main></body></html>\n")
    return parts


def _charts(runs: Sequence[_ReportedRun]) -> str:
    charts = []
    for title, name in CHARTS:
        series: dict[str, list[tuple[float, float]]] = {}
        for run in runs:
            head, star, tail = name.partition("*")
            for step in run.steps:
                for key, value in step.items():
                    is_match = star and key.startswith(head) and key.endswith(tail) and key.count("/") == name.count("/")
                    if (is_match or key == name) and value is not None:
                        label = key[len(head) : len(key) - len(tail)] if star else ""
                        full = " ".join(p for p in (run.name if len(runs) > 1 else "", label) if p) or title
                        series.setdefault(full, []).append((step["step"], value))
        charts.append(curve(series, title=title))
    return "".join(charts)


def _table(title: str, runs: Sequence[_ReportedRun], read: Callable[[_ReportedRun], dict[str, str]]) -> str:
    columns = [read(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    if not names:
        return f"<section><h2>{escape(title)}</h2><p>nothing is recorded</p></section>"
    head = "".join(f'<th scope="col">{escape(run.name)}</th>' for run in runs)
    rows = "".join(
        f'<tr><th scope="row">{escape(n)}</th>' + "".join(f"<td>{escape(c.get(n, '-'))}</td>" for c in columns) + "</tr>"
        for n in names
    )
    return f"<section><h2>{escape(title)}</h2><table><tr><th></th>{head}</tr>{rows}</table></section>"


def _facts(run: _ReportedRun) -> dict[str, str]:
    facts = {"steps": str(max((s["step"] for s in run.steps), default=0)), "trajectories": f"{len(run.store):,}"}
    last = run.steps[-1] if run.steps else {}
    sampled = sum(s.get("tokens/sampled") or 0 for s in run.steps)
    seconds = sum(s.get("time/step_s") or 0 for s in run.steps)
    if sampled:
        facts["sampled tokens"] = f"{sampled:,.0f}"
    if seconds:
        facts["time of the steps"] = f"{seconds:,.0f} s"
        facts["sampled tokens per second"] = f"{sampled / seconds:,.0f}"
    slowest = {k: v for k, v in last.items() if k.startswith(("time/tool/", "time/interaction/")) and k.endswith("/share")}
    for name, share in sorted(slowest.items(), key=lambda item: -(item[1] or 0))[:3]:
        facts[f"share of the rollout in {name.split('/')[2]}"] = f"{100 * (share or 0):.1f} %"
    return facts


def _before_after(run: _ReportedRun) -> dict[str, str]:
    words = ("success", "first_turn_success", "mean_turns", "valid_tool_calls", "repaired", "mean_reward")
    out = {}
    names = {k for step in run.steps for k in step if k.startswith("eval/") and k.count("/") == 2 and k.endswith(words)}
    for name in sorted(names, key=lambda n: (n.split("/")[1], words.index(w) if (w := n.split("/")[2]) in words else 9)):
        seen = {step["step"]: step[name] for step in run.steps if step.get(name) is not None}
        if seen:
            before = f"{seen[0]:.3f}" if 0 in seen else "-"  # step 0 is the evaluation before any update
            out[name.removeprefix("eval/").replace("/", ": ").replace("_", " ")] = f"{before} → {seen[max(seen)]:.3f}"
    return out


def _stop_reasons(run: _ReportedRun) -> dict[str, str]:
    counts = pc.value_counts(run.store.table(["stop_reason"])["stop_reason"]).to_pylist()
    total = max(1, len(run.store))
    ordered = sorted(counts, key=lambda c: -c["counts"])
    return {str(c["values"]): f"{c['counts']:,} ({100 * c['counts'] / total:.1f} %)" for c in ordered}


def _tool_errors(run: _ReportedRun) -> dict[str, str]:
    """Count failed calls by tool and kind, reading nothing but their column."""
    counts: dict[str, int] = {}
    for part in list_parts(run.folder / FOLDER):
        if part.name in run.store.problems:
            continue
        try:
            file = BoundedFile(part)
            column = file.plain(file.read(["tool_results"]))["tool_results"]
        except (OSError, KeyError, ValueError, pa.ArrowException):
            continue  # an older version, gone since it was listed, or larger than any
        for result in (r for row in column.to_pylist() for r in row or ()):
            if result["error"] is not None:
                kind = f"{result['name'] or '(no name)'}: {result['error']}"[:120]
                counts[kind] = counts.get(kind, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return {name: f"{number:,}" for name, number in ordered[:30]}


def _settings(runs: Sequence[_ReportedRun]) -> str:
    flat = [_flat(run.config) for run in runs]
    names = list(dict.fromkeys(name for one in flat for name in one))
    body = ""
    if len(runs) > 1:
        names = [n for n in names if len({str(one.get(n)) for one in flat}) > 1]
        title, note = "Settings that differ", "" if names else "<p>All settings are the same.</p>"
    else:
        title, note = "Config", ""
    if names:
        head = "".join(f'<th scope="col">{escape(run.name)}</th>' for run in runs)
        for name in names:
            cells = "".join(f"<td>{escape(str(one.get(name, '-'))[:500])}</td>" for one in flat)
            body += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
        body = f"<table><tr><th></th>{head}</tr>{body}</table>"
    return f"<section><h2>{title}</h2>{note}<details><summary>{len(names)} keys</summary>{body}</details></section>"


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return out


def _legend() -> str:
    marks = {"prompt": "written by the task", "sampled": "sampled by the model", "observation": "written by the environment"}
    keys = "".join(f'<span class="key"><b class="{name}">abc</b> {text}</span>' for name, text in marks.items())
    return f"<p>{keys}<span class='key'>hover a passage: turn, and why it was trained or not</span></p>"


def _trajectory(one: Highlight, texts: TokenTexts) -> str:
    record, trajectory = one.record, one.record.trajectory
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward.total:g}"
    facts = [
        record.split,
        f"step {record.step}",
        reward,
        _count(len(trajectory.turns), "turn"),
        trajectory.stop_reason.value,
    ]
    if trajectory.error is not None:
        facts.append(trajectory.error[:300])
    head = f"<b>{escape(one.title)}</b> {escape(one.why)} <code>{escape(trajectory.id)}</code>"
    body = "".join(_segment(record, number, texts) for number in range(len(trajectory.segments)))
    return f'<details open class="trajectory"><summary>{head}</summary><p>{escape(" · ".join(facts))}</p>{body}</details>'


def _segment(record: StoredTrajectory, number: int, texts: TokenTexts) -> str:
    segment = record.trajectory.segments[number]
    parts, left = [], MAX_TOKENS
    for span in segment.spans:
        shown = texts.texts(span.ids[:left].tolist())
        left -= len(shown)
        reason = why(record.trajectory, segment, span, record.trained, split=record.split)
        turn = "" if span.turn < 0 else f"turn {span.turn}, "
        note = f"{turn}{_count(len(span), 'token')}, {reason}"
        if span.source is SpanSource.SAMPLED and span.logprobs is not None and len(span):
            note += f"; mean logprob {float(np.mean(span.logprobs)):.3f}, policy version {span.policy_version}"
        if span.routed_experts is not None:
            layers, k = span.routed_experts.shape[1:]
            note += f"; experts known of {int(has_route(span.routed_experts).sum())} tokens ({k} in each of {layers} layers)"
        text = printable("".join(shown))
        parts.append(f'<span class="{span.source.value}" title="{escape(note)}">{escape(text)}</span>')
        if left <= 0:
            parts.append(f'<span class="cut">… {len(segment)} tokens in all</span>')
            break
    title = "" if len(record.trajectory.segments) == 1 else f"<h4>segment {number}, {escape(segment.agent)}</h4>"
    return f"{title}<pre>{''.join(parts)}</pre>"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
