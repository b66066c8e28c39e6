"""Consoles: one for stderr, which log lines and progress bars share, and others for results.

Log lines and bars must share a console, so that rich prints a line above the bar instead of through it. Much of the output
comes from models, environments and untrusted files, so these consoles ignore markup and remove control characters.
"""

from __future__ import annotations

import functools

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment

from polyturn.core.printable import printable


class _Printable:
    """A renderable without control characters."""

    def __init__(self, inner: ConsoleRenderable) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._inner, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class _MakePrintable(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Printable(one) for one in renderables]


class _Console(Console):
    """A console that goes silent when the reader of stderr is gone, so that a closed pipe does not stop a run."""

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
