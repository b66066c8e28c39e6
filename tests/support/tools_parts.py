"""Fake tools for the tests of tools, and what a test of servers must not leave behind.

tool = Obeys("rec")
call("rec", do="raise")        the tool raises a ValueError
call("rec", do="hang")         the tool never answers
call("rec", say="hello")       the tool answers "hello"
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyturn.core.errors import ToolError
from polyturn.core.messages import Message, ToolCall
from polyturn.core.task import Task, ToolKwargs
from polyturn.tools.base import BaseTool

TASK = Task(id="t", prompt=(Message(role="user", content="?"),))


def schema(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a tool schema; it takes any arguments unless `parameters` says otherwise."""
    shape = {"additionalProperties": True} if parameters is None else parameters
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": shape}}


def call(name: str, _id: str = "c0", **arguments: Any) -> ToolCall:
    """Return a model's call of a tool."""
    return ToolCall(id=_id, name=name, arguments=arguments)


def task_with(*, tools: tuple[str, ...] | None = None, **kwargs: dict[str, Any]) -> Task:
    """Return a task that selects tools and gives each its kwargs."""
    return Task(
        id="t", prompt=TASK.prompt, tools=tools, tools_kwargs={name: ToolKwargs(**given) for name, given in kwargs.items()}
    )


class Obeys(BaseTool):
    """Does what `do` says, in a call's arguments or in the kwargs of its row, and counts each step of its life."""

    def __init__(self, name: str = "rec", config: dict[str, Any] | None = None) -> None:
        super().__init__(config or {}, schema(name))
        self.begun: Counter[str] = Counter()
        self.created: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.kwargs: list[tuple[str, dict[str, Any]]] = []
        self.num_asked = self.num_running = self.most_running = 0

    async def create(self, instance_id: str | None = None, do: str = "ok", **kwargs: Any) -> Any:
        self.kwargs.append(("create", kwargs))
        self.begun[str(instance_id)] += 1
        await _act(do)
        self.created[str(instance_id)] += 1
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.kwargs.append(("execute", kwargs))
        self.num_asked += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(parameters.get("wait_s", 0))
            await _act(parameters.get("do", "ok"))
        finally:
            self.num_running -= 1
        if (problem := parameters.get("error")) is not None:
            raise problem
        return parameters.get("say", "done"), parameters.get("reward"), {"hits": 2, "note": "x", "errors": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        self.kwargs.append(("calc_reward", kwargs))
        return kwargs.get("value", 0.5)

    async def release(self, instance_id: str, do: str = "ok", **kwargs: Any) -> None:
        self.released[instance_id] += 1
        await _act(do)


class PlainObeys(Obeys):
    """The same with plain functions, which run in threads; a call that hangs does so until `gate` is set."""

    def __init__(self, name: str = "rec") -> None:
        super().__init__(name)
        self.gate = threading.Event()

    def create(self, instance_id: str | None = None, do: str = "ok", **kwargs: Any) -> Any:  # type: ignore[override]
        self.begun[str(instance_id)] += 1
        self._act(do)
        self.created[str(instance_id)] += 1
        return instance_id

    def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
        self._act(parameters.get("do", "ok"))
        return parameters.get("say", "done")

    def calc_reward(self, instance_id: str, **kwargs: Any) -> None:  # type: ignore[override]
        return None

    def release(self, instance_id: str, do: str = "ok", **kwargs: Any) -> None:  # type: ignore[override]
        self.released[instance_id] += 1
        self._act(do)

    def _act(self, what: str) -> None:
        if what == "hang":
            self.gate.wait()
        _raise(what)


class Answers(BaseTool):
    """Answers every call with one value."""

    def __init__(self, answer: Any, name: str = "tool") -> None:
        super().__init__({}, schema(name))
        self._answer = answer

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return self._answer


async def _act(what: str) -> None:
    if what == "hang":
        await asyncio.Event().wait()
    if what == "stubborn":
        for _ in range(2):
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
    if what == "cancel":
        raise asyncio.CancelledError
    _raise(what)


def _raise(what: str) -> None:
    if what == "raise":
        raise ValueError("broken\ninside")
    if what == "exit":
        raise SystemExit(3)
    if what == "close":
        raise GeneratorExit("closed")
    if what == "refuse":
        raise ToolError("use another key")


async def until(is_so: Callable[[], bool]) -> bool:
    """Wait until something is so, for as long as the test may take."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return True


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Held:
    """The sockets, pipes and children of this process, and the tasks of this event loop, that a test has added to them."""

    def __init__(self) -> None:
        self._before = self._now()

    @property
    def is_released(self) -> bool:
        """Whether nothing is left of what was added; others may have closed something of their own meanwhile."""
        return self._now() <= self._before

    @staticmethod
    def _now() -> set[object]:
        held: set[object] = set(asyncio.all_tasks())
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                held.add(os.readlink(link))
        for children in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):
                held.update(children.read_text().split())
        return {one for one in held if not isinstance(one, str) or one.startswith(("socket:", "pipe:")) or one.isdigit()}
