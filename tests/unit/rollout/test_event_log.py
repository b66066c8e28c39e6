"""The debug log of an episode: one line per event, in order, and no cost while it is off."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys

import pytest

import polyturn
from polyturn.cli.log_level import log_level
from polyturn.rollout import event_log
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from support.parts import Says, call
from support.steps import num_steps

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
    return [r.getMessage() for r in caplog.records if r.name == event_log.logger.name]


def test_episode_is_logged_from_start_to_reward(caplog: pytest.LogCaptureFixture):
    lines = story(caplog, logging.DEBUG)
    assert all(line.startswith("g5/2 ") and "\n" not in line and "\x1b" not in line and len(line) < 400 for line in lines)
    told = [line.removeprefix("g5/2 ") for line in lines]
    begins = ["starts: task t7", "turn 0: ", "turn 0: calls look(", "turn 0: look answered in"]
    begins += ["turn 1: ", 'turn 1: interaction answered (score 0): "Not correct."', "turn 2: ", "turn 2: interaction"]
    begins += ["limit: max_turns forbids turn 3", "ends: max_turns after 3 turns", "reward "]
    assert len(told) == len(begins)
    for line, begin in zip(told, begins, strict=True):
        assert line.startswith(begin), (line, begin)
    assert "prompt tokens" in told[0] and "interaction grader" in told[0]
    assert "tokens, stop" in told[1]
    assert json.dumps({"key": "price"}) in told[2]
    assert told[3].endswith('…"')


def test_log_that_is_off_costs_almost_nothing(caplog: pytest.LogCaptureFixture):
    assert story(caplog, logging.INFO) == []
    with caplog.at_level(logging.INFO, logger="polyturn"):
        event_log.is_on()  # logging remembers the answer
        steps = num_steps(event_log.is_on)
    assert steps <= 8, "five of these a turn"


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
