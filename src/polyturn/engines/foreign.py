"""ForeignEngine: an engine that somebody else wrote, held to what an engine is; the library's own are asked directly.

    generate raises SystemExit(3), or a CancelledError of its own
        ->  EngineError: the engine Mine: generate (mine.py, line 20) raised SystemExit: 3 (mine.py, line 27)
    generate returns None, another number of tokens than of logprobs, the logprob 0.7
        ->  EngineError: the engine Mine: generate (mine.py, line 20) returned None; it must be a Completion of …
    generate never returns, whether or not it lets itself be cancelled
        ->  EngineError: the engine Mine: generate (mine.py, line 20): it took longer than 600 s; raise engine.timeout_s, …

It stands where the engine is loaded, so that whoever asks it later meets the errors of an engine and no others: of a request
they fail the trajectory, of new weights they end the run. What is checked costs a few passes over the ids of a completion.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any

from polyturn.core.errors import ConfigError, EngineError, PolyturnError, one_line, raised_at
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.interrupts import is_interrupt
from polyturn.core.protocols import Engine, EngineCapabilities
from polyturn.core.reward import shown
from polyturn.engines.base import EngineWrapper
from polyturn.infra.deadline import CallWithDeadline, DeadlineError

logger = logging.getLogger(__name__)

MAX_LOGPROB = 1e-3
"""A log-probability is at most 0; so much above it may be what rounding did."""
CLOSE_S = 60.0
"""Seconds that an engine may take to let go of what it holds."""


class ForeignEngine(EngineWrapper):
    """An engine of which every exception is an `EngineError`, every answer is looked at and every call has a deadline;
    `core.protocols.Engine`."""

    def __init__(self, engine: Engine, *, vocab_size: int, timeout_s: float) -> None:
        """Stand in front of an engine.

        Args:
            engine: The engine.
            vocab_size: The ids that the model knows are those below it.
            timeout_s: The deadline of each call of it.
        """
        super().__init__(engine)
        self._vocab_size = vocab_size
        self.bounded = CallWithDeadline(name="engine", timeout_s=timeout_s)

    @property
    def capabilities(self) -> EngineCapabilities:
        """Capabilities that the engine claims."""
        found = self._read("capabilities")
        if not isinstance(found, EngineCapabilities):
            raise self._refused("capabilities", found, "an EngineCapabilities of polyturn.core.protocols")
        return found

    @property
    def busy_s(self) -> float:
        """Seconds that the engine says it spent generating so far."""
        found = self._read("busy_s")
        if not (isinstance(found, Real) and math.isfinite(found)):
            raise self._refused("busy_s", found, "a number of seconds")
        return float(found)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Let the engine sample one completion.

        Raises:
            EngineError: it raised, took too long, or returned what is no completion of this request.
            RolloutError: too many calls of it run on past their deadline.
        """
        self.bounded.check_abandoned(f"the engine {type(self.engine).__name__}")
        found = await self._ask("generate", request)
        if not isinstance(found, Completion):
            raise self._refused("generate", found, "a Completion of polyturn.core.generation")
        if problem := self._problem(found, request):
            raise EngineError(f"{self._named('generate')} returned a completion that is none: {problem}")
        return found

    async def abort(self, request_id: str) -> None:
        """Let the engine end a request."""
        await self._ask("abort", request_id)

    async def end_session(self, session_id: str) -> None:
        """Let the engine forget an episode."""
        await self._ask("end_session", session_id)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Let the engine serve `version`."""
        await self._ask("update_weights", version, weights=weights)

    def read_metrics(self) -> Mapping[str, float]:
        """Return the engine's metrics."""
        with self._contained("read_metrics"):
            found: object = self.engine.read_metrics()
            if isinstance(found, Mapping) and all(isinstance(value, Real) for value in found.values()):
                return {str(name): float(value) for name, value in found.items()}
        raise self._refused("read_metrics", found, "a mapping of names to numbers")

    async def close(self) -> None:
        """Close the engine; where it cannot, that is a warning, so that what ended the run before stays what is told."""
        try:
            await self._ask("close", timeout_s=CLOSE_S)
        except EngineError as problem:
            logger.warning("%s; what it held may be left behind", problem)

    def _problem(self, completion: Completion, request: GenerateRequest) -> str:
        """Return what is wrong with an answer to `request`; "" where nothing is."""
        ids, logprobs, most = completion.token_ids, completion.logprobs, request.sampling.max_tokens
        if len(ids) > most:
            return f"it has {len(ids)} tokens, and at most {most} were asked for"
        if len(outside := ids[(ids < 0) | (ids >= self._vocab_size)]):
            return f"token id {outside[0]} is outside the model's vocabulary, which ends at {self._vocab_size - 1}"
        if logprobs is None:
            return "it has no logprobs, and its capabilities promise them" if self.capabilities.logprobs else ""
        if len(odd := logprobs[~(logprobs <= MAX_LOGPROB)]):  # NaN is neither above nor below
            return f"it has the logprob {odd[0]:g}; the logarithm of a probability is a number of at most 0"
        return ""

    def _read(self, name: str) -> object:
        with self._contained(name):
            return getattr(self.engine, name)

    async def _ask(self, name: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the engine, with the usual deadline or one of `timeout_s`."""
        with self._contained(name, asyncio.current_task()):  # it may cancel the task that it is called in
            try:
                return await self.bounded.run(partial(self._call, name, *args, **kwargs), timeout_s=timeout_s)
            except DeadlineError as problem:
                more = (
                    "; raise engine.timeout_s, or give what it waits for a time-out of its own" if timeout_s is None else ""
                )
                raise EngineError(f"{self._named(name)}: {problem}{more}") from problem

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self._contained(name, asyncio.current_task()):
            answer: Awaitable[Any] = getattr(self.engine, name)(*args, **kwargs)
            return await answer

    @contextmanager
    def _contained(self, name: str, task: asyncio.Task[Any] | None = None) -> Iterator[None]:
        try:
            yield
        except EngineError:
            raise
        except BaseException as problem:
            if _is_from_outside(problem, task):
                raise
            raise EngineError(f"{self._named(name)} raised {one_line(problem)}{raised_at(problem)}") from problem

    def _refused(self, name: str, found: object, needs: str) -> EngineError:
        return EngineError(f"{self._named(name)} returned {shown(found)}; it must be {needs}")

    def _named(self, name: str) -> str:
        kind = type(self.engine)
        return f"the engine {kind.__name__}: {name}{_place(inspect.getattr_static(kind, name, None))}"


@contextmanager
def making(kind: str, build: Callable[..., Any]) -> Iterator[None]:
    """Raise what goes wrong inside, where `build` makes the engine that `engine.kind` names, as a `ConfigError`."""
    try:
        yield
    except PolyturnError:
        raise
    except BaseException as problem:
        if _is_from_outside(problem, None):
            raise
        place = raised_at(problem) or _place(inspect.getattr_static(build, "__init__") if isinstance(build, type) else build)
        raise ConfigError(f"engine.kind: {kind!r} cannot be made, it raised {one_line(problem)}{place}") from problem


def _is_from_outside(problem: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Return whether it is no doing of the engine that `task` asks: a person's interrupt, or the end of the task."""
    if task is not None and isinstance(problem, asyncio.CancelledError):
        return task.cancelling() > 0
    if task is not None and isinstance(problem, GeneratorExit):  # thrown by whoever drops the task's coroutine
        return asyncio.current_task(task.get_loop()) is not task
    return is_interrupt(problem)


def _place(method: Any) -> str:
    """Return where a method or property is written: " (mine.py, line 20)"; "" where no file says it."""
    written: Any = method.fget if isinstance(method, property) else method
    function = inspect.unwrap(written)
    if not inspect.isfunction(function):
        return ""
    return f" ({os.path.basename(function.__code__.co_filename)}, line {function.__code__.co_firstlineno})"
