"""The output for a person: the line of a step, and progress with and without a terminal."""

from __future__ import annotations

import io
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from polyturn.tracking.console import ConsoleTracker, Progress, duration


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_line_of_a_step_has_figures_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    tracker = ConsoleTracker(100, clock=clock)
    clock.now = 10.0
    values = {
        "rollout/success": 0.5,
        "reward/mean": 0.61,
        "rollout/turns": 2.25,
        "tokens/sampled": 81200.0,
        "time/step_s": 10.0,
        "loss/total": 0.01234,
    }
    with caplog.at_level(logging.INFO, logger="polyturn"):
        tracker.log(1, values)
    assert caplog.messages == [
        "step 1/100  success 0.500  reward 0.610  turns 2.25  8,120 tokens/s  loss 0.0123  10.0 s  eta 16m30s"
    ]


def test_line_of_a_step_shows_what_stopped_episodes() -> None:
    line = ConsoleTracker().line(1, {"rollout/cut": 0.8125, "rollout/out_of_turns": 0.0625, "rollout/turns": 1.0})
    assert line == "step 1  turns 1.00  cut 81 %  out of turns 6 %"
    assert ConsoleTracker().line(1, {"rollout/cut": 0.0, "rollout/out_of_turns": 0.0}) == "step 1"


def test_line_shows_the_distance_to_the_teacher() -> None:
    line = ConsoleTracker().line(1, {"policy/kl_to_teacher": 0.25, "policy/teacher_gap": -0.5, "rollout/turns": 1.0})
    assert "KL to teacher 0.250" in line and "teacher gap -0.500" in line and "reward" not in line


def test_missing_figures_are_left_out() -> None:
    assert ConsoleTracker().line(0, {"eval/greedy/success": 0.3}) == "step 0  eval/greedy/success 0.300"


def test_time_left_counts_steps_of_this_process_only() -> None:
    clock = Clock()
    tracker = ConsoleTracker(100, clock=clock)
    clock.now = 20.0
    assert tracker.line(51, {"time/step_s": 10.0}).endswith("eta 8m10s"), "what came before the first step is not its pace"


def terminal(is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=100)


def test_lines_come_without_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    clock, before = Clock(), set(threading.enumerate())
    with (
        caplog.at_level(logging.INFO, logger="polyturn"),
        Progress("rollout", 256, console=terminal(False), pause_s=0.01, clock=clock) as bar,
    ):
        clock.now = 10.0
        bar.advance(80)
        while caplog.messages.count("rollout: 80 of 256 (31 %), 8.0/s, eta 22s") < 2:
            time.sleep(0.01)
    for thread in set(threading.enumerate()) - before:
        thread.join()  # its thread ends with it


class Waits(threading.Event):
    """An event that records the pauses and returns from each at once; the seventh finds the work over."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout)
        return len(self.pauses) == 7


def test_lines_of_long_work_become_rarer(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, before = Waits(), set(threading.enumerate())
    real = {"Thread": threading.Thread, "Lock": threading.Lock}
    monkeypatch.setattr("polyturn.tracking.console.threading", SimpleNamespace(Event=lambda: waits, **real))
    with caplog.at_level(logging.INFO, logger="polyturn"), Progress("loading", console=terminal(False), clock=Clock()):
        for thread in set(threading.enumerate()) - before:
            thread.join()
    assert waits.pauses == [2, 4, 8, 16, 32, 60, 60]
    assert len(caplog.messages) == 6


def test_only_the_innermost_progress_writes_lines(caplog: pytest.LogCaptureFixture) -> None:
    def wait_for(line: str, num: int) -> None:
        while caplog.messages.count(line) < num:
            time.sleep(0.01)

    options: dict[str, Any] = {"console": terminal(False), "pause_s": 0.01, "clock": Clock()}
    with caplog.at_level(logging.INFO, logger="polyturn"), Progress("outer", **options):
        with Progress("inner", **options):
            caplog.clear()
            wait_for("inner: 0s", 3)
            assert "outer: 0s" not in caplog.messages
        wait_for("outer: 0s", 1)


def test_progress_without_a_count_shows_its_time() -> None:
    assert Progress("loading", console=terminal(False), clock=Clock()).line() == "loading: 0s"


@pytest.mark.parametrize(
    ("done", "seconds", "line"),
    [
        (0, 12.0, "rollout: 0 of 8, 12s so far"),
        (1, 120.0, "rollout: 1 of 8 (12 %), 0.5/min, eta 14m00s"),
        (8, 2.0, "rollout: 8 of 8 (100 %), 4.0/s"),
    ],
)
def test_progress_shows_only_numbers_that_mean_something(done: int, seconds: float, line: str) -> None:
    clock = Clock()
    bar = Progress("rollout", 8, console=terminal(False), clock=clock)
    clock.now = seconds
    bar.advance(done)
    assert bar.line() == line


def test_progress_without_a_total_has_no_share() -> None:
    clock = Clock()
    with Progress("reading", console=terminal(False), clock=clock) as bar:
        clock.now = 4.0
        bar.advance(8)
        assert bar.line() == "reading: 8, 2.0/s, 4s"


def test_bar_appears_in_a_terminal_once_it_takes_long() -> None:
    console = terminal(True)
    with Progress("rollout", 10, console=console, pause_s=0.01) as bar:
        bar.advance(3)
        while "rollout" not in console.file.getvalue():  # type: ignore[attr-defined]
            time.sleep(0.01)
        bar.advance(4)
    assert "3/10" in console.file.getvalue()  # type: ignore[attr-defined]
    assert bar.done == 7


def test_short_work_shows_nothing_in_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    console = terminal(True)
    with caplog.at_level(logging.INFO), Progress("rollout", 2, console=console) as bar:
        bar.advance(2)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    assert caplog.messages == []


@pytest.mark.parametrize(("seconds", "said"), [(8.2, "8s"), (59.7, "1m00s"), (272, "4m32s"), (4000, "1h06m"), (-1, "0s")])
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said
