"""LiveStatus: the state of a run, pinned to the bottom of a terminal or of a notebook's cell; log lines scroll above it.

    ── step 12/100 ━━━━━╸────────────────────── 12 %  eta 4m32s ──
    success 0.520 ▁▂▃▅▇  reward 0.610 ▁▁▃▅▆  8,120 tokens/s  turns 2.30  tool errors 1.2 %
    rollout 120 of 256, 33.1/s; 90 generate, 12 call tools        or: training 12s

Separate from the lines, which are what stays: this is drawn over and over, and gone when the run ends. It shares the
console of the log lines, so that neither tears the other.
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

from polyturn.core.lifecycle import EpisodeState
from polyturn.tracking.console import duration, pace_of, states

BLOCKS = "▁▂▃▄▅▆▇█"
HISTORY = 24
"""Steps that a small curve shows."""


class LiveStatus:
    """Shows a run until `stop`; nothing before the first `step` or `phase`."""

    def __init__(
        self, total_steps: int, console: Console, *, per_second: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Describe the run.

        Args:
            total_steps: How many steps it takes.
            console: A terminal or a notebook's, the one that log lines go to.
            per_second: How often it is drawn.
            clock: Seconds.
        """
        self._total = total_steps
        self._clock = clock
        self._lock = threading.Lock()
        self._step = 0
        self._eta = ""
        self._values: dict[str, float] = {}
        self._history: dict[str, list[float]] = {"rollout/success": [], "reward/mean": []}
        self._phase = ""
        self._done, self._began = 0, 0.0
        self._of: int | None = 0
        self.running: Mapping[EpisodeState, int] = {}
        """Number of episodes in each state, read whenever it is drawn."""
        if console.is_jupyter:
            self._live: Live | NotebookPicture = NotebookPicture(self.picture, seconds=1 / per_second, clock=clock)
            return
        self._live = Live(
            get_renderable=self.picture,
            console=console,
            refresh_per_second=per_second,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # else what goes into a pipe would be drawn on the terminal
        )

    def step(self, step: int, values: Mapping[str, float], *, eta: str) -> None:
        """Show the numbers of a step."""
        with self._lock:
            self._step, self._eta = step, eta
            self._values |= values
            for name, past in self._history.items():
                if name in values and values[name] == values[name]:
                    past.append(values[name])
                    del past[:-HISTORY]
        self._live.start()

    def begin(self, phase: str, total: int | None) -> None:
        """Show that a phase has begun; `total` is how many things it does, None where it does not count them."""
        with self._lock:
            self._phase, self._done, self._of, self._began = phase, 0, total, self._clock()
        self._live.start()

    def advance(self, phase: str, total: int) -> None:
        """Show that one more thing of a phase, for instance an episode of the rollout, is done."""
        with self._lock:
            if phase != self._phase:
                self._phase, self._done, self._began = phase, 0, self._clock()
            self._done, self._of = self._done + 1, total
        self._live.start()

    def end_phase(self) -> None:
        """Say that the phase is over, and the numbers are being worked on."""
        with self._lock:
            self._phase = ""

    def stop(self) -> None:
        """Take it off the screen."""
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
                lines.append(Text("  ".join(self._numbers()), no_wrap=True, overflow="ellipsis"))
            if self._phase:
                seconds = self._clock() - self._began
                pace = f", {pace_of(self._done / seconds)}" if self._done and seconds > 0 else ""
                states_now = f"; {words}" if (words := states(self.running)) else ""
                counted = duration(seconds) if self._of is None else f"{self._done} of {self._of}{pace}"
                line = f"{self._phase} {counted}{states_now}"
                lines.append(Text(line, style="dim", no_wrap=True, overflow="ellipsis"))
            return Group(*lines)

    def _numbers(self) -> list[str]:
        values, parts = self._values, []
        for name, word in (("rollout/success", "success"), ("reward/mean", "reward")):
            if name in values:
                parts.append(f"{word} {values[name]:.3f} {sparkline(self._history[name])}".rstrip())
        if values.get("time/step_s", 0.0) > 0 and "tokens/sampled" in values:
            parts.append(f"{values['tokens/sampled'] / values['time/step_s']:,.0f} tokens/s")
        if "rollout/turns" in values:
            parts.append(f"turns {values['rollout/turns']:.2f}")
        errors = values.get("rollout/tool_errors")
        if errors is not None and errors == errors:  # it is NaN in a step without calls
            parts.append(f"tool errors {100 * errors:.1f} %")
        return parts


class NotebookPicture:
    """Draws a picture in the cell that runs, each over the one before; rich's own way needs widgets in the notebook."""

    def __init__(self, picture: Callable[[], RenderableType], *, seconds: float, clock: Callable[[], float]) -> None:
        """Take what is drawn, and how many seconds lie between two pictures at least."""
        self._picture, self._seconds, self._clock = picture, seconds, clock
        self._handle: Any = None
        self._drawn = 0.0

    def start(self) -> None:
        """Draw the picture, unless the one that is there is younger than that."""
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
        """Take it out of the cell."""
        if self._handle is not None:
            from IPython.display import HTML

            self._handle.update(HTML(""))
            self._handle = None


def sparkline(values: list[float]) -> str:
    """Return values as a small curve: [0, 0.5, 1] -> "▁▅█"; "" for fewer than two."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    width = high - low or 1.0
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int((v - low) / width * len(BLOCKS)))] for v in values)
