"""AuthorCalls: calls the methods of a scheduler, which its author may write as coroutines or as plain functions.

A coroutine runs on the event loop in a separate task, so that a call that ignores its cancellation can be abandoned. Its
deadline covers each stretch of its own work and excludes the time that it awaits `episode`. A plain function runs in a
daemon thread with a deadline, so `time.sleep`, a request or a simulator in a `step` does not block other episodes; it
reaches the event loop through `LoopBridge`. If all episodes share one scheduler object, only one thread calls it at a
time. The library's own methods have deadlines inside and are called directly.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from polyturn.core.errors import PLUGIN_RAISES, LifecycleError, PolyturnError, SchedulerError, one_line
from polyturn.infra.aio import PerLoop
from polyturn.infra.deadline import CallWithDeadline, DeadlineError, Stretch

MAX_THREADS = 1024
"""Maximum number of threads for plain methods; further calls wait. A plain `run` occupies a thread for its whole episode."""
GRACE_S = 3.0
"""Seconds that a cancelled async method may take to clean up."""


class AuthorCalls:
    """Calls scheduler methods for all episodes of a run."""

    def __init__(self, *, timeout_s: float) -> None:
        """Prepare the threads.

        Args:
            timeout_s: Deadline of every method: a plain method for the whole call, except `run`, which the episode's time
                limit ends; an async method for each stretch of its own work.
        """
        self.timeout_s = timeout_s
        self.bounded = CallWithDeadline(name="scheduler", timeout_s=timeout_s, grace_s=GRACE_S, max_threads=MAX_THREADS)
        self._turn_taking = PerLoop(asyncio.Lock)

    def guarded(self, method: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return `method` itself if it is the library's, else an async function that runs it through `call` with `options`.

        The library's own code never waits without a deadline, so it is called directly.
        """
        return method if has_own_deadlines(method) else functools.partial(self.call, method, **options)

    async def call(
        self,
        method: Callable[..., Any],
        *args: Any,
        is_shared: bool = False,
        is_driver: bool = False,
        has_deadline: bool = True,
        of: str = "the scheduler's",
        **kwargs: Any,
    ) -> Any:
        """Call `method` and return its result, awaited.

        Args:
            method: A scheduler's method, plain or async.
            args: Its arguments.
            is_shared: Whether all episodes share its object, so that plain methods take turns.
            is_driver: Whether it drives the whole episode; only the episode's time limit then ends a plain method.
            has_deadline: False for the function of an agent, which may run for as long as the episode.
            of: The owner of the method, for messages.
            kwargs: Its keyword arguments.

        Raises:
            SchedulerError: it missed its deadline or raised an error that is not a `PolyturnError`.
            RolloutError: too many calls are still running past their deadline.
        """
        name = f"{of} {method.__name__}"
        if kwargs:
            method = functools.update_wrapper(functools.partial(method, **kwargs), method)
        with AsSchedulerError(name):
            if has_own_deadlines(method) or (inspect.iscoroutinefunction(method) and not has_deadline):
                answer = method(*args)
                return await answer if inspect.isawaitable(answer) else answer
            with Stretch.paused():
                if inspect.iscoroutinefunction(method):
                    return await self._within(name, functools.partial(method, *args), stretch=Stretch())

                def plain() -> tuple[Any]:
                    return (method(*args),)  # in a tuple, so that `bounded` does not await a returned awaitable

                async with self._turn_taking() if is_shared else contextlib.nullcontext():
                    is_bounded = has_deadline and not is_driver
                    (answer,) = await (self._within(name, plain) if is_bounded else self.bounded.call(plain))
                if inspect.isawaitable(answer) and has_deadline:
                    return await self._within(name, functools.partial(_result, answer), stretch=Stretch())
                return await answer if inspect.isawaitable(answer) else answer

    async def _within(self, name: str, work: Callable[[], Any], *, stretch: Stretch | None = None) -> Any:
        self.bounded.check_abandoned(name)
        try:
            return await self.bounded.run(work, stretch=stretch)
        except DeadlineError as problem:
            self.bounded.check_abandoned(name)
            raise SchedulerError(
                f"{name} took longer than {self.timeout_s:g} s; raise rollout.scheduler_timeout_s or make it quicker"
            ) from problem


