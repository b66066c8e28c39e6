"""The slots of the embedded engine: arrays over slots, and the choice of a slot to use, copy from or evict.

A decoding step reads and writes these arrays for all running slots at once, without Python work per row.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyturn.core.arrays import Ids, Support
from polyturn.core.generation import MAX_SUPPORT, Completion, GenerateRequest
from polyturn.core.routing import RouteShape
from polyturn.engines.media import ShownPrompt

MIN_SHARED_PREFIX = 8
"""Shortest prefix, in tokens, for which a copy is cheaper than computing."""


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made; subtract two copies to get an interval."""

    prefilled_tokens: int = 0
    """Number of prompt tokens computed by the model."""
    reused_tokens: int = 0
    """Number of prompt tokens found in the session's slot."""
    shared_tokens: int = 0
    """Number of prompt tokens whose keys and values were copied from another slot."""
    decoded_tokens: int = 0
    """Tokens sampled."""
    prefill_steps: int = 0
    decode_steps: int = 0
    forward_s: float = 0.0
    """Seconds inside the model."""
    sampling_s: float = 0.0
    """Seconds inside sampling."""
    busy_s: float = 0.0
    """Seconds inside the engine's steps in total."""
    evictions: int = 0
    """Number of sessions whose cache was dropped to free a slot."""
    completions: int = 0


@dataclass(slots=True, eq=False)
class SlotRequest:
    """A request in a slot."""

    request: GenerateRequest
    future: asyncio.Future[Completion]
    uniform: random.Random
    versions: list[tuple[int, int]]
    slot: int = -1
    prefilled: int = 0
    prompt_with_media: ShownPrompt | None = None
    """The prompt's media; None for text."""

    @property
    def keys(self) -> Ids:
        """[T] keys to compare prompts: the ids, with the numbers of media at their placeholders."""
        return self.request.prompt_ids if self.prompt_with_media is None else self.prompt_with_media.keys

    def before(self, index: int) -> int:
        """Return `index`, or the start of a medium that a cut at `index` would divide."""
        return index if self.prompt_with_media is None else self.prompt_with_media.before(index)


