"""The display of a run: log lines and progress bars on one console of stderr, as the command line does.

Separate because lines and bars must share a console: rich then prints a line above the bar instead of through it. Much of
the output was written by models, environments and files of others: no console here interprets markup or passes control
sequences to the terminal.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment

from polyturn.core.printable import printable
from polyturn.core.secrets import HideSecrets


class _Printable:
    """A renderable without any character that a terminal would obey."""

    def __init__(self, inner: ConsoleRenderable) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._inner, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class _MakePrintable(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Printable(one) for one in renderables]


class _Console(Console):
    """Stops writing to stderr once its reader is gone, so that a closed pipe does not stop a run before its checkpoint."""

    def on_broken_pipe(self) -> None:
        if not self.stderr:
            super().on_broken_pipe()
        self.quiet = True


def make_console(*, stderr: bool = False) -> Console:
    """Return a console for untrusted text."""
    console = _Console(stderr=stderr, highlight=False, markup=False)
    console.push_render_hook(_MakePrintable())
    return console


@functools.cache
def stderr_console() -> Console:
    """Return the console of log lines and progress bars, shared by all loggers."""
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
        handler.addFilter(HideSecrets(os.environ))
        root.addHandler(handler)
    logging.getLogger("polyturn").setLevel(level if level in logging.getLevelNamesMapping() else "INFO")


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Append the log's lines, tracebacks included, to a file while the block runs; secrets are hidden as in the console."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(HideSecrets(os.environ))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def quiet_transformers() -> None:
    """Silence transformers while it loads and builds models; downloads keep their bars."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").handlers.clear()  # its lines reach the console once, like all others
    enable_progress_bars()
