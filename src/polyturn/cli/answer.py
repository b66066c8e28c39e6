"""`polyturn view --desk DESK`: a person answers the conversations that wait at a desk, on a page or in this terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from polyturn.cli.console import Output
from polyturn.core.errors import DataError
from polyturn.interactions.person import POLL_S, HumanQueue, Terminal, TerminalClosedError


def open_desk(folder: Path) -> HumanQueue:
    """Return the desk of a folder.

    Raises:
        DataError: there is none.
    """
    if not (folder / "waiting").is_dir():
        raise DataError(
            f"no conversation waits for a person in {str(folder)!r}: it has no folder waiting/. Give the folder that the "
            "interaction's key `desk` names, once the run has started"
        )
    return HumanQueue(folder)


def run_terminal(folder: Path, *, terminal: Terminal | None = None, num: int | None = None) -> None:
    """Answer one conversation after another here, until interrupted, the input ends, or `num` are answered.

    Raises:
        DataError: no conversation waits in the folder.
    """
    desk, terminal = open_desk(folder), terminal or Terminal(sys.stdin, sys.stdout)
    while num is None or num > 0:
        waiting = desk.waiting()
        if not waiting:
            time.sleep(POLL_S)
            continue
        paper = waiting[0]
        left_s = max(1.0, paper["until"] - time.time())
        try:
            answer = terminal.ask(paper["messages"], about=paper["about"], deadline_s=left_s)
        except TerminalClosedError:
            return
        if answer is None:
            continue
        try:
            desk.answer(paper["ticket"], answer)
        except DataError as problem:
            Output().text(str(problem))
        num = None if num is None else num - 1
