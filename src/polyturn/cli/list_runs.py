"""`polyturn show FOLDER`: list the runs of a folder."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path

from rich.table import Table

from polyturn.cli.console import Output, command
from polyturn.core.errors import PolyturnError, one_line
from polyturn.store.run_folders import find_runs, written_at
from polyturn.store.stored_run import StoredRun
from polyturn.tracking.jsonl import read_metrics

logger = logging.getLogger(__name__)


def run(folder: Path, *, limit: int | None = None) -> None:
    """Print the newest `limit` runs inside `folder`, newest first; None prints all.

    Raises:
        DataError: the folder has no runs.
    """
    table = Table("run", "step", "success", "reward", "trajectories", "failed", "last written", box=None, pad_edge=False)
    for path in find_runs([folder])[:limit]:
        try:
            table.add_row(path.name, *_row(path))
        except FileNotFoundError:  # the run has been deleted since it was listed
            continue
        except OSError as problem:
            logger.warning("%s is not shown: it cannot be read (%s)", path, one_line(problem))
    out = Output()
    out.table(table)
    out.text(f"look at them: {command('view', folder)}")


def _row(path: Path) -> tuple[str, ...]:
    written = max(map(written_at, [path, *path.iterdir()]))
    when = datetime.datetime.fromtimestamp(written).strftime("%Y-%m-%d %H:%M")
    store = StoredRun(path)
    failed = sum(1 for e in store.table(["error"])["error"].to_pylist() if e is not None)
    try:
        lines = read_metrics(path / "metrics.jsonl")
    except PolyturnError:
        return "?", "?", "?", str(len(store)), str(failed), f"{when} (metrics.jsonl cannot be read)"
    step = max((line["step"] for line in lines), default=None)
    success = next(
        (v for line in reversed(lines) for k, v in line.items() if k.startswith("eval/") and k.endswith("/success")), None
    )
    reward = next((line["reward/mean"] for line in reversed(lines) if "reward/mean" in line), None)
    cells = ("-" if value is None else f"{value:.3f}" for value in (success, reward))
    return "-" if step is None else str(step), *cells, str(len(store)), str(failed), when
