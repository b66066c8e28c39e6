"""`polyturn compare A B`: compare two evaluations of the same tasks with a paired test; also writes B/compare-A.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pyarrow.compute as pc
import typer
from rich.table import Table

from polyturn.cli.arguments import JsonFlag, declare
from polyturn.cli.console import Output
from polyturn.core.errors import DataError, did_you_mean
from polyturn.evaluation.compare import Comparison, compare
from polyturn.store.stored_run import StoredRun, open_store


@declare("compare")
def main(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of the run that is the baseline.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Folder of the run that is compared with it.")],
    split: Annotated[str | None, typer.Option(help="Which evaluation, for instance eval/greedy.")] = None,
    success_at: Annotated[float, typer.Option(help="The outcome that counts as success.")] = 1.0,
    as_json: JsonFlag = False,
) -> None:
    """Compare two evaluations of the same tasks by a paired test. The table shows which differences are significant."""
    stores = open_store(a), open_store(b)
    splits = [split] if split is not None else _common(stores[0], stores[1], a, b)
    comparisons = {}
    for name in splits:
        newest = [
            store.select(split=name, step=_last_step(store, name, folder))
            for store, folder in zip(stores, (a, b), strict=True)
        ]
        comparisons[name] = compare(newest[0].groups(), newest[1].groups(), success_at=success_at)
    problems = [
        f"{folder / 'trajectories' / part} cannot be read ({reason})"
        for store, folder in zip(stores, (a, b), strict=True)
        for part, reason in store.problems.items()
    ]
    results = {name: one.to_json() for name, one in comparisons.items()}
    data = {"a": str(a), "b": str(b), "splits": results, "problems": problems}
    written = b / f"compare-{a.resolve().name}.json"
    try:
        written.write_text(json.dumps(data, indent=2) + "\n")
        written_text = str(written)
    except OSError as problem:  # the run may belong to another user; the comparison is printed
        problems.append(f"{written} cannot be written ({problem.strerror})")
        written_text = f"nothing: {problems[-1]}"
    out = Output()
    if as_json:
        out.text(json.dumps(data))
        return
    for name, one in comparisons.items():
        _show(out, name, one)
    out.fact("A is", a)
    out.fact("B is", b)
    out.fact("written", written_text)


def verdict(comparison: Comparison) -> str:
    """Return the result of a comparison as a sentence."""
    paired = comparison.table["all"]["success"]
    delta = paired.difference
    moved = f"{delta.mean * 100:+.1f} points [{delta.low * 100:+.1f}, {delta.high * 100:+.1f}], p = {paired.p:.3g}"
    if not paired.is_significant():
        return f"No significant difference in success: {moved}, {paired.num_tasks} tasks."
    better = "B" if delta.mean > 0 else "A"
    return f"{better} solves significantly more: {moved}, {paired.num_tasks} tasks."


def _show(out: Output, name: str, comparison: Comparison) -> None:
    table = Table(name, "", "A", "B", "B - A, 95 %", "better", "worse", "p", "", "test", box=None, pad_edge=False)
    for source, numbers in comparison.table.items():
        for number, p in numbers.items():
            table.add_row(
                source, number, f"{p.a:.3f}", f"{p.b:.3f}", str(p.difference), str(p.num_better), str(p.num_worse),
                f"{p.p:.3g}", "significant" if p.is_significant() else "", p.test,
            )  # fmt: skip
    out.table(table)
    out.text(verdict(comparison))
    if comparison.num_only_a or comparison.num_only_b:
        out.text(f"left out: {comparison.num_only_a} tasks that only A ran, {comparison.num_only_b} that only B ran")


def _splits(store: StoredRun) -> set[str]:
    return {s for s in pc.unique(store.table(["split"])["split"]).to_pylist() if s}


def _common(store_a: StoredRun, store_b: StoredRun, a: Path, b: Path) -> list[str]:
    of_a, of_b = _splits(store_a), _splits(store_b)
    common = sorted(s for s in of_a & of_b if s.startswith("eval/"))
    if not common:
        known_a, known_b = (", ".join(sorted(s for s in of if s.startswith("eval/"))) or "none" for of in (of_a, of_b))
        raise DataError(f"{a} and {b} have no common evaluation; {a} has {known_a} and {b} has {known_b}")
    return common


def _last_step(store: StoredRun, split: str, folder: Path) -> int:
    """Return the step of a training run's last evaluation; 0 for `polyturn eval`."""
    steps = store.select(split=split).table(["step"])["step"].to_pylist()
    if not steps:
        raise DataError(f"{folder} has no trajectories of the split {split!r}.{did_you_mean(split, _splits(store))}")
    return int(max(steps))
