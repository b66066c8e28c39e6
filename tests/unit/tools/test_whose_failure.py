"""A failure outside the model's control fails the trajectory; one that its calls can cause is an observation."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import polyturn
from polyturn.core.errors import ToolConnectionError, ToolUnavailableError
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.rollout.run_episode import run_episode
from polyturn.sandbox.python.interpreter import Interpreter, SandboxStartError
from polyturn.sandbox.python.isolation import Isolation, bare_python
from polyturn.sandbox.python.limits import SandboxLimits
from polyturn.sandbox.python.pool import WarmPool
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools import python_sandbox
from polyturn.tools.base import BaseTool
from polyturn.tools.breaker import BreakerSettings
from polyturn.tools.options import ToolOptions
from polyturn.tools.python_sandbox import PythonSandbox
from polyturn.tools.toolbox import Toolbox
from polyturn.training.rollout_metrics import rollout_metrics
from support.refusals import refuses
from support.tools_parts import schema

CALL = '<tool_call>\n{"name": "%s", "arguments": {"code": "%s"}}\n</tool_call>'
PATIENT = ToolOptions(timeout_s=60)


async def play(box: Toolbox, name: str, code: str = "1") -> Trajectory:
    context = dataclasses.replace(scripted_context([CALL % (name, code), "#### 4"]), tools=box)
    return await run_episode(context, task(tools=(name,)), id="e")


# ---- trajectories ---------------------------------------------------------------------------------------------------


class Gone(BaseTool):
    """Its service does not answer."""

    def __init__(self, error: type[Exception] = ToolConnectionError) -> None:
        super().__init__({}, schema("gone"))
        self._error = error

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise self._error("nobody listens")


async def test_sandbox_that_cannot_be_started_fails_the_trajectory(monkeypatch: pytest.MonkeyPatch):
    def refuses(*args: Any, **kwargs: Any) -> Interpreter:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(python_sandbox, "Interpreter", refuses)
    tool = PythonSandbox({"warm": 0, "allow_unsafe": True})
    trajectory = await play(Toolbox([tool], PATIENT), tool.name)
    assert trajectory.is_failed
    assert trajectory.reward is None
    assert str(trajectory.error).startswith("ToolUnavailableError: tool 'python': [Errno 11]")
    with pytest.raises(KeyError):
        await tool.release("e")  # it was released all the same
    group = TrajectoryGroup(id="g", task=trajectory.task, trajectories=(trajectory,))
    assert rollout_metrics([group], version=0)["rollout/tools_unavailable"].value == 1


@pytest.mark.parametrize(
    ("code", "status", "text"), [("import os; os._exit(3)", "exit", "exit code 3"), ("while True: pass", "timeout", "0.5 s")]
)
async def test_code_that_ends_its_sandbox_is_an_observation(code: str, status: str, text: str):
    tool = PythonSandbox({"warm": 0, "allow_unsafe": True, "timeout": 0.5 if status == "timeout" else 50})
    box = Toolbox([tool], ToolOptions(timeout_s=80, breaker=BreakerSettings(failures=1, cooldown_s=60)))
    trajectory = await play(box, tool.name, code)
    (result,) = trajectory.turns[0].tool_results
    assert (trajectory.is_failed, result.error, result.metrics["status"]) == (False, None, status)
    assert text in str(result.content)
    assert box.breakers["python"].admit() is None


async def test_lost_service_is_an_observation_unless_the_run_says_otherwise():
    trajectory = await play(Toolbox([Gone()], PATIENT), "gone")
    assert (trajectory.is_failed, trajectory.turns[0].tool_results[0].error) == (False, "connection")
    breaker = BreakerSettings(failures=1, cooldown_s=60)
    box = Toolbox([Gone()], ToolOptions(timeout_s=60, unreachable="failure", breaker=breaker))
    first, second = [await play(box, "gone") for _ in range(2)]
    assert str(first.error).startswith("ToolUnavailableError: tool 'gone' cannot be reached")
    assert "breaker is open" in str(second.error)


async def test_tool_may_say_that_its_failure_is_not_the_models():
    assert polyturn.ToolUnavailableError is ToolUnavailableError
    trajectory = await play(Toolbox([Gone(ToolUnavailableError)], PATIENT), "gone")
    assert str(trajectory.error).startswith("ToolUnavailableError: tool 'gone': nobody listens")
    refused = await play(Toolbox([Gone(polyturn.ToolError)], ToolOptions(timeout_s=60, unreachable="failure")), "gone")
    assert not refused.is_failed, "the model can mend a refusal"


# ---- the pool of sandboxes ------------------------------------------------------------------------------------------


def unsafe() -> Interpreter:
    return Interpreter(SandboxLimits(), isolation=Isolation.NONE, python=bare_python())


class Made:
    """A sandbox that costs nothing."""

    is_alive = True
    num_closed = 0

    def close(self) -> None:
        Made.num_closed += 1


def test_pool_tries_again_before_a_sandbox_counts_as_broken():
    tries: list[int] = []

    def start() -> Interpreter:
        tries.append(1)
        if len(tries) < 3:
            raise SandboxStartError("fork: Resource temporarily unavailable")
        return unsafe()

    pool = WarmPool(start, size=0, keep_s=0.05)
    pool.open()
    made = pool.take()
    assert made.is_alive
    assert len(tries) == 3
    made.close()
    pool.close()


def test_pool_gives_up_a_sandbox_that_does_not_start():
    gate = threading.Event()

    def start() -> Interpreter:
        gate.wait()
        raise SandboxStartError("no room")

    pool = WarmPool(start, size=0, keep_s=0.05)
    pool.open()
    refuses(lambda: pool.take(within_s=0.2), SandboxStartError, "in time")
    gate.set()
    refuses(lambda: pool.take(), SandboxStartError, "no room")
    pool.close()


def test_pool_starts_sandboxes_side_by_side_up_to_its_limit():
    lock, meet = threading.Lock(), threading.Barrier(4)
    num_running = most = 0

    def start() -> Any:
        nonlocal num_running, most
        with lock:
            num_running += 1
            most = max(most, num_running)
        meet.wait()
        with lock:
            num_running -= 1
        return Made()

    pool = WarmPool(start, size=0, keep_s=0.05, num_starters=4)
    pool.open()
    with ThreadPoolExecutor(12) as threads:
        taken = list(threads.map(lambda _: pool.take(), range(12)))
    assert (len(taken), most) == (12, 4)
    pool.close()


def test_threads_of_a_pool_end_when_it_has_no_users():
    before = set(threading.enumerate())
    Made.num_closed = 0
    pool = WarmPool(lambda: Made(), size=3, keep_s=0.05, num_starters=3)  # type: ignore[arg-type, return-value]
    for _ in range(3):
        pool.open()
        pool.take()
        while not pool.num_ready:
            time.sleep(0.001)
        pool.close()
    while pool.num_ready or set(threading.enumerate()) - before:
        time.sleep(0.01)
    assert Made.num_closed


def test_pool_on_a_machine_without_threads_counts_no_user(monkeypatch: pytest.MonkeyPatch):
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = WarmPool(lambda: Made(), size=0, keep_s=0.05)  # type: ignore[arg-type, return-value]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        refuses(lambda: pool.open(), SandboxStartError, "can't start new thread")
    pool.open()
    assert pool.take().is_alive
    pool.close()
