"""`polyturn view`: runs in the browser, live. Only this machine may look, unless a token is given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyturn.cli.answer import open_desk
from polyturn.cli.console import Output
from polyturn.cli.listening import needing, show_page
from polyturn.cli.serve import ServeOptions
from polyturn.config.load import RESOLVED_HEAD
from polyturn.core.contained import contained
from polyturn.core.errors import DataError


def run(folders: Sequence[Path], options: ServeOptions, *, desk: Path | None = None) -> None:
    """Serve the page until interrupted.

    Raises:
        ConfigError: what the viewer needs is not installed, or the address cannot be used.
        DataError: a folder is not a run's, or no conversation waits in `desk`.
    """
    with needing("view", what="the viewer"):
        from polyturn.viewer.app import MAX_BODY_BYTES, create_app
        from polyturn.viewer.run_view import RunView
    found = [RunView(folder) for folder in find_runs(folders)]
    known = {view.folder for view in found}
    waiting = None if desk is None else open_desk(desk)

    def appeared() -> list[RunView]:
        try:
            new = [folder for folder in find_runs(folders) if folder not in known]
        except DataError:  # a folder that is gone by now has no new runs
            return []
        known.update(new)
        return [RunView(folder) for folder in new]

    Output().fact("runs", ", ".join(view.name for view in found))
    show_page(
        lambda rules: create_app(found, appeared=appeared, desk=waiting, rules=rules),
        options,
        label="look at",
        max_body_bytes=MAX_BODY_BYTES,
    )


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the runs that folders mean: a run's own, or each run inside, the newest first.

    Raises:
        DataError: there is none.
    """
    runs: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"there is no folder {str(folder)!r}; name a run's folder, or a folder of runs")
        if is_run(folder):
            runs.append(folder)
            continue
        inside = _runs_in(folder) or (_runs_in(folder / "runs") if (folder / "runs").is_dir() else [])
        if not inside:
            raise DataError(
                f"there is no run in {str(folder)!r}: a run's folder has metrics.jsonl, trajectories/ or a config.yaml that "
                "polyturn wrote"
            )
        runs += inside
    return list(dict.fromkeys(runs))


def _runs_in(folder: Path) -> list[Path]:
    return sorted((p for p in folder.iterdir() if p.is_dir() and is_run(p)), key=lambda p: -p.stat().st_mtime)


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run, however little it wrote so far; a config that a person wrote is none."""
    if any((folder / name).exists() for name in ("metrics.jsonl", "trajectories")):
        return True
    try:
        config = contained(folder, "config.yaml")
        if config is None:
            return False
        with config.open("rb") as lines:
            return lines.read(len(RESOLVED_HEAD.encode())) == RESOLVED_HEAD.encode()
    except (OSError, DataError):
        return False
