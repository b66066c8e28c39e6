"""In a terminal, a run shows its state below the log lines; elsewhere nothing of it is drawn."""

from __future__ import annotations

import io
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from polyturn.core.lifecycle import EpisodeState
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.testing.episodes import scripted_context, task
from polyturn.tracking.console import Progress, sparkline
from polyturn.tracking.live import LiveStatus
from polyturn.training.observer import RunObserver

STEP = {
    "rollout/success": 0.52,
    "reward/mean": 0.61,
    "rollout/turns": 2.3,
    "tokens/sampled": 8120.0,
    "time/step_s": 2.0,
    "rollout/tool_errors": 0.012,
}


def terminal(width: int = 120) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=width, color_system=None, highlight=False), out


def drawn(live: LiveStatus, width: int = 120) -> str:
    console, out = terminal(width)
    console.print(live.picture())
    return out.getvalue()


def test_notebook_replaces_its_picture(monkeypatch: pytest.MonkeyPatch):
    shown: list[str] = []
    display = SimpleNamespace(
        HTML=str, display=lambda html, display_id: shown.append(html) or SimpleNamespace(update=lambda h: shown.append(h))
    )
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    seconds = iter([0.0, 0.1, 1.0, 1.0, 2.0, 2.0])
    live = LiveStatus(100, Console(force_jupyter=True), clock=lambda: next(seconds))
    live.step(1, STEP, eta="")
    live.step(2, STEP, eta="")
    live.step(3, STEP | {"reward/mean": 0.7}, eta="9m")
    live.stop()
    assert ["step 1/100" in shown[0], "step 3/100" in shown[1], "eta 9m" in shown[1]] == [True] * 3
    assert shown[2:] == [""]


def test_status_shows_figures_and_time_left():
    live = LiveStatus(100, terminal()[0])
    for step in (11, 12):
        live.step(step, STEP | {"rollout/success": 0.04 * step + 0.04}, eta="4m32s")
    progress = Progress("rollout", 256)
    progress.advance()
    live.show(progress)
    live.stop()
    text = drawn(live)
    for part in ("step 12/100", "12 %", "eta 4m32s", "success 0.520 ▁█", "reward 0.610", "4,060 tokens/s", "turns 2.30"):
        assert part in text, part
    assert "tool errors 1.2 %" in text and "rollout: 1 of 256" in text


def test_phase_that_counts_nothing_shows_its_seconds():
    now = 3.0
    live = LiveStatus(100, terminal()[0])
    live.show(Progress("training", clock=lambda: now))
    live.stop()
    now = 15.0
    assert "training: 12s" in drawn(live)


def test_status_shows_what_episodes_do_now():
    live = LiveStatus(100, terminal()[0])
    running = Counter({EpisodeState.GENERATING: 9, EpisodeState.TOOL_CALLING: 2})
    live.show(Progress("rollout", 256, running=running))
    live.stop()
    assert "rollout: 0 of 256, 0s so far; 9 generate, 2 call tools" in drawn(live)
    running[EpisodeState.TOOL_CALLING], running[EpisodeState.INTERACTING] = 0, 4
    assert "9 generate, 4 wait for an interaction" in drawn(live)


def test_status_fits_a_narrow_terminal():
    live = LiveStatus(100, terminal()[0])
    live.step(1, STEP | {"rollout/tool_errors": float("nan"), "reward/mean": float("nan")}, eta="")
    live.stop()
    lines = drawn(live, width=40).splitlines()
    assert len(lines) == 2 and all(len(line) <= 40 for line in lines)
    assert "tool errors" not in drawn(live)


def test_log_lines_stay_whole_above_it():
    console, out = terminal()
    live = LiveStatus(10, console, per_second=50)
    for step in range(1, 6):
        live.step(step, STEP, eta="1s")
        console.print(f"a log line of step {step}")
    live.stop()
    lines = [line for line in out.getvalue().replace("\x1b[2K", "\n").splitlines() if "a log line" in line]
    assert [line.strip().removeprefix("\x1b[?25l") for line in lines] == [
        f"a log line of step {step}" for step in range(1, 6)
    ]


async def groups() -> list[TrajectoryGroup]:
    return await RolloutPool(scripted_context(["#### 4"])).run([GroupSpec(id="g0", task=task(), size=1)])


async def test_status_is_shown_in_a_terminal_only(tmp_path: Path):
    found = await groups()
    shown = {}
    for name, is_terminal in (("terminal", True), ("file", False)):
        out = io.StringIO()
        console = Console(file=out, force_terminal=is_terminal, width=120)
        with RunObserver(tmp_path / name, total_steps=2, console=console) as observer:
            observer.on_group(found[0], phase="rollout", total=1)
            observer.on_step(1, STEP, found)
        shown[name] = out.getvalue()
    assert ("step 1/2" in shown["terminal"] and shown["terminal"].endswith("\x1b[?25h")) or "\x1b[?25h" in shown["terminal"]
    assert shown["file"] == ""


def test_sparkline_is_scaled_to_its_values():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" and sparkline([1.0]) == "" and sparkline([2.0, 2.0]) == "▁▁"
