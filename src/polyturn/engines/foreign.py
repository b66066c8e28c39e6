"""ForeignEngine: a wrapper that checks exceptions, deadlines and completions of another package's engine.

generate raises ValueError("no")   EngineError: the engine Mine: generate raised ValueError: no (mine.py, line 27)
generate returns the logprob 0.7   EngineError: the engine Mine: generate returned the logprob 0.7; it must be at most 0
generate never returns             EngineError: the engine Mine: generate: it took longer than 600 s; raise …
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from polyturn.core.code_origin import defined_at
from polyturn.core.errors import EngineError, one_line, plugin_errors_as, raised_at
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.protocols import Engine, EngineCapabilities, EngineLoad
from polyturn.core.reward import brief
from polyturn.engines.base import EngineWrapper
from polyturn.engines.request_limits import MAX_LOGPROB
from polyturn.infra.deadline import CallWithDeadline, DeadlineError

logger = logging.getLogger(__name__)

CLOSE_S = 60.0
"""Deadline for closing an engine, in seconds."""


class ForeignEngine(EngineWrapper):
    """An engine of another package; `core.protocols.Engine`."""

    def __init__(self, engine: Engine, *, vocab_size: int, timeout_s: float) -> None:
        """Wrap `engine`. Token ids must be below `vocab_size`, and each call has a deadline of `timeout_s`."""
        super().__init__(engine)
        self._vocab_size = vocab_size
        self.bounded = CallWithDeadline(name="engine", timeout_s=timeout_s)
        self._is_load_readable = True

    @property
    def capabilities(self) -> EngineCapabilities:
        what = self._call("capabilities")
        with plugin_errors_as(what, EngineError):
            capabilities: object = self.engine.capabilities
        if not isinstance(capabilities, EngineCapabilities):
            raise EngineError(
                f"{what} returned {brief(capabilities)}; return an EngineCapabilities{defined_at(type(self.engine))}"
            )
        return capabilities

    @property
    def busy_s(self) -> float:
        with plugin_errors_as(self._call("busy_s"), EngineError):
            return float(self.engine.busy_s)

    @property
    def load(self) -> EngineLoad | None:
        """The engine's load; None, with a warning, once the engine does not report a valid one."""
        what = self._call("load")
        try:
            with plugin_errors_as(what, EngineError):
                load: object = super().load if self._is_load_readable else None
            if load is None or isinstance(load, EngineLoad):
                return load
            raise EngineError(f"{what} is {brief(load)}; it must be an EngineLoad or None")
        except EngineError as error:
            self._is_load_readable = False
            logger.warning("%s; it is not read any more", error)
            return None

    def read_metrics(self) -> Mapping[str, float]:
        with plugin_errors_as(self._call("read_metrics"), EngineError):
            return {str(name): float(value) for name, value in self.engine.read_metrics().items()}

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises:
            EngineError: the engine raised, took too long, or did not return a completion of this request.
            RolloutError: too many calls of the engine are still running past their deadline.
        """
        self.bounded.check_abandoned(f"the engine {type(self.engine).__name__}")
        completion = await self._ask("generate", request)
        if problem := self._problem(completion, request):
            raise EngineError(f"{self._call('generate')} returned {problem}{defined_at(self.engine.generate)}")
        return completion  # type: ignore[no-any-return]

    async def abort(self, request_id: str) -> None:
        await self._ask("abort", request_id)

    async def end_session(self, session_id: str) -> None:
        await self._ask("end_session", session_id)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        await self._ask("update_weights", version, weights=weights)

    async def close(self) -> None:
        """Close the engine; a failure is a warning, so that it does not hide the error that ended the run."""
        try:
            await self._ask("close", timeout_s=CLOSE_S)
        except EngineError as error:
            logger.warning("%s; its resources may not be freed", error)

    def _problem(self, completion: Any, request: GenerateRequest) -> str:
        """Return the problem with an answer to `request`; "" if it is valid."""
        if not isinstance(completion, Completion):
            return f"{brief(completion)}; it must be a Completion of polyturn.core.generation"
        ids, logprobs, most = completion.token_ids, completion.logprobs, request.sampling.max_tokens
        if len(ids) > most:
            return f"{len(ids)} tokens, more than the {most} that were requested"
        if len(outside := ids[(ids < 0) | (ids >= self._vocab_size)]):
            return f"token id {outside[0]}; the model's vocabulary ends at {self._vocab_size - 1}"
        if logprobs is None:
            return "no logprobs, which its capabilities promise" if self.capabilities.logprobs else ""
        if len(odd := logprobs[~(logprobs <= MAX_LOGPROB)]):  # written such that NaN counts as odd
            return f"the logprob {odd[0]:g}; it must be at most 0"
        return ""

    async def _ask(self, name: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        async def call() -> Any:
            return await getattr(self.engine, name)(*args, **kwargs)

        try:
            return await self.bounded.run(call, timeout_s=timeout_s)
        except EngineError:
            raise
        except DeadlineError as error:
            advice = (
                "; raise engine.timeout_s, or give the operation that it waits for a shorter time-out"
                if timeout_s is None
                else ""
            )
            raise EngineError(f"{self._call(name)}: {error}{advice}") from error
        except Exception as error:
            raise EngineError(f"{self._call(name)} raised {one_line(error)}{raised_at(error)}") from error

    def _call(self, name: str) -> str:
        return f"the engine {type(self.engine).__name__}: {name}"
