"""What the model cannot answer for fails the trajectory; what its calls can bring about stays an observation."""

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
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.base import BaseTool
from polyturn.tools.breaker import BreakerSettings
from polyturn.tools.executor import ToolBox
from polyturn.tools.options import ToolOptions
from polyturn.tools.python_sandbox import PythonSandbox, SandboxLimits, WarmPool
from polyturn.tools.python_sandbox import tool as sandbox_tool
from polyturn.tools.python_sandbox.interpreter import Interpreter, SandboxStartError
from polyturn.tools.python_sandbox.isolation import Isolation, bare_python
from polyturn.tools.sandbox import SandboxFusionTool
from polyturn.training.rollout_metrics import rollout_metrics

CALL = '<tool_call>\n{"name": "%s", "arguments": {"code": "%s"}}\n</tool_call>'


async def play(box: ToolBox, name: str, code: str = "1") -> Trajectory:
    context = dataclasses.replace(scripted_context([CALL % (name, code), "#### 4"]), tools=box)
    return await run_episode(context, task(tools=(name,)), id="e")


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any, **kwargs: Any) -> Interpreter:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(sandbox_tool, "Interpreter", refuses)


async def test_a_sandbox_that_cannot_be_started_is_no_observation(monkeypatch: pytest.MonkeyPatch):
    broken(monkeypatch)
    tool = PythonSandbox({"warm": 0, "allow_unsafe": True})
    trajectory = await play(ToolBox([tool]), tool.name)
    assert trajectory.is_failed and trajectory.reward is None
    assert trajectory.error is not None
    assert trajectory.error.startswith("ToolUnavailableError: tool 'python': [Errno 11] Resource temporarily unavailable")
    assert tool._instance_dict == {}, "it is released all the same"
    group = TrajectoryGroup(id="g", task=trajectory.task, trajectories=(trajectory,))
    assert rollout_metrics([group], version=0)["rollout/tools_unavailable"].value == 1


async def test_code_that_ends_its_sandbox_is_an_observation():
    tool = PythonSandbox({"warm": 0, "allow_unsafe": True})
    trajectory = await play(ToolBox([tool]), tool.name, "import os; os._exit(3)")
    assert not trajectory.is_failed and trajectory.reward is not None
    assert "exit code 3" in str(trajectory.turns[0].tool_results[0].content)
    tool._pool.let_go()


def test_a_sandbox_is_tried_again_before_it_counts_as_broken():
    tries: list[int] = []

    def start() -> Interpreter:
        tries.append(1)
        if len(tries) < 3:
            raise SandboxStartError("fork: Resource temporarily unavailable")
        return Interpreter(SandboxLimits(), isolation=Isolation.NONE, python=bare_python())

    pool = WarmPool(start, size=0, keep_s=0.05)
    pool.open()
    made = pool.take()
    assert made.is_alive and len(tries) == 3
    made.close()
    pool.close()


def test_a_sandbox_that_hangs_as_it_starts_is_given_up_in_time():
    gate = threading.Event()

    def start() -> Interpreter:
        gate.wait()
        raise SandboxStartError("no room")

    pool = WarmPool(start, size=0, keep_s=0.05)
    pool.open()
    with pytest.raises(SandboxStartError, match="in time"):
        pool.take(within_s=0.2)
    gate.set()
    pool.close()


def test_sandboxes_are_started_side_by_side_and_not_more_than_allowed():
    lock, live, most, four = threading.Lock(), [0], [0], threading.Barrier(4)

    class Made:
        is_alive = True

        def close(self) -> None:
            pass

    def start() -> Any:
        with lock:
            live[0] += 1
            most[0] = max(most[0], live[0])
        four.wait()
        with lock:
            live[0] -= 1
        return Made()

    pool = WarmPool(start, size=0, keep_s=0.05, num_starters=4)
    pool.open()
    with ThreadPoolExecutor(12) as threads:
        taken = list(threads.map(lambda _: pool.take(), range(12)))
    assert len(taken) == 12 and most[0] == 4
    pool.close()


