"""verl's trace decorators: they record where there is a backend, and cost nothing where there is none."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from polyturn.compat.verl.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op
from polyturn.core.errors import ConfigError


class Memory:
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def record(self, name: str, inputs: Any, outputs: Any, error: Any, seconds: float, attributes: Any) -> None:
        self.seen.append((name.rpartition(".")[2], dict(inputs), outputs, type(error).__name__, attributes.get("step")))


class Worker:
    @rollout_trace_op
    async def add(self, a: int, b: int = 1) -> int:
        return a + b

    @rollout_trace_op
    def fail(self) -> None:
        raise ValueError("no")


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    yield
    RolloutTraceConfig.reset()


async def test_without_a_backend_nothing_changes() -> None:
    assert inspect.iscoroutinefunction(Worker().add)
    assert await Worker().add(1, b=2) == 3
    with pytest.raises(ValueError, match="no"):
        Worker().fail()


async def test_operations_and_errors_are_recorded_with_their_trajectory() -> None:
    memory = Memory()
    RolloutTraceConfig.init("project", "experiment", memory)
    with rollout_trace_attr(step=3, sample_index=0, rollout_n=1):
        await Worker().add(1)
        with pytest.raises(ValueError, match="no"):
            Worker().fail()
        with rollout_trace_attr(step=4, trace=False):
            await Worker().add(5)
            with pytest.raises(ValueError, match="no"), rollout_trace_attr(step=5):
                Worker().fail()
        await Worker().add(2)
    assert memory.seen == [
        ("add", {"a": 1}, 2, "NoneType", 3),
        ("fail", {}, None, "ValueError", 3),
        ("add", {"a": 2}, 3, "NoneType", 3),
    ]
    assert RolloutTraceConfig.get_backend() == "Memory"


async def test_the_log_is_a_backend_and_others_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    RolloutTraceConfig.init("project", "experiment", "log")
    with caplog.at_level(logging.DEBUG, logger="polyturn"):
        await Worker().add(1)
    assert "Worker.add returned 2" in caplog.text
    with pytest.raises(ConfigError, match="'weave' is not here"):
        RolloutTraceConfig.init("project", "experiment", "weave")
