"""SimulatedEngine: an inference server without a model, on the loop's clock (see `virtual_time.py`).

What it keeps of a real one: a decode step at b sequences takes tau(b) = a + c*b; prompts are computed first, at a cost per
token that is not in the prefix cache; sequences join and leave at step boundaries (continuous batching) within a number of
slots and of tokens of KV; a finished session's KV stays until room is needed, the least recently used first; where running
sequences outgrow the room, the latest is put back into the queue and computed again. Nothing is random.

    Speed(step_s=0.008, per_sequence_s=0.00012)          tau(32) = 11.84 ms
    SimulatedEngine(Speed(…), plan=lambda request: 700)   every completion has 700 tokens

Between two events the batch does not change, so a thousand steps cost as much as one.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyturn.core.errors import ConfigError, EngineError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import EngineCapabilities
from polyturn.engines.remote import EngineLostError


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The terms of a server's time; the defaults are those of a mid-sized model on one GPU."""

    step_s: float = 0.008
    """a of tau(b) = a + c*b."""
    per_sequence_s: float = 0.00012
    """c of tau(b) = a + c*b."""
    table: tuple[tuple[int, float], ...] = ()
    """Measured (b, tau(b)), rising in b; replaces a and c, with straight lines between and beyond the entries."""
    context_token_s: float = 0.0
    """Seconds that each token of KV of the running sequences adds to a step: attention reads it."""
    prefill_token_s: float = 0.00002
    request_s: float = 0.0
    """Seconds of a request beside its tokens, such as reading it and sending the answer."""
    prefix_cache: bool = True
    """Whether a session's next turn computes only what is new."""
    cache_block: int = 1
    """Prefixes are kept in blocks of so many tokens; what does not fill one is computed again."""
    slots: int = 32
    kv_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        times = (self.step_s, self.prefill_token_s, self.per_sequence_s, self.context_token_s, self.request_s)
        if min(self.slots, self.kv_tokens, self.cache_block) < 1 or min(times) < 0:
            raise ConfigError(f"{self} cannot be: slots, kv_tokens and cache_block are at least 1, and times at least 0")
        if [b for b, _ in self.table] != sorted({b for b, _ in self.table}):
            raise ConfigError(f"the table's batch sizes must rise, not {[b for b, _ in self.table]}")

    def tau(self, batch: int) -> float:
        """Return the seconds of one decode step of `batch` sequences."""
        if not self.table:
            return self.step_s + self.per_sequence_s * batch
        if len(self.table) == 1:
            return self.table[0][1]
        at = min(max(bisect.bisect_left(self.table, (batch, 0.0)), 1), len(self.table) - 1)
        (b0, t0), (b1, t1) = self.table[at - 1], self.table[at]
        return max(t0 + (t1 - t0) * (batch - b0) / (b1 - b0), 1e-9)

    def best_token_s(self, max_batch: int) -> float:
        """Return min over b of tau(b) / b: the least time that one token can cost."""
        return min(self.tau(b) / b for b in range(1, max(min(max_batch, self.slots), 1) + 1))


@dataclass(slots=True, eq=False)
class _SimulatedRequest:
    """A request in the engine."""

    request: GenerateRequest
    length: int
    """Number of tokens it will have."""
    future: asyncio.Future[Completion]
    order: int
    versions: list[tuple[int, int]]
    """(first token, policy version) of each run of tokens."""
    done: int = 0
    """Tokens that it had when it was last put back."""
    joined: int = 0
    """Step number at which it joined the batch."""
    prefilled: int = 0
    is_running: bool = False
    is_over: bool = False

    @property
    def rank(self) -> tuple[float, int]:
        return -self.request.priority, self.order


