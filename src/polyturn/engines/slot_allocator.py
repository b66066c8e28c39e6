"""SlotAllocator: choose a slot of the embedded engine for each request, and reuse cached prefixes.

    the session has an idle slot                  ->  that slot, which has the prefix in its cache
    another slot has the prompt's prefix          ->  a claimed slot, into which the prefix's keys and values are copied
    another slot is about to compute the prefix   ->  wait for that slot's prefill, then copy
    otherwise                                     ->  a claimed slot, without a prefix

A claimed slot is an empty one or, if there is none, the one that was idle longest (`Slots.claim`).

It does not know the KV cache: it returns the copies and exchanges that the engine makes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyturn.core.arrays import Ids
from polyturn.engines.slots import MIN_SHARED_PREFIX, EngineStats, SlotRequest, Slots


class PrefixCopy(NamedTuple):
    """A copy of the keys and values of `length` tokens from slot `source` to slot `target`."""

    source: int
    target: int
    length: int


class SlotAllocator:
    """Slots, and the sessions that own them."""

    def __init__(self, slots: Slots, *, max_context: int, share_prefixes: bool, stats: EngineStats) -> None:
        """Start with empty slots.

        Args:
            slots: The state of all slots, written by this class and by the engine.
            max_context: Largest length of prompt plus completion, in tokens.
            share_prefixes: Whether to copy prefixes from other slots.
            stats: Counts reuse and evictions.
        """
        self._slots = slots
        self._max_context = max_context
        self._share_prefixes = share_prefixes
        self._stats = stats
        self._sessions: dict[str, int] = {}

    def admit(self, waiting: Sequence[SlotRequest]) -> tuple[list[SlotRequest], list[PrefixCopy]]:
        """Give free slots to requests; return the requests that still wait, and the prefixes to copy.

        Prompts are compared only while a slot is free, so a long queue costs a full engine nothing.
        """
        copies: list[PrefixCopy] = []
        still_waiting = []
        num_free = self._slots.running.count(None)
        for running in waiting:
            if num_free and self._assign(running, copies):
                num_free -= 1
            else:
                still_waiting.append(running)
        return still_waiting, copies

    def leave(self, running: SlotRequest) -> None:
        """Remove a request from its slot; the slot keeps its cache."""
        self._slots.running[running.slot] = None
        self._slots.touch(running.slot)
        running.slot = -1

    def end_session(self, session_id: str) -> None:
        """Release the session's slot. Unknown ids are fine."""
        slot = self._sessions.pop(session_id, None)
        if slot is not None:
            self._slots.session[slot] = None

    def end_all_sessions(self) -> None:
        """Forget every session."""
        self._sessions.clear()

    def exchanges(self, rows: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Return (idle slots, running slots) whose exchange moves the running `rows` to the front."""
        count = len(rows)
        return np.setdiff1d(np.arange(count), rows).tolist(), rows[rows >= count].tolist()

    def exchange(self, first: list[int], second: list[int]) -> None:
        """Exchange the slots first[i] and second[i], with their requests."""
        self._slots.swap(first, second)
        for slot in first + second:
            session, running = self._slots.session[slot], self._slots.running[slot]
            if session is not None:
                self._sessions[session] = slot
            if running is not None:
                running.slot = slot

    def _assign(self, running: SlotRequest, copies: list[PrefixCopy]) -> bool:
        """Put the request into a free slot; return False if it waits for a prefix that is being computed."""
        slots, request = self._slots, running.request
        prompt, length = running.keys, len(request.prompt_ids)
        slot = self._sessions.get(request.session_id, -1)
        shared = 0
        if slot >= 0 and slots.running[slot] is None:
            own = min(int(slots.cached[slot]), length - 1)
            cached = running.before(_common_prefix(slots.ids[slot], prompt, own))
            self._stats.reused_tokens += cached
        else:
            cached = 0
            donor, shared, soon = slots.donor(prompt) if self._share_prefixes else (-1, 0, 0)
            if soon - shared >= MIN_SHARED_PREFIX:  # another request is computing it; copying later costs less
                return False
            slot, evicted = slots.claim()
            if evicted is not None:
                self._sessions.pop(evicted, None)
                self._stats.evictions += 1
            shared = running.before(shared)
            if shared < MIN_SHARED_PREFIX:
                shared = 0
            elif donor == slot:  # the claimed slot itself has the prefix
                cached = shared
            else:
                copies.append(PrefixCopy(donor, slot, shared))
            self._stats.shared_tokens += shared
            if request.session_id not in self._sessions:
                self._sessions[request.session_id] = slot
                slots.session[slot] = request.session_id
        running.slot = slot
        running.prefilled = length - max(cached, shared)
        self._stats.prefilled_tokens += running.prefilled
        self._fill(slot, running, cached)
        return True

    def _fill(self, slot: int, running: SlotRequest, cached: int) -> None:
        slots, request, sampling = self._slots, running.request, running.request.sampling
        length = len(request.prompt_ids)
        slots.ids[slot, cached:length] = running.keys[cached:]
        slots.rope_offset[slot] = 0 if running.prompt_with_media is None else running.prompt_with_media.offset
        slots.routed[slot] = min(int(slots.routed[slot]), cached)
        slots.cached[slot], slots.known[slot], slots.prompt[slot] = cached, length, length
        slots.limit[slot] = min(length + sampling.max_tokens, self._max_context)
        slots.temperature[slot], slots.top_p[slot], slots.top_k[slot] = sampling.temperature, sampling.top_p, sampling.top_k
        slots.keeps_support[slot] = sampling.keep_support and sampling.is_cut
        missing = len(sampling.stop_token_ids) - slots.stop.shape[1]
        if missing > 0:
            slots.stop = np.pad(slots.stop, ((0, 0), (0, missing)), constant_values=-1)
        slots.stop[slot] = -1
        slots.stop[slot, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        slots.running[slot] = running
        slots.touch(slot)


def _common_prefix(a: Ids, b: Ids, length: int) -> int:
    """Return the length of the common prefix, at most `length`."""
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
