"""A run's output in the terminal: one line per step, and the progress of anything that takes more than a second or two.

    step 12/100  success 0.52  reward 0.61  turns 2.3  cut 4 %  8,120 tokens/s  loss 0.0123  3.1 s  eta 4m32s
    rollout: 120 of 256 (47 %), 33.1/s, eta 4s; 90 generate, 12 call tools

Lines go through `logging`. In a terminal rich draws a progress bar; elsewhere progress is logged as plain lines, which
become rarer in work that takes long.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from polyturn.core.lifecycle import EpisodeState
from polyturn.infra.console import stderr_console

logger = logging.getLogger(__name__)

_SHOWN = (
    ("rollout/success", "success", ".3f"),
    ("reward/mean", "reward", ".3f"),
    ("policy/kl_to_teacher", "KL to teacher", ".3f"),
    ("policy/teacher_gap", "teacher gap", ".3f"),
    ("rollout/turns", "turns", ".2f"),
)
PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Seconds before a bar appears, so that short work shows none. Without a terminal: the first and the longest pause before a
line; each pause is twice the one before, so lines come after 2, 6, 14, 30, 62, 122 … seconds."""

BLOCKS = "▁▂▃▄▅▆▇█"


class ConsoleTracker:
    """Logs one INFO line per step."""

    def __init__(self, total_steps: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._clock = clock
        self._start = clock()
        self._first: int | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the line of step `step`."""
        logger.info("%s", self.line(step, values))

    def line(self, step: int, values: Mapping[str, float]) -> str:
        """Return the line, with the figures of `values` and the time left."""
        parts = [f"step {step}" + (f"/{self._total}" if self._total is not None else ""), *figures(values)]
        eta = self.eta(step, values.get("time/step_s", 0.0))
        return "  ".join([*parts, f"eta {duration(eta)}"] if eta is not None else parts)

    def close(self) -> None:
        """Nothing to close."""

    def eta(self, step: int, seconds: float) -> float | None:
        """Return the seconds left, from the pace since this process's first step."""
        if self._first is None:  # measured from the start of the first step, so that a warm start does not count
            self._first = step - 1 if step > 0 else step
            self._start = self._clock() - seconds
        done = step - self._first
        if self._total is None or done <= 0 or step >= self._total:
            return None
        return (self._clock() - self._start) / done * (self._total - step)


def figures(values: Mapping[str, float], past: Mapping[str, Sequence[float]] | None = None) -> list[str]:
    """Return the most important metrics of a step as text, with a sparkline for each metric in `past`."""
    parts = []
    for name, word, form in _SHOWN:
        if name in values:
            parts.append(f"{word} {values[name]:{form}} {sparkline((past or {}).get(name, ()))}".rstrip())
    if failed := values.get("buffer/failed_trajectories"):
        of = f" of {failed / share:.0f}" if (share := values.get("rollout/failed")) else ""
        parts.append(f"FAILED {failed:.0f}{of}")
    parts += stops(cut=values.get("rollout/cut", 0.0), out_of_turns=values.get("rollout/out_of_turns", 0.0))
    if (errors := values.get("rollout/tool_errors", 0.0)) > 0:  # NaN in a step without calls
        parts.append(f"tool errors {100 * errors:.1f} %")
    parts += [f"{name} {values[name]:.3f}" for name in values if name.startswith("eval/") and name.endswith("/success")]
    seconds = values.get("time/step_s", 0.0)
    if seconds > 0 and "tokens/sampled" in values:
        parts.append(f"{values['tokens/sampled'] / seconds:,.0f} tokens/s")
    if "loss/total" in values:
        parts.append(f"loss {values['loss/total']:.4f}")
    return [*parts, f"{seconds:.1f} s"] if seconds > 0 else parts


def sparkline(values: Sequence[float]) -> str:
    """Return values as a sparkline: [0, 0.5, 1] -> "▁▅█"; "" for fewer than two."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    width = high - low or 1.0
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int((v - low) / width * len(BLOCKS)))] for v in values)


class _Open:
    """The progress displays of this process that are open; the last is the innermost."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.displays: list[Progress] = []


@functools.cache
def _open() -> _Open:
    return _Open()


class Progress:
    """Counts and shows progress: `with Progress("rollout", 256) as bar: ... bar.advance()`.

    A thread updates the display, so it also works during one long operation, such as an import. Without a terminal, only
    the innermost of several open displays logs lines. Without `with`, only `line` shows the progress.
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        console: Console | None = None,
        pause_s: float = PAUSE_S,
        running: Mapping[EpisodeState, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a progress display.

        Args:
            title: The name of the work, for instance "rollout".
            total: Number of items; None if unknown.
            console: The console for the bar; by default the console of log lines, so that log lines do not break the bar.
            pause_s: Seconds before the bar; without a terminal, before the first line.
            running: The number of episodes in each state, for the end of the line.
            clock: Returns the time in seconds.
        """
        self.title = title
        self.total = total
        self.done = 0
        self._console = console or stderr_console()
        self._pause_s = pause_s
        self._running = running or {}
        self._clock = clock
        self._start = clock()
        self._open = _open()
        self._is_over = threading.Event()
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        self._start = self._clock()
        with self._open.lock:
            self._open.displays.append(self)
        threading.Thread(target=self._show, name=f"progress of {self.title}", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._open.lock:
            self._is_over.set()
            if self in self._open.displays:
                self._open.displays.remove(self)
            if self._bar is not None:
                self._bar.stop()

    def advance(self, num: int = 1) -> None:
        """Add `num` finished items."""
        with self._open.lock:
            self.done += num
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self.done)

    def line(self) -> str:
        """Return the progress and the states of running episodes as one line."""
        return "; ".join(filter(None, (self._counted(), states(self._running))))

    def _counted(self) -> str:
        seconds = self._clock() - self._start
        pace = self.done / seconds if seconds > 0 else 0.0
        if self.total is None:
            counted = f"{self.done}, {pace_of(pace)}, " if self.done and pace > 0 else ""
            return f"{self.title}: {counted}{duration(seconds)}"
        if not self.done:
            return f"{self.title}: 0 of {self.total}, {duration(seconds)} so far"
        share = self.done / self.total if self.total else 1.0
        left = f", eta {duration((self.total - self.done) / pace)}" if pace > 0 and self.done < self.total else ""
        counted = f"{self.title}: {self.done} of {self.total} ({share:.0%})".replace("%", " %")
        return f"{counted}{', ' if pace > 0 else ''}{pace_of(pace)}{left}"

    def _show(self) -> None:
        pause_s = self._pause_s
        while not self._is_over.wait(pause_s):
            with self._open.lock:
                if self._is_over.is_set():
                    return
                if self._console.is_terminal:
                    self._bar = self._drawn()
                    return
                if self._open.displays[-1] is self:
                    logger.info("%s", self.line())
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _drawn(self) -> RichProgress:
        counts = () if self.total is None else (MofNCompleteColumn(), TimeRemainingColumn())
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), *counts)
        bar = RichProgress(*columns, console=self._console, transient=True)
        bar.add_task(self.title, total=self.total, completed=self.done)
        bar.start()
        return bar


