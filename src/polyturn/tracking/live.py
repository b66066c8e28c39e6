"""LiveStatus: shows the state of a run at the bottom of a terminal or notebook cell, while log lines scroll above.

    ── step 12/100 ━━━━━╸────────────────────── 12 %  eta 4m32s ──
    success 0.520 ▁▂▃▅▇  reward 0.610 ▁▁▃▅▆  turns 2.30  tool errors 1.2 %  8,120 tokens/s
    rollout: 120 of 256 (47 %), 33.1/s, eta 4s; 90 generate, 12 call tools        or: training: 12s

It is redrawn at most twice a second and removed when the run ends. It shares the console of the log lines, so that status
and log lines do not overwrite each other.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polyturn.tracking.console import Progress, figures

HISTORY = 24
"""Number of steps in a sparkline."""


class LiveStatus:
    """Shows a run from the first `step` or `show` until `stop`."""

    def __init__(
        self, total_steps: int, console: Console, *, per_second: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the display of a run.

        Args:
            total_steps: Number of steps of the run.
            console: The console of the log lines, of a terminal or a notebook.
            per_second: Number of redraws per second.
            clock: Returns the time in seconds.
        """
        self._total = total_steps
        self._lock = threading.Lock()
        self._step = 0
        self._eta = ""
        self._values: Mapping[str, float] = {}
        self._history: dict[str, list[float]] = {"rollout/success": [], "reward/mean": []}
        self._phase: Progress | None = None
        if console.is_jupyter:
            self._live: Live | NotebookPicture = NotebookPicture(self.picture, seconds=1 / per_second, clock=clock)
            return
        self._live = Live(
            get_renderable=self.picture,
            console=console,
            refresh_per_second=per_second,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # otherwise text for a pipe would appear on the terminal
        )

    def step(self, step: int, values: Mapping[str, float], *, eta: str) -> None:
        """Show the metrics of a step."""
        with self._lock:
            self._step, self._eta = step, eta
            self._values = values
            for name, past in self._history.items():
                if name in values and values[name] == values[name]:
                    past.append(values[name])
                    del past[:-HISTORY]
        self._live.start()

    def show(self, phase: Progress | None) -> None:
        """Show the progress of a phase until the next call; None shows none."""
        self._phase = phase
        self._live.start()

    def stop(self) -> None:
        """Remove the display."""
        self._live.stop()

    def picture(self) -> RenderableType:
        """Return the current picture."""
        with self._lock:
            head = Table.grid(padding=(0, 1), expand=True)
            head.add_column(no_wrap=True)
            head.add_column(ratio=1)
            head.add_column(no_wrap=True)
            bar = ProgressBar(total=max(1, self._total), completed=self._step)
            share = f"{100 * self._step / max(1, self._total):.0f} %" + (f"  eta {self._eta}" if self._eta else "")
            head.add_row(Text(f"step {self._step}/{self._total}", style="bold"), bar, share)
            lines: list[RenderableType] = [head]
            if self._values:
                numbers = "  ".join(figures(self._values, self._history))
                lines.append(Text(numbers, no_wrap=True, overflow="ellipsis"))
            if (phase := self._phase) is not None:
                lines.append(Text(phase.line(), style="dim", no_wrap=True, overflow="ellipsis"))
            return Group(*lines)


class NotebookPicture:
    """Redraws a picture in the running notebook cell, without the widgets that rich's own display needs."""

    def __init__(self, picture: Callable[[], RenderableType], *, seconds: float, clock: Callable[[], float]) -> None:
        """Create a display; `seconds` is the shortest time between two redraws."""
        self._picture, self._seconds, self._clock = picture, seconds, clock
        self._handle: Any = None
        self._drawn = 0.0

    def start(self) -> None:
        """Draw the picture, unless the last one is more recent than `seconds`."""
        from IPython.display import HTML, display

        if self._handle is not None and self._clock() - self._drawn < self._seconds:
            return
        self._drawn = self._clock()
        canvas = Console(file=io.StringIO(), record=True, width=100, force_jupyter=False)
        canvas.print(self._picture())
        html = HTML(canvas.export_html(inline_styles=True, code_format="<pre>{code}</pre>"))
        if self._handle is None:
            self._handle = display(html, display_id=True)
        else:
            self._handle.update(html)

    def stop(self) -> None:
        """Remove the picture from the cell."""
        if self._handle is not None:
            from IPython.display import HTML

            self._handle.update(HTML(""))
            self._handle = None
