"""Whose a KeyboardInterrupt is: SIGINT's, in whatever handler, or a plug-in's."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from polyturn.core.errors import RolloutError
from polyturn.core.interrupts import is_interrupt
from polyturn.core.reward import as_score
from polyturn.core.run_loop import run_loop


def raised_by(work: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        work()
    return caught.value


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def own_handler(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def interrupted_again() -> None:
    try:
        interrupt()
    except KeyboardInterrupt:
        raise


class Leaves:
    def __float__(self) -> float:
        raise KeyboardInterrupt


@pytest.mark.parametrize("handler", [signal.default_int_handler, own_handler, functools.partial(own_handler)])
@pytest.mark.parametrize("work", [interrupt, interrupted_again, lambda: signal.raise_signal(signal.SIGINT)])
def test_a_signal_is_a_person(work: Callable[[], Any], handler: Any) -> None:
    former = signal.signal(signal.SIGINT, handler)
    try:
        assert is_interrupt(raised_by(work))
    finally:
        signal.signal(signal.SIGINT, former)


def test_the_second_signal_is_a_person_under_asyncio_too() -> None:
    async def work() -> None:
        interrupt()
        interrupt()

    assert is_interrupt(raised_by(lambda: asyncio.run(work())))


def test_a_statement_is_a_plugin() -> None:
    def leave() -> None:
        raise KeyboardInterrupt("enough")

    assert not is_interrupt(raised_by(leave))
    assert not is_interrupt(raised_by(lambda: float(Leaves())))
    assert as_score(Leaves()) is None


def test_a_signal_passes_while_a_plugin_is_read() -> None:
    class Slow:
        def __float__(self) -> float:
            interrupt()
            return 0.0

    assert is_interrupt(raised_by(lambda: as_score(Slow())))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("by", ["task", "callback"])
def test_a_task_or_callback_that_a_plugin_started_ends_the_run_by_name(error: type[BaseException], by: str) -> None:
    def leave() -> None:
        raise error("enough")

    async def task() -> None:
        leave()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(leave) if by == "callback" else loop.create_task(task())
        await asyncio.sleep(5)

    with pytest.raises(
        RolloutError, match=rf"raised {error.__name__}: enough \(test_interrupts.py, line \d+\) in the event loop"
    ):
        run_loop(work())