def stops(*, cut: float, out_of_turns: float) -> list[str]:
    """Return the shares of episodes stopped by limits as text: ["cut 81 %", "out of turns 6 %"]; none below 0.5 %."""
    shares = {"cut": cut, "out of turns": out_of_turns}
    return [f"{words} {100 * share:.0f} %" for words, share in shares.items() if share >= 0.005]


def states(running: Mapping[EpisodeState, int]) -> str:
    """Return the number of episodes in each state as text: "90 generate, 12 call tools, 3 wait for an interaction"."""
    return ", ".join(f"{running[state]} {verb}" for state, verb in _VERBS.items() if running.get(state))


_VERBS = {
    EpisodeState.GENERATING: "generate",
    EpisodeState.TOOL_CALLING: "call tools",
    EpisodeState.INTERACTING: "wait for an interaction",
}


def pace_of(per_second: float) -> str:
    """Return a pace with a suitable unit: "8.0/s", "1.5/min"; "" for 0."""
    if per_second <= 0:
        return ""
    return f"{per_second:.1f}/s" if per_second >= 0.1 else f"{60 * per_second:.1f}/min"


def duration(seconds: float) -> str:
    """Return a duration as text: 8.2 -> "8s", 272 -> "4m32s", 4000 -> "1h06m"."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