def test_the_threads_of_a_pool_end_together_when_nobody_uses_it():
    closed: list[int] = []

    class Made:
        is_alive = True

        def close(self) -> None:
            closed.append(1)

    before = set(threading.enumerate())
    pool = WarmPool(lambda: Made(), size=3, keep_s=0.05, num_starters=3)  # type: ignore[arg-type, return-value]
    for _ in range(3):  # a pool is opened again and again
        pool.open()
        pool.take()
        while not pool.num_ready:  # else there may be none to close
            time.sleep(0.001)
        pool.close()
    while pool.num_ready or set(threading.enumerate()) - before:
        time.sleep(0.01)
    assert closed


class Gone(BaseTool):
    """A service that nobody answers for."""

    def __init__(self, error: type[Exception] = ToolConnectionError) -> None:
        super().__init__({"type": "native"}, SCHEMA)
        self._error = error

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise self._error("nobody listens")


SCHEMA = {
    "type": "function",
    "function": {"name": "gone", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}},
}


async def test_a_service_that_is_down_is_an_observation_unless_the_run_says_otherwise():
    trajectory = await play(ToolBox([Gone()]), "gone")
    assert not trajectory.is_failed and trajectory.turns[0].tool_results[0].error == "connection"
    trajectory = await play(ToolBox([Gone()], ToolOptions(unreachable="failure")), "gone")
    assert trajectory.error == "ToolUnavailableError: tool 'gone' cannot be reached: Error (connection): nobody listens"


async def test_an_open_breaker_is_a_failure_where_a_lost_connection_is_one():
    options = ToolOptions(unreachable="failure", breaker=BreakerSettings(failures=1, min_episodes=1, cooldown_s=60))
    box = ToolBox([Gone()], options)
    first, second = [await play(box, "gone") for _ in range(2)]
    assert "nobody listens" in str(first.error)
    assert second.error == "ToolUnavailableError: tool 'gone' cannot be reached; its breaker is open"


async def test_a_tool_of_ones_own_can_say_that_it_is_not_the_models_fault():
    assert polyturn.ToolUnavailableError is ToolUnavailableError
    trajectory = await play(ToolBox([Gone(ToolUnavailableError)]), "gone")
    assert (trajectory.error or "").startswith("ToolUnavailableError: tool 'gone': nobody listens")
    refused = await play(ToolBox([Gone(polyturn.ToolError)], ToolOptions(unreachable="failure")), "gone")
    assert not refused.is_failed, "a refusal is the model's to mend"


def test_a_machine_without_threads_is_said_and_nobody_is_counted(monkeypatch: pytest.MonkeyPatch):
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = WarmPool(
        lambda: Interpreter(SandboxLimits(), isolation=Isolation.NONE, python=bare_python()), size=0, keep_s=0.05
    )
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(SandboxStartError, match="no sandbox can be started: can't start new thread"):
            pool.open()
    pool.open()
    made = pool.take()
    assert made.is_alive
    made.close()
    pool.close()


async def test_an_endless_program_ends_as_its_own_failure_before_the_tools_deadline(caplog: pytest.LogCaptureFixture):
    tool = PythonSandbox({"warm": 0, "allow_unsafe": True, "timeout": 3600})
    box = ToolBox([tool], ToolOptions(timeout_s=8, breaker=BreakerSettings(failures=1, min_episodes=1, cooldown_s=60)))
    trajectory = await play(box, tool.name, "while True: pass")
    assert trajectory.turns[0].tool_results[0].error is None, "it is what the program did"
    assert trajectory.turns[0].tool_results[0].metrics["status"] == "timeout"
    assert box.breakers["python"].admit() is None
    assert (
        "its timeout of 3600 s is more than three quarters of the deadline of a call, 8 s: a program has 6 s" in caplog.text
    )
    tool._pool.let_go()


def test_code_in_a_sandbox_service_is_compiled_and_run_before_the_tools_deadline():
    tool = SandboxFusionTool({"sandbox_fusion_url": "http://127.0.0.1:1/run_code", "default_timeout": 60})
    ToolBox([tool], ToolOptions(timeout_s=60))
    assert tool.default_timeout == 30
