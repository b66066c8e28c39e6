"""Steps: errors of the training thread reach the caller of the loop."""

from __future__ import annotations

from typing import Any

import pytest

from polyturn.api.stepping import StepHooks, Steps
from polyturn.core.errors import ConfigError, TrainingError
from support.refusals import refuses


def failing(hooks: StepHooks) -> Any:
    hooks.revise(10)(0, [], [], {})
    raise TrainingError("the loss is not finite")


def test_update_that_fails_raises_its_error_in_the_loop() -> None:
    steps = iter(Steps(failing))
    step = next(steps)
    refuses(step.update, TrainingError, "not finite")


def test_failure_after_the_loop_was_left_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for _ in Steps(failing):
        break
    assert "the loss is not finite" in caplog.text


def test_failed_run_is_refused_with_its_error() -> None:
    steps = Steps(failing)
    refuses(lambda: steps.run, ConfigError, "not finished")
    with pytest.raises(TrainingError):
        list(steps)
    refuses(lambda: steps.run, ConfigError, "failed", "the loss is not finite")