@dataclass(slots=True)
class Slots:
    """The state of all N slots, as arrays over slots."""

    ids: NDArray[np.int32]
    """[N, max_context] the known ids; negative at a medium's features (see `media.ShownPrompt`)."""
    logprobs: NDArray[np.float32]
    """[N, max_context] logprobs of the sampled ids."""
    cached: NDArray[np.int64]
    """[N] number of ids with keys and values in the cache."""
    known: NDArray[np.int64]
    """[N] number of known ids."""
    limit: NDArray[np.int64]
    """[N] the number of ids at which the request ends."""
    prompt: NDArray[np.int64]
    """[N] number of ids of the prompt."""
    stop: NDArray[np.int64]
    """[N, K] the stop ids, padded with -1."""
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    last_used: NDArray[np.int64]
    rope_offset: NDArray[np.int64]
    """[N] difference between a sampled token's position and its index; 0 unless the prompt has media."""
    keeps_support: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """[N] whether the request records the support of each sampled token, because top-p or top-k cuts it."""
    support: NDArray[np.int32] | None = None
    """[N, max_context, MAX_SUPPORT] the supports of the sampled ids; None until a request keeps them."""
    routes: Any | None = None
    """[N, max_context, L, K] the experts of the known ids; None if routes are not kept."""
    routed: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """[N] number of ids with an entry in `routes`."""
    running: list[SlotRequest | None] = field(default_factory=list)
    clock: int = 0
    session: list[str | None] = field(default_factory=list)
    """For each slot the session that owns it; None if the slot is free, although its content may still serve as a prefix."""

    @classmethod
    def make(cls, n: int, max_context: int, *, routes: RouteShape | None = None) -> Slots:
        """Return `n` empty slots, with `routes` of that shape."""
        return cls(
            ids=np.zeros((n, max_context), np.int32),
            logprobs=np.zeros((n, max_context), np.float32),
            cached=np.zeros(n, np.int64),
            known=np.zeros(n, np.int64),
            limit=np.zeros(n, np.int64),
            prompt=np.zeros(n, np.int64),
            stop=np.full((n, 1), -1, np.int64),
            temperature=np.ones(n, np.float32),
            top_p=np.ones(n, np.float32),
            top_k=np.zeros(n, np.int64),
            last_used=np.zeros(n, np.int64),
            rope_offset=np.zeros(n, np.int64),
            keeps_support=np.zeros(n, np.bool_),
            # Zeros instead of a value for "no route", because zeros take no memory until they are written.
            routes=None if routes is None else np.zeros((n, max_context, *routes[:2]), routes.dtype),
            routed=np.zeros(n, np.int64),
            running=[None] * n,
            session=[None] * n,
        )

    def swap(self, first: list[int], second: list[int]) -> None:
        """Exchange the slots first[i] and second[i]."""
        to, origin = first + second, second + first
        counts = (self.cached, self.known, self.limit, self.prompt, self.stop, self.routed)
        for array in (
            *counts,
            self.temperature,
            self.top_p,
            self.top_k,
            self.last_used,
            self.rope_offset,
            self.keeps_support,
        ):
            array[to] = array[origin]
        width = int(self.known[to].max(initial=0))
        self.ids[to, :width] = self.ids[origin, :width]
        self.logprobs[to, :width] = self.logprobs[origin, :width]
        if self.support is not None:
            self.support[to, :width] = self.support[origin, :width]
        if self.routes is not None:
            self.routes[to, :width] = self.routes[origin, :width]
        for a, b in zip(first, second, strict=True):
            self.running[a], self.running[b] = self.running[b], self.running[a]
            self.session[a], self.session[b] = self.session[b], self.session[a]

    def note_support(self, rows: NDArray[np.int64], index: NDArray[np.int64], support_NK: NDArray[np.int32]) -> None:
        """Record the supports of the ids at `index` [N] of the slots `rows` [N]."""
        if self.support is None:
            self.support = np.zeros((*self.ids.shape, MAX_SUPPORT), np.int32)
        self.support[rows, index] = -1
        self.support[rows, index, : support_NK.shape[1]] = support_NK

    def support_of(self, slot: int) -> Support | None:
        """Return [n, K] the supports of the sampled ids; None if the request does not keep them."""
        if self.support is None or not self.keeps_support[slot]:
            return None
        support_NK = self.support[slot, int(self.prompt[slot]) : int(self.known[slot])]
        width = max(1, int((support_NK >= 0).sum(axis=1).max(initial=1)))
        return support_NK[:, :width].copy()

    def note_routes(self, rows: NDArray[np.int64], first: NDArray[np.int64], counts: NDArray[np.int64], routes: Any) -> None:
        """Record the experts `routes` [B, Q, L, K] of `counts` [B] ids of the slots `rows`, from index `first` [B] on.

        An id keeps the experts that were recorded first, even if newer weights choose others when its keys and values are
        computed again.
        """
        assert self.routes is not None
        for row, begin, count, new in zip(rows.tolist(), first.tolist(), counts.tolist(), routes, strict=True):
            fresh = min(max(begin, int(self.routed[row])), begin + count)
            self.routes[row, fresh : begin + count] = new[fresh - begin : count]
            self.routed[row] = max(int(self.routed[row]), begin + count)

    def routes_of(self, slot: int, start: int) -> Any | None:
        """Return [R, L, K] the experts of the ids from `start` to the last but one; None if some are unknown."""
        end = int(self.known[slot]) - 1
        if self.routes is None or not start <= end <= self.routed[slot]:
            return None
        return self.routes[slot, start:end].copy()

    def donor(self, prompt: Ids) -> tuple[int, int, int]:
        """Return (the slot with the longest prefix of `prompt` in its cache, the length of that prefix, the longest prefix
        that any running slot will have after its prefill); (-1, 0, 0) without such a slot."""
        length = len(prompt)
        candidates = np.flatnonzero((self.known >= MIN_SHARED_PREFIX) & (self.ids[:, 0] == prompt[0]))
        if not len(candidates) or length <= MIN_SHARED_PREFIX:
            return -1, 0, 0
        differs = self.ids[candidates, : length - 1] != prompt[: length - 1]
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), length - 1)
        now = np.minimum(common, self.cached[candidates])
        is_running = np.array([self.running[c] is not None for c in candidates])
        soon = np.where(is_running, np.minimum(common, self.known[candidates] - 1), 0)
        best = int(now.argmax())
        return int(candidates[best]), int(now[best]), int(soon.max())

    def claim(self) -> tuple[int, str | None]:
        """Return a slot to overwrite, and the session that loses it: an empty slot, else the least recently used slot
        without a session, else the slot of the session that was idle longest. At least one slot must not be running."""
        best, best_key = -1, (3, 0)
        for slot, running in enumerate(self.running):
            if running is not None:
                continue
            if self.session[slot] is not None:
                key = (2, int(self.last_used[slot]))
            else:
                key = (1, int(self.last_used[slot])) if self.cached[slot] else (0, 0)
            if key < best_key:
                best, best_key = slot, key
                if key[0] == 0:  # an empty slot is the best choice
                    break
        evicted, self.session[best] = self.session[best], None
        return best, evicted

    def touch(self, slot: int) -> None:
        """Mark the slot as just used."""
        self.clock += 1
        self.last_used[slot] = self.clock
