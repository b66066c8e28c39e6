"""Consoles: one for stderr, which log lines and progress bars share, and others for results.

Separate because lines and bars must share a console: rich then prints a line above the bar instead of through it. Much of
what is printed was written by models, environments and files of others: no console here reads markup in it, and none hands
a terminal what it would obey.
"""

from __future__ import annotations

import functools

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment

from polyturn.core.printable import printable


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
