"""The output of commands: results on stdout, and commands that can be pasted into a shell."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from rich.table import Table

from polyturn.infra.console import make_console

PLAIN_WIDTH = 160
"""Width of tables that are not printed to a terminal, in columns."""


def program() -> list[str]:
    """Return the words that start this program: `polyturn` if the shell finds this one, otherwise its path."""
    own = Path(sys.executable).with_name("polyturn")
    path = shutil.which("polyturn")
    if not own.is_file():
        return ["polyturn"] if path is not None else [sys.executable, "-m", "polyturn"]
    if path is not None and Path(path).resolve() == own.resolve():
        return ["polyturn"]
    return [str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)]


def command(*words: object) -> str:
    """Return a command of this program in a form that can be pasted into a shell: command("show", "my run", "g0/0")."""
    return shlex.join([*program(), *map(str, words)])


class Output:
    """Prints results on stdout."""

    def __init__(self) -> None:
        self.console = make_console()
        if not self.console.is_terminal:
            self.console.width = PLAIN_WIDTH

    def table(self, table: Table) -> None:
        self.console.print(table)

    def text(self, text: str, *, style: str | None = None) -> None:
        """Print text unchanged."""
        self.console.print(text, style=style, soft_wrap=True)

    def fact(self, name: str, value: object) -> None:
        """Print a name with its value, for instance the path of an output."""
        path = str(value) + "/" if isinstance(value, Path) and value.is_dir() else str(value)
        self.text(f"{name:<15}{path}")
