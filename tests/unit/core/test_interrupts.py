"""Tells a KeyboardInterrupt of SIGINT, in whatever handler, from one that a plug-in raised."""

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
from polyturn.infra.loop import run_loop


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
@pytest.mark.parametrize("work", [interrupt, interrupted_again])
def test_signal_is_an_interrupt(work: Callable[[], Any], handler: Any) -> None:
    former = signal.signal(signal.SIGINT, handler)
    try:
        assert is_interrupt(raised_by(work))
    finally:
        signal.signal(signal.SIGINT, former)


def test_second_signal_under_asyncio_is_an_interrupt() -> None:
    async def work() -> None:
        interrupt()
        interrupt()

    assert is_interrupt(raised_by(lambda: asyncio.run(work())))


def test_raise_statement_is_no_interrupt() -> None:
    def leave() -> None:
        raise KeyboardInterrupt("enough")

    assert not is_interrupt(raised_by(leave))
    assert not is_interrupt(raised_by(lambda: float(Leaves())))
    assert as_score(Leaves()) is None


def test_signal_passes_while_a_plug_in_is_read() -> None:
    class Slow:
        def __float__(self) -> float:
            interrupt()
            return 0.0

    assert is_interrupt(raised_by(lambda: as_score(Slow())))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("by", ["task", "callback"])
def test_plug_in_task_that_raises_it_ends_the_run_by_name(error: type[BaseException], by: str) -> None:
    def leave() -> None:
        raise error("enough")

    async def task() -> None:
        leave()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(leave) if by == "callback" else loop.create_task(task())
        await asyncio.sleep(60)

    with pytest.raises(RolloutError, match=rf"{error.__name__}: enough \(test_interrupts\.py"):
        run_loop(work())