class AsSchedulerError:
    """Convert errors of an author's code to a `SchedulerError` that names the method, so that only the trajectory fails."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, problem: BaseException | None, where: object) -> None:
        if isinstance(problem, PLUGIN_RAISES) and not isinstance(problem, PolyturnError):
            raise SchedulerError(f"{self._name} raised {one_line(problem)}") from problem


_Ours = TypeVar("_Ours", bound=Callable[..., Any])
_Result = TypeVar("_Result")
_MARK = "_polyturn_keeps_deadlines"


def keeps_deadlines(ours: _Ours, *, also_plain: bool = False) -> _Ours:
    """Mark async code of the library, which never waits without a deadline, so that it is called directly.

    For a class, this marks only the methods that the class itself defines. Methods of a subclass count as foreign code until
    the subclass is marked too.

    Args:
        ours: A class or a function.
        also_plain: Whether its plain methods never block either, so that they do not need a thread.
    """
    for method in vars(ours).values() if isinstance(ours, type) else (ours,):
        if inspect.iscoroutinefunction(method) or (also_plain and inspect.isfunction(method)):
            setattr(method, _MARK, True)
    return ours


def has_own_deadlines(method: Callable[..., Any]) -> bool:
    """Return whether `keeps_deadlines` marks the method."""
    return getattr(method, _MARK, False)


async def _result(answer: Awaitable[Any]) -> Any:
    return await answer


class LoopBridge:
    """Runs coroutines on an episode's event loop for its threads; forks share one bridge.

        thread       turn = episode.wait(episode.generate())  --->  waits
        event loop                                            await episode.generate()

    No thread keeps waiting after its episode ends: pending calls are cancelled, and later calls are refused.
    """

    __slots__ = ("_loop", "_waiting", "is_closed")

    def __init__(self) -> None:
        """Start without an event loop; `enter` binds one."""
        self.is_closed = False
        """Whether the episode has ended; calls are then refused."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        """Futures on which threads are waiting."""

    def enter(self) -> None:
        """Bind to the running event loop."""
        self._loop = asyncio.get_running_loop()

    def wait(self, awaitable: Awaitable[_Result], *, of: str) -> _Result:
        """Await on the event loop, and return the result to the calling thread.

        Args:
            awaitable: The object to await. If the call is refused, a coroutine is closed, so that Python does not warn.
            of: The episode's id, for messages.

        Raises:
            SchedulerError: the caller runs on the event loop, which would then wait for itself.
            LifecycleError: the episode has ended.
        """
        if self._loop is None or _is_on_a_loop():
            _discard(awaitable)
            raise SchedulerError("`wait` is for plain methods, which run in a thread; in an async method, use await")

        def refuse_late() -> None:
            if self.is_closed:
                _discard(awaitable)
                raise LifecycleError(f"episode {of!r} has ended; a call that ran past its deadline still uses it")

        async def run() -> _Result:
            refuse_late()
            return await awaitable

        refuse_late()  # and again on the loop: the episode may end before the loop runs the call
        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        self._waiting.add(future)
        if self.is_closed:  # the episode ended before `close` could see this future
            future.cancel()
        try:
            return future.result()
        finally:
            self._waiting.discard(future)

    def close(self) -> None:
        """Release every waiting thread, because the episode has ended."""
        self.is_closed = True
        for future in list(self._waiting):
            future.cancel()


def _is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _discard(awaitable: Awaitable[Any]) -> None:
    """Close a coroutine that will never be awaited."""
    if asyncio.iscoroutine(awaitable):
        awaitable.close()
