"""TimedEngine: a server without a model whose tokens take time on the loop's clock, and that dies, hangs and comes back.

TimedEngine(plan=lambda request: 700)     every completion has 700 tokens, 8 ms each, whatever else runs

Run on a virtual clock (`virtual_time.py`), a thousand tokens cost one timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyturn.core.errors import EngineError, EngineGoneError, EngineLostError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import EngineCapabilities


@dataclass(slots=True, eq=False, kw_only=True)
class _TimedRequest:
    request: GenerateRequest
    length: int
    future: asyncio.Future[Completion]
    began: float
    versions: list[tuple[int, int]]
    """(first token, policy version) of each run of tokens."""


class TimedEngine:
    """One server; `core.protocols.Engine`."""

    def __init__(
        self,
        *,
        plan: Callable[[GenerateRequest], int],
        token_s: float = 0.008,
        timeout_s: float = 600.0,
        name: str = "timed",
    ) -> None:
        """Begin with no requests.

        Args:
            plan: The number of tokens of a completion, its stop token included; `max_tokens` cuts it.
            token_s: Seconds of a token.
            timeout_s: Seconds after which a request to a server that hangs is lost.
            name: Shown in errors.
        """
        self.name = name
        self._plan, self._token_s, self._timeout_s = plan, token_s, timeout_s
        self._version = 0
        self._live: dict[str, _TimedRequest] = {}
        self._busy_since, self._busy_s = 0.0, 0.0
        self._is_dead = self._hangs = False
        self.served: list[str] = []
        """Session of each request, in the order of arrival."""

    capabilities = EngineCapabilities(seeded=True, logprobs=True)

    def read_metrics(self) -> Mapping[str, float]:
        return {}

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request ran."""
        return self._busy_s + (asyncio.get_running_loop().time() - self._busy_since if self._live else 0.0)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return a completion of the planned length once its tokens have taken their time."""
        self._check()
        if request.request_id in self._live:
            raise EngineError(f"request id {request.request_id!r} is in use")
        loop = asyncio.get_running_loop()
        run = _TimedRequest(
            request=request,
            length=max(1, min(self._plan(request), request.sampling.max_tokens)),
            future=loop.create_future(),
            began=loop.time(),
            versions=[(0, self._version)],
        )
        self.served.append(request.session_id)
        if not self._live:
            self._busy_since = run.began
        self._live[request.request_id] = run
        if self._hangs:
            self._fail_late(run)
        else:
            loop.call_later(run.length * self._token_s, self._end, run)
        try:
            return await run.future
        finally:
            self._busy_s = self.busy_s
            self._busy_since = loop.time()
            del self._live[request.request_id]

    async def abort(self, request_id: str) -> None:
        if (run := self._live.get(request_id)) is not None:
            self._finish(run, self._num_done(run), FinishReason.ABORT)

    async def end_session(self, session_id: str) -> None:
        pass

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Let further tokens carry `version`."""
        self._check()
        for run in self._live.values():
            run.versions.append((self._num_done(run), version))
        self._version = version

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        """Die: everything in flight and everything that follows is lost."""
        self._is_dead, self._hangs = True, False
        self._lose_all("was killed")

    def hang(self) -> None:
        """Accept everything from now on and answer nothing."""
        self._hangs = True
        for run in self._live.values():
            self._fail_late(run)

    def restart(self, *, version: int | None = None) -> None:
        """Come back empty, with the weights that it had, or with those of `version`."""
        self._is_dead = self._hangs = False
        self._lose_all("was restarted")
        self._version = self._version if version is None else version

    def _check(self) -> None:
        if self._is_dead:
            raise EngineLostError(f"{self.name} cannot be reached")

    def _num_done(self, run: _TimedRequest) -> int:
        seconds = asyncio.get_running_loop().time() - run.began
        return min(int(seconds / self._token_s + 1e-6), run.length)

    def _end(self, run: _TimedRequest) -> None:
        if not self._hangs:
            is_cut = self._plan(run.request) > run.length
            self._finish(run, run.length, FinishReason.LENGTH if is_cut else FinishReason.STOP)

    def _finish(self, run: _TimedRequest, length: int, reason: FinishReason) -> None:
        ids = np.zeros(length, np.int32)
        if reason is FinishReason.STOP and run.request.sampling.stop_token_ids:
            ids[-1] = run.request.sampling.stop_token_ids[0]
        starts = dict(run.versions)  # of two versions at one token the later one sampled it
        if not run.future.done():
            run.future.set_result(
                Completion(
                    token_ids=ids,
                    logprobs=np.full(length, -1.0, np.float32),
                    finish_reason=reason,
                    policy_versions=tuple(item for item in starts.items() if item[0] < max(1, length)),
                )
            )

    def _lose_all(self, why: str) -> None:
        for run in self._live.values():
            self._fail(run, f"{self.name} {why}")

    def _fail_late(self, run: _TimedRequest) -> None:
        why = f"{self.name} did not answer within {self._timeout_s:g} s"
        asyncio.get_running_loop().call_later(self._timeout_s, self._fail, run, why)

    def _fail(self, run: _TimedRequest, why: str) -> None:
        if not run.future.done():
            run.future.set_exception(EngineLostError(why))


class RestartableEngine(TimedEngine):
    """A server that can be asked how it is, and is started again after `dead_s`, so often and no more."""

    def __init__(self, *, dead_s: float = 10.0, max_restarts: int = 1, keeps_weights: bool = False) -> None:
        super().__init__(plan=lambda request: 100, name="server")
        self.dead_s, self.max_restarts, self.keeps_weights = dead_s, max_restarts, keeps_weights
        self.num_restarts = 0
        self.is_down = False
        self.pushed: list[int] = []

    async def start(self) -> None:
        self._check()

    async def look(self) -> None:
        self._check()

    def fail(self) -> None:
        self.kill()
        self.is_down = True

    async def revive(self) -> None:
        if not self.is_down:
            return
        if self.num_restarts == self.max_restarts:
            raise EngineGoneError("it was started again often enough")
        await asyncio.sleep(self.dead_s)
        self.num_restarts += 1
        self.is_down = False
        self.restart(version=None if self.keeps_weights else 0)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        await super().update_weights(version, weights=weights)
        self.pushed.append(version)
