"""Begin a task at once, so that code which does not wait costs no turn of the event loop.

    begun(work)    work runs as far as it goes ──▶ it is done:    a future with its result
                                               └─▶ it waits:      the task that goes on with it

The task is the current one from the first line on, as time-outs and groups of tasks inside must find it. Python 3.12 has
this as `eager_start`; before it, the first part runs here and the task takes it over where it waits.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Generator
from contextvars import copy_context
from typing import Any


def begun(work: Coroutine[Any, Any, Any], *, name: str | None = None) -> asyncio.Future[Any]:
    """Return the task of `work`, which has run until it first waits, or a future where it is done by then.

    Args:
        work: A coroutine.
        name: The task's; None lets asyncio choose one.
    """
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=loop, name=name, eager_start=True)
    caller = asyncio.current_task()
    if caller is None:  # nothing of ours runs on the loop, so there is nobody to begin it for
        return loop.create_task(work, name=name)
    context, rest = copy_context(), _Rest(work)
    task: asyncio.Task[Any] = asyncio.Task(rest, loop=loop, name=name, context=context)
    done: asyncio.Future[Any] = loop.create_future()
    asyncio.tasks._leave_task(loop, caller)
    asyncio.tasks._enter_task(loop, task)
    try:
        rest.take(context.run(work.send, None))
        return task
    except StopIteration as end:
        if task.cancelling():  # by itself: a task that returns with a cancellation before it is cancelled
            done.cancel()
        else:
            done.set_result(end.value)
    except asyncio.CancelledError:
        done.cancel()
    except BaseException as problem:
        if isinstance(problem, KeyboardInterrupt):
            raise
        done.set_exception(problem)
    finally:
        asyncio.tasks._leave_task(loop, task)
        asyncio.tasks._enter_task(loop, caller)
    return done


class _Rest(Coroutine[Any, Any, Any]):
    """What is left of a coroutine that has begun to wait; over at once if nothing is."""

    __slots__ = ("__weakref__", "_waits_for", "_work")

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self._waits_for: list[Any] | None = None

    def take(self, waits_for: Any) -> None:
        """Begin with what it waits for; the task's first step is the next turn of the loop that None asks for."""
        self._waits_for = [] if waits_for is None else [waits_for]
        if asyncio.isfuture(waits_for):  # until then, others may await it too
            waits_for._asyncio_future_blocking = False

    def send(self, value: Any) -> Any:
        if self._waits_for is None:
            raise StopIteration
        return self._handed_over() if self._waits_for else self._work.send(value)

    def throw(self, *problem: Any) -> Any:
        if self._waits_for is None:
            raise problem[0]
        if self._waits_for:  # cancelled before its task waits: what it would wait for is cancelled, as a task does
            waits_for = self._waits_for[0]
            if asyncio.isfuture(waits_for) and waits_for.cancel(*problem[0].args):
                return self._handed_over()
            self._waits_for.clear()
        return self._work.throw(*problem)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise TypeError("only a task may wait for it")

    def __getattr__(self, name: str) -> Any:
        """Answer for the coroutine where somebody looks at it: its name, its frame, whether it runs."""
        return getattr(self._work, name)

    def _handed_over(self) -> Any:
        """Return what the task is to wait for, marked as awaited, as it looks for."""
        assert self._waits_for is not None
        waits_for = self._waits_for.pop()
        if asyncio.isfuture(waits_for):
            waits_for._asyncio_future_blocking = True
        return waits_for
