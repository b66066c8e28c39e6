"""`polyturn view`: runs in the browser, live, and the desk of a person who answers; beyond this machine with a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyturn.cli.answer import open_desk
from polyturn.cli.console import Output
from polyturn.cli.listening import needing, show_page
from polyturn.cli.serve import ServeOptions
from polyturn.core.errors import DataError
from polyturn.store.run_folders import find_runs


def run(folders: Sequence[Path], options: ServeOptions, *, desk: Path | None = None) -> None:
    """Serve the page until interrupted.

    Raises:
        ConfigError: what the viewer needs is not installed, or the address cannot be used.
        DataError: a folder is not a run's, or no conversation waits in `desk`.
    """
    with needing("view", what="the viewer"):
        from polyturn.viewer.app import MAX_BODY_BYTES, create_app
        from polyturn.viewer.run_view import RunView
    views = [RunView(folder) for folder in find_runs(folders)]
    known = {view.folder for view in views}
    waiting = None if desk is None else open_desk(desk)

    def appeared() -> list[RunView]:
        try:
            new = [folder for folder in find_runs(folders) if folder not in known]
        except DataError:  # a folder that is gone by now has no new runs
            return []
        known.update(new)
        return [RunView(folder) for folder in new]

    if views:
        Output().fact("runs", ", ".join(view.name for view in views))
    show_page(
        lambda rules: create_app(views, appeared=appeared, desk=waiting, rules=rules),
        options,
        label="look at" if folders else "answer at",
        max_body_bytes=MAX_BODY_BYTES,
    )
