"""Where the commands write: results to stdout, log lines and progress bars to one console on stderr.

Separate because lines and bars must share a console: rich then prints a line above the bar instead of through it. Much of
what is printed was written by models, environments and files of others: no console here reads markup in it, and none hands
a terminal what it would obey.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment
from rich.table import Table

from polyturn.core.printable import printable
from polyturn.core.secret import HideSecrets

PLAIN_WIDTH = 160
"""Columns of a table that does not go to a terminal, where nobody knows how wide the reader's screen is."""


class _Printable:
    """What is printed, with nothing in its text that a terminal would obey."""

    def __init__(self, inner: ConsoleRenderable) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._inner, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class _MakePrintable(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Printable(one) for one in renderables]


def make_console(*, stderr: bool = False) -> Console:
    """Return a console for text that anybody wrote."""
    console = Console(stderr=stderr, highlight=False, markup=False)
    console.push_render_hook(_MakePrintable())
    return console


@functools.cache
def stderr_console() -> Console:
    """Return the console of log lines and progress bars, the same one for everybody."""
    return make_console(stderr=True)


class ConsoleHandler(logging.Handler):
    """Prints log records as plain lines."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        try:
            stderr_console().print(self.format(record), markup=False, highlight=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


def log_to_console(level: str) -> None:
    """Send the library's records of at least `level`, and warnings of everything else, to the console."""
    root = logging.getLogger()
    if not any(isinstance(handler, ConsoleHandler) for handler in root.handlers):
        handler = ConsoleHandler()
        handler.addFilter(HideSecrets.of_environment(os.environ))
        root.addHandler(handler)
    logging.getLogger("polyturn").setLevel(level if level in logging.getLevelNamesMapping() else "INFO")


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Append the log's lines, tracebacks included, to a file while the block runs; secrets are hidden as in the console."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(HideSecrets.of_environment(os.environ))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def quiet_transformers() -> None:
    """Switch off what transformers prints while it loads and builds models; downloads keep their bars."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").handlers.clear()  # its lines reach the console as everybody's do, once
    enable_progress_bars()


def program() -> list[str]:
    """Return the words that start this program again: `polyturn` where the shell finds this one, else its path."""
    own = Path(sys.executable).with_name("polyturn")
    found = shutil.which("polyturn")
    if not own.is_file():
        return ["polyturn"] if found is not None else [sys.executable, "-m", "polyturn"]
    if found is not None and Path(found).resolve() == own.resolve():
        return ["polyturn"]
    return [str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)]


def command(*words: object) -> str:
    """Return a command of this program as it can be pasted into a shell: command("show", "my run", "g0/0")."""
    return shlex.join([*program(), *map(str, words)])


class Output:
    """Results on stdout."""

    def __init__(self) -> None:
        self.console = make_console()
        if not self.console.is_terminal:
            self.console.width = PLAIN_WIDTH

    def table(self, table: Table) -> None:
        """Print a table."""
        self.console.print(table)

    def text(self, text: str, *, style: str | None = None) -> None:
        """Print text as it is, on as many lines as it has."""
        self.console.print(text, style=style, soft_wrap=True)

    def fact(self, name: str, value: object) -> None:
        """Print one name with its value, for instance where something was left."""
        path = str(value) + "/" if isinstance(value, Path) and value.is_dir() else str(value)
        self.text(f"{name:<15}{path}")
