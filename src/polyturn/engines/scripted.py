"""ScriptedEngine: returns prepared answers, for tests and for measuring the loop around an engine.

It needs no model and no torch. It never copies or reads the prompt, so a turn costs the same with a history of 32k tokens as
with 1k, and only the loop's cost remains.

    ScriptedEngine([[9, 2], [5, 2]])                    request 0 -> [9, 2], request 1 -> [5, 2]
    ScriptedEngine({"ep-1": [[9, 2], [5, 2]]})          the same, in the order of one session's requests
    ScriptedEngine(lambda request: tokenizer_ids)       the function's result; a Completion is returned unchanged
    ScriptedEngine([[9, 2], OSError("lost")])           an exception is raised as EngineError
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from polyturn.core.arrays import ids_array
from polyturn.core.errors import EngineError, one_line
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import EngineCapabilities
from polyturn.engines.base import BaseEngine

Answer = Completion | ArrayLike | Exception
"""The answer to one request: ids, a whole completion, or an exception to fail with."""
Script = Callable[[GenerateRequest], Answer] | Sequence[Answer] | Mapping[str, Sequence[Answer]]


class ScriptedEngine(BaseEngine):
    """Answers from a script, with a constant logprob per token."""

    def __init__(self, script: Script, *, logprob: float = -1.0, latency_s: float = 0.0, version: int = 0) -> None:
        """Answer from `script`.

        Args:
            script: A function of the request; a list of answers in the order of requests; or a mapping from session id
                to that session's answers.
            logprob: The log-probability reported for every token.
            latency_s: Seconds per request; 0 answers without yielding to the event loop.
            version: The policy version of completions until `update_weights`.
        """
        super().__init__()
        self._function: Callable[[GenerateRequest], Answer] | None = None
        self._common: Iterator[Answer] | None = None
        self._by_session: dict[str, Iterator[Answer]] = {}
        if callable(script):
            self._function = script
        elif isinstance(script, Mapping):
            self._by_session = {session: iter(answers) for session, answers in script.items()}
        else:
            self._common = iter(script)
        self._logprob = logprob
        self.latency_s = latency_s
        """Seconds of each later request."""
        self._version = version
        self._sleeping: dict[str, asyncio.Event] = {}
        self._is_closed = False
        self.num_requests = 0
        """Number of requests so far."""
        self.ended_sessions: list[str] = []
        """The ended sessions, in order."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Seeded and with logprobs, so that a training loop accepts it."""
        return EngineCapabilities(seeded=True, logprobs=True)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the scripted answer, cut to `max_tokens` and after the first stop token.

        Raises:
            EngineError: the script has an exception here or raises, has no answer left, or the engine is closed.
        """
        if self._is_closed:
            raise EngineError(f"request {request.request_id!r} came after the scripted engine was closed")
        self.num_requests += 1
        if self.latency_s and await self._sleep(request.request_id):
            return self._completion(np.empty(0, np.int32), FinishReason.ABORT)
        try:
            answer = self._answer(request)
        except Exception as problem:
            raise _engine_error(request, problem) from problem
        if isinstance(answer, Exception):
            raise _engine_error(request, answer) from answer
        if isinstance(answer, Completion):
            return answer
        return self._cut(ids_array(answer), request)

    async def abort(self, request_id: str) -> None:
        """End a request during its latency; it returns no tokens."""
        if request_id in self._sleeping:
            self._sleeping[request_id].set()

    async def end_session(self, session_id: str) -> None:
        """Record that the session ended."""
        self.ended_sessions.append(session_id)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Tag completions with `version` from now on."""
        self._version = version

    async def close(self) -> None:
        """Raise for all further requests."""
        self._is_closed = True

    def _answer(self, request: GenerateRequest) -> Answer:
        if self._function is not None:
            return self._function(request)
        answers = self._common if self._common is not None else self._by_session.get(request.session_id)
        if answers is None:
            raise EngineError(f"the script has no session {request.session_id!r}; there are {sorted(self._by_session)}")
        try:
            return next(answers)
        except StopIteration:
            raise EngineError(
                f"the script has no answer left for request {self.num_requests} (session {request.session_id!r}); add one"
            ) from None

    async def _sleep(self, request_id: str) -> bool:
        """Wait for the latency; return whether the request was aborted before its end."""
        event = self._sleeping[request_id] = asyncio.Event()
        try:
            async with asyncio.timeout(self.latency_s):
                await event.wait()
            return True
        except TimeoutError:
            return False
        finally:
            del self._sleeping[request_id]

    def _cut(self, ids: np.ndarray[Any, np.dtype[np.int32]], request: GenerateRequest) -> Completion:
        sampling = request.sampling
        reason = FinishReason.STOP
        if sampling.stop_token_ids:
            hits = [i for i, token in enumerate(ids.tolist()) if token in sampling.stop_token_ids]
            if hits:
                ids = ids[: hits[0] + 1]
            else:
                reason = FinishReason.LENGTH
        if len(ids) > sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], FinishReason.LENGTH
        return self._completion(ids, reason)

    def _completion(self, ids: np.ndarray[Any, np.dtype[np.int32]], reason: FinishReason) -> Completion:
        logprobs = np.full(len(ids), self._logprob, np.float32)
        logprobs.flags.writeable = False
        versions = ((0, self._version),)
        return Completion(token_ids=ids, logprobs=logprobs, finish_reason=reason, policy_versions=versions)


def _engine_error(request: GenerateRequest, problem: Exception) -> EngineError:
    if isinstance(problem, EngineError):
        return problem
    return EngineError(f"request {request.request_id!r} of session {request.session_id!r} failed: {one_line(problem)}")
