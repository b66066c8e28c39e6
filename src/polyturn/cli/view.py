"""`polyturn view`: runs in the browser, live; and a desk for a person who answers conversations, on a page or in the
terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from polyturn.cli.arguments import (
    AllowHosts,
    HostOption,
    PageTokenFile,
    PortOption,
    RateLimitOption,
    declare,
    refuse_unused,
)
from polyturn.cli.console import Output
from polyturn.cli.listening import ServeOptions, needing, show_page
from polyturn.core.errors import ConfigError, DataError
from polyturn.interactions.person import POLL_S, HumanQueue, Terminal, TerminalClosedError
from polyturn.store.run_folders import find_runs


@declare("view")
def main(
    context: typer.Context,
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Folders of runs, or a folder that contains runs.")
    ] = None,
    desk: Annotated[Path | None, typer.Option(help="Folder with conversations to answer.")] = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="With --desk: answer in the terminal instead of on a page.")
    ] = False,
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    token_file: PageTokenFile = None,
    rate_limit: RateLimitOption = None,
    allow_host: AllowHosts = None,
) -> None:
    """Look at runs in the browser, while they train and after. Shows curves, conversations and every token."""
    folders = runs or []
    if not folders and desk is None:
        raise ConfigError("name the folder of a run, or --desk FOLDER to answer its conversations")
    if terminal:
        if desk is None or folders:
            raise ConfigError("--terminal only answers the conversations of --desk FOLDER; remove the runs")
        refuse_unused(context, {"desk", "terminal"}, here="with --terminal")
        run_terminal(desk)
        return
    options = ServeOptions(
        host=host,
        port=port,
        first_port=7860 if folders else 7870,
        token_file=token_file,
        rate_limit=rate_limit,
        allowed_hosts=tuple(allow_host or ()),
    )
    with needing("view", what="the viewer"):
        from polyturn.viewer.app import MAX_BODY_BYTES, create_app
        from polyturn.viewer.run_view import RunView
    views = [RunView(folder) for folder in find_runs(folders)]
    known = {view.folder for view in views}
    waiting = None if desk is None else open_desk(desk)

    def appeared() -> list[RunView]:
        try:
            new = [folder for folder in find_runs(folders, warns=False) if folder not in known]
        except DataError:  # a folder that no longer exists has no new runs
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


def open_desk(folder: Path) -> HumanQueue:
    """Return the desk of a folder; make it if no run has used it yet.

    Raises:
        ConfigError: the desk cannot be made.
    """
    is_new = not (folder / "waiting").is_dir()
    desk = HumanQueue(folder)
    if is_new:
        Output().text(
            f"the desk {str(folder)!r} is new: conversations appear when a run has an interaction with at: desk and "
            f"desk: {folder}"
        )
    return desk


def run_terminal(folder: Path, *, terminal: Terminal | None = None, num: int | None = None) -> None:
    """Answer conversations in the terminal, one after another, until interrupted, the input ends, or `num` are answered."""
    desk, terminal = open_desk(folder), terminal or Terminal(sys.stdin, sys.stdout)
    while num is None or num > 0:
        waiting = desk.waiting()
        if not waiting:
            time.sleep(POLL_S)
            continue
        entry = waiting[0]
        left_s = max(1.0, entry["until"] - time.time())
        try:
            answer = terminal.ask(entry["messages"], about=entry["about"], deadline_s=left_s)
        except TerminalClosedError:
            return
        if answer is None:
            continue
        try:
            desk.answer(entry["ticket"], answer)
        except DataError as problem:
            Output().text(str(problem))
        num = None if num is None else num - 1
