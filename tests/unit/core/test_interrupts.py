"""Ctrl-C passes through the code that reads results of plug-ins; a plug-in that exits ends the run by name."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from polyturn.core.errors import ConfigError, RolloutError, one_line, plugin_errors_as
from polyturn.core.reward import as_flag, as_score, brief
from polyturn.infra.loop import run_loop
from support.refusals import refuses


def interrupt(self: Any) -> Any:
    os.kill(os.getpid(), signal.SIGINT)


Slow = type("Slow", (Exception,), {f"__{name}__": interrupt for name in ("float", "bool", "repr", "str")})


def load(value: Any) -> None:
    with plugin_errors_as("the plug-in", ConfigError):
        interrupt(value)


@pytest.mark.parametrize("read", [as_score, as_flag, brief, one_line, load])
def test_signal_passes_while_a_plug_in_is_read(read: Callable[[Any], Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        read(Slow())


@pytest.mark.parametrize("by", ["task", "callback"])
def test_plug_in_task_that_exits_ends_the_run_by_name(by: str) -> None:
    def leave() -> None:
        raise SystemExit("enough")

    async def task() -> None:
        leave()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(leave) if by == "callback" else loop.create_task(task())
        await asyncio.sleep(60)

    refuses(lambda: run_loop(work()), RolloutError, "SystemExit: enough (test_interrupts.py")
