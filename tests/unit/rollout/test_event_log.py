"""The debug log of an episode: one line per event, in order."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys

import pytest

import polyturn
from polyturn.cli.main import log_level
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from support.parts import Says, call

CALL = call("look", key="price")


@polyturn.tool
def look(key: str) -> str:
    """Look something up.

    Args:
        key: What to look up.
    """
    return f"{key}\x1b[31m is 4\n" + "x" * 500


def story(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    context = scripted_context(
        [CALL, "It is 5.", "It is 4."],
        tools=[look],
        interactions={"grader": Says("Not correct.")},
        limits=Limits(max_turns=3),
    )
    one = task(id="t7", interaction="grader")
    with caplog.at_level(level, logger="polyturn"):
        asyncio.run(run_episode(context, one, id="g5/2"))
    return [r.getMessage() for r in caplog.records if r.name.startswith("polyturn.rollout.") and r.levelno == level]


def test_episode_is_logged_from_start_to_reward(caplog: pytest.LogCaptureFixture):
    lines = story(caplog, logging.DEBUG)
    assert all(line.startswith("g5/2 ") and "\n" not in line and "\x1b" not in line and len(line) < 400 for line in lines)
    begins = ["starts: task t7", "turn 0: ", "turn 0: 'look' answered: ", "turn 1: ", "turn 1: interaction (score 0"]
    begins += [
        "turn 2: ",
        "turn 2: interaction",
        "limit: max_turns forbids turn 3",
        "ends: max_turns after 3 turns, reward ",
    ]
    assert len(lines) == len(begins)
    for line, begin in zip(lines, begins, strict=True):
        assert line.startswith(f"g5/2 {begin}"), (line, begin)


def test_log_that_is_off_is_empty(caplog: pytest.LogCaptureFixture):
    assert story(caplog, logging.INFO) == []


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({}, "INFO"),
        ({"VERL_LOGGING_LEVEL": "warn"}, "WARNING"),
        ({"VERL_LOGGING_LEVEL": "DEBUG"}, "DEBUG"),
        ({"POLYTURN_LOG_LEVEL": "error", "VERL_LOGGING_LEVEL": "DEBUG"}, "ERROR"),
        ({"POLYTURN_LOG_LEVEL": ""}, "INFO"),
    ],
)
def test_log_level_comes_from_the_environment(environ: dict[str, str], level: str):
    assert log_level(environ) == level


def test_command_line_sets_the_log_level():
    code = (
        "import logging; from polyturn.cli.main import prepare_process; prepare_process();"
        "print(logging.getLogger('polyturn').isEnabledFor(logging.DEBUG))"
    )
    called = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"VERL_LOGGING_LEVEL": "DEBUG"}, check=True
    )
    assert called.stdout.strip() == "True"