class SimulatedEngine:
    """One simulated server; `core.protocols.Engine`."""

    def __init__(
        self,
        speed: Speed | None = None,
        *,
        plan: Callable[[GenerateRequest], int],
        token_id: int = 0,
        says_stop: bool = True,
        name: str = "simulated",
    ) -> None:
        """Take what it costs and what it says.

        Args:
            speed: The server.
            plan: How many tokens a completion has, its stop token included; `max_tokens` cuts it.
            token_id: What it says, again and again.
            says_stop: Whether the first stop token of the request is the last of a completion that ends as planned.
            name: Shown in errors.
        """
        self.name = name
        self.speed = speed or Speed()
        self._plan = plan
        self._token_id, self._says_stop = token_id, says_stop
        self._version = 0
        self._queue: list[tuple[tuple[float, int], _SimulatedRequest]] = []
        self._batch: dict[str, _SimulatedRequest] = {}
        self._ends: list[tuple[int, int, _SimulatedRequest]] = []
        """(step number at which it is done, order, run)."""
        self._live: dict[str, _SimulatedRequest] = {}
        self._cache: OrderedDict[str, int] = OrderedDict()
        """Session -> tokens of KV that it left here, the least recently used first."""
        self._cached = 0
        self._kv = 0
        """Tokens of KV of the running sequences at step `_step`."""
        self._step = 0
        self._at = 0.0
        """When step `_step` ended, or the prefill before the next one ends."""
        self._timer: asyncio.TimerHandle | None = None
        self._order = 0
        self._is_closed = False
        self.prefilled_tokens = 0
        self.recomputed_tokens = 0
        """Tokens of sequences that were put back, which are computed again."""
        self.busy_s = 0.0
        self.num_put_back = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        """Seeded and with logprobs, so that a training loop accepts it."""
        return EngineCapabilities(seeded=True, logprobs=True)

    def read_metrics(self) -> Mapping[str, float]:
        """Return no metrics; what it counts are attributes."""
        return {}

    @property
    def num_live(self) -> int:
        """Number of requests that it holds."""
        return len(self._live)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return a completion as long as the plan says, when the server would have.

        Raises:
            EngineError: the request does not fit into the server, or that was closed.
        """
        if self._is_closed:
            raise EngineError(f"request {request.request_id!r} came after {self.name} was closed")
        if request.request_id in self._live:
            raise EngineError(f"request id {request.request_id!r} is in use")
        length = max(1, min(self._plan(request), request.sampling.max_tokens))
        if len(request.prompt_ids) + length > self.speed.kv_tokens:
            raise EngineError(
                f"request {request.request_id!r} needs {len(request.prompt_ids) + length} tokens of KV and {self.name} has "
                f"{self.speed.kv_tokens}"
            )
        loop = asyncio.get_running_loop()
        self._order += 1
        run = _SimulatedRequest(request, length, loop.create_future(), self._order, [(0, self._version)])
        self._live[request.request_id] = run
        self._take(run)
        try:
            return await run.future
        finally:
            self._forget(run)

    async def abort(self, request_id: str) -> None:
        """End a request now; it returns what it has."""
        if (run := self._live.get(request_id)) is not None and not run.future.done():
            self._catch_up()
            self._finish(run, FinishReason.ABORT)
            self._wake()

    async def end_session(self, session_id: str) -> None:
        """Drop the session's KV."""
        self._cached -= self._cache.pop(session_id, 0)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Let completions carry `version`, and drop what was computed before."""
        self._catch_up()
        for run in self._live.values():
            if run.future.done():
                continue
            done = run.done + (max(self._step - run.joined, 0) if run.is_running else 0)
            if run.versions[-1][0] == done:
                run.versions.pop()
            run.versions.append((done, version))
        self._version = version
        self._cache.clear()
        self._cached = 0

    async def close(self) -> None:
        """Refuse all further requests, and lose those that run."""
        self._is_closed = True
        self._lose_all(f"{self.name} was closed")

    def _lose_all(self, why: str) -> None:
        self._empty()
        for run in list(self._live.values()):
            self._fail(run, why)

    def _empty(self) -> None:
        """Work on nothing, and keep nothing that was computed."""
        self._wake_at(None)
        self._queue, self._batch, self._ends = [], {}, []
        self._cache.clear()
        self._cached = self._kv = 0
        self._at = 0.0

    # The batch.

    def _take(self, run: _SimulatedRequest) -> None:
        """Let a request wait for its turn."""
        heapq.heappush(self._queue, (run.rank, run))
        self._wake()

    def _wake(self) -> None:
        """Set the timer for the next thing that happens; new requests join at the next step boundary."""
        now = asyncio.get_running_loop().time()
        if not self._batch:
            self._wake_at(max(now, self._at) if self._queue else None)
            return
        self._drop_ended()
        steps = self._ends[0][0] - self._step
        room = (self.speed.kv_tokens - self._kv) // len(self._batch)
        steps = max(min(steps, room), 1)
        if self._queue and len(self._batch) < self.speed.slots and self._fits(self._queue[0][1], len(self._batch)):
            steps = min(steps, max(math.ceil(self._steps_in(now - self._at) - 1e-9), 0))
        self._wake_at(self._at + self._seconds_of(steps))

    def _wake_at(self, when: float | None) -> None:
        """Let the timer be for `when`, or for nothing."""
        if self._timer is not None:
            if self._timer.when() == when:
                return
            self._timer.cancel()
        self._timer = None if when is None else asyncio.get_running_loop().call_at(when, self._turn)

    def _turn(self) -> None:
        """Do what is due: end what is done, put back what has no room, let others in."""
        self._timer = None
        self._catch_up()
        while self._ends and (self._ends[0][2].is_over or self._ends[0][0] <= self._step):
            run = heapq.heappop(self._ends)[2]
            if not run.is_over and run.is_running and run.joined + run.length - run.done <= self._step:
                self._finish(run, FinishReason.STOP)
        while self._batch and self._kv + len(self._batch) > self.speed.kv_tokens:
            self._put_back(max(self._batch.values(), key=lambda run: run.rank))
        self._admit()
        self._wake()

    def _catch_up(self) -> None:
        """Bring the step count to the present."""
        now = asyncio.get_running_loop().time()
        if not self._batch:
            self._at = max(self._at, now)
            return
        steps = max(math.floor(self._steps_in(now - self._at) + 1e-6), 0)
        seconds = self._seconds_of(steps)
        self._step += steps
        self._at += seconds
        self.busy_s += seconds
        self._kv += steps * len(self._batch)
        self._evict()

    def _seconds_of(self, steps: int) -> float:
        """Return how long the next `steps` steps take; each adds a token of KV to every sequence."""
        batch, per_token = len(self._batch), self.speed.context_token_s
        return steps * (self.speed.tau(batch) + per_token * (self._kv + batch * (steps + 1) / 2))

    def _steps_in(self, seconds: float) -> float:
        """Return how many steps fit into `seconds`: the inverse of `_seconds_of`."""
        batch, per_token = len(self._batch), self.speed.context_token_s
        first = self.speed.tau(batch) + per_token * (self._kv + batch / 2)
        growth = per_token * batch / 2
        if growth == 0 or seconds <= 0:
            return seconds / first
        return 2 * seconds / (first + math.sqrt(first * first + 4 * growth * seconds))

    def _admit(self) -> None:
        """Let waiting requests in, the highest priority first, and compute their prompts."""
        prefilled = num_admitted = 0
        while self._queue and len(self._batch) < self.speed.slots:
            run = self._queue[0][1]
            if run.is_over:
                heapq.heappop(self._queue)
                continue
            if not self._fits(run, len(self._batch)):
                break
            heapq.heappop(self._queue)
            size = len(run.request.prompt_ids) + run.done
            held = self._cache.pop(run.request.session_id, 0)
            self._cached -= held
            new = size - min(held, size - 1) // self.speed.cache_block * self.speed.cache_block
            prefilled += new
            num_admitted += 1
            run.prefilled += new
            run.is_running, run.joined = True, self._step
            self._batch[run.request.request_id] = run
            self._kv += size
            heapq.heappush(self._ends, (self._step + run.length - run.done, run.order, run))
        if prefilled:
            self._evict()
            self.prefilled_tokens += prefilled
            seconds = prefilled * self.speed.prefill_token_s + num_admitted * self.speed.request_s
            self._at += seconds
            self.busy_s += seconds

    def _fits(self, run: _SimulatedRequest, batch: int) -> bool:
        return self._kv + len(run.request.prompt_ids) + run.done + batch + 1 <= self.speed.kv_tokens

    def _evict(self) -> None:
        while self._cache and self._kv + self._cached > self.speed.kv_tokens:
            self._cached -= self._cache.popitem(last=False)[1]

    def _drop_ended(self) -> None:
        while self._ends[0][2].is_over or not self._ends[0][2].is_running:
            heapq.heappop(self._ends)

    def _leave(self, run: _SimulatedRequest) -> int:
        """Take `run` out of the batch and return how many tokens it has."""
        if not run.is_running:
            return run.done
        run.is_running = False
        del self._batch[run.request.request_id]
        done = run.done + max(self._step - run.joined, 0)
        self._kv -= len(run.request.prompt_ids) + done
        return done

    def _put_back(self, run: _SimulatedRequest) -> None:
        run.done = self._leave(run)
        self._ends = [entry for entry in self._ends if entry[2] is not run]
        heapq.heapify(self._ends)
        heapq.heappush(self._queue, (run.rank, run))
        self.num_put_back += 1
        self.recomputed_tokens += len(run.request.prompt_ids) + run.done

    def _finish(self, run: _SimulatedRequest, reason: FinishReason) -> None:
        request = run.request
        done = min(self._leave(run), run.length)
        run.is_over = True
        session, size = request.session_id, len(request.prompt_ids) + done
        if self.speed.prefix_cache:
            self._cached += size - self._cache.pop(session, 0)
            self._cache[session] = size
            self._evict()
        ids = np.full(done, self._token_id, np.int32)
        if reason is FinishReason.STOP:
            if run.length >= request.sampling.max_tokens and self._plan(request) > run.length:
                reason = FinishReason.LENGTH
            elif self._says_stop and request.sampling.stop_token_ids:
                ids[-1] = request.sampling.stop_token_ids[0]
        if not run.future.done():
            run.future.set_result(
                Completion(
                    token_ids=ids,
                    logprobs=np.full(done, -1.0, np.float32),
                    finish_reason=reason,
                    policy_versions=tuple(v for v in run.versions if v[0] < max(1, done)),
                    info={"prefilled_tokens": run.prefilled},
                )
            )

    def _fail(self, run: _SimulatedRequest, message: str) -> None:
        if not run.future.done():
            run.future.set_exception(EngineLostError(message))

    def _forget(self, run: _SimulatedRequest) -> None:
        """Free what `run` holds; a caller that was cancelled leaves it in the batch."""
        self._live.pop(run.request.request_id, None)
        if not run.is_over:
            if run.is_running and self._batch.get(run.request.request_id) is run:
                self._catch_up()
                self._leave(run)
                run.is_over = True
                self._wake()
            run.is_over = True
