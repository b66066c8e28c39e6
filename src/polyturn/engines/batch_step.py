"""BatchStep: one forward pass of the embedded engine over its slots, which prefills or decodes.

    some slot has more than its last token to compute  ->  prefill: a chunk of each of a few, nothing is sampled
    every slot lacks only its last token               ->  decode: feed that one, and sample the next of each

Separate from the engine, which knows requests and when to run: here are arrays and tensors, and nothing waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from polyturn.core.generation import FinishReason
from polyturn.engines.kv_cache import SlotCache
from polyturn.engines.media import ShownPrompt
from polyturn.engines.model_forward import ModelForward
from polyturn.engines.sampling import sample
from polyturn.engines.slot_allocator import PrefixCopy, SlotAllocator
from polyturn.engines.slots import EngineStats, SlotRequest, Slots

ROWS_PER_THREAD = 8
"""Deterministic mode pads decoding so that each thread gets a multiple of this many rows: with fewer or ragged ones the
matrix kernels, and with them the rounding, change with the size of the batch (measured on CPUs)."""
MIN_DENSITY = 0.75
"""SlotRequest slots are moved together when they fill a smaller share of the rows that a decoding step would compute."""

Ended: TypeAlias = tuple[SlotRequest, FinishReason]
"""A request that has its last token, and why it is the last."""


class BatchStep:
    """What runs the model over the slots."""

    def __init__(
        self, module: Module, slots: Slots, seating: SlotAllocator, *, prefill_chunk: int, is_alone: bool, stats: EngineStats
    ) -> None:
        """Take the model and its slots.

        Args:
            module: The model.
            slots: What every slot holds; written here and by `seating`.
            seating: Moves requests between slots.
            prefill_chunk: The longest piece of one prompt in one forward pass.
            is_alone: Make a request's bits independent of other requests: one prompt at a time, decoding padded.
            stats: Where the work is counted.
        """
        self._slots = slots
        self._seating = seating
        self._prefill_chunk = prefill_chunk
        self._is_alone = is_alone
        self._stats = stats
        self._row_multiple = ROWS_PER_THREAD * torch.get_num_threads() if is_alone else 1
        num_slots, max_context = slots.ids.shape
        # A padded step computes rows beyond the last slot too.
        self._model = ModelForward(
            module, num_slots=_round_up(num_slots, self._row_multiple), max_context=max_context, stats=stats
        )

    def run(self) -> list[Ended]:
        """Run the model once: prefill while something needs it, else decode; return the requests that ended with it."""
        rows = np.array([i for i, r in enumerate(self._slots.running) if r is not None], np.int64)
        if not len(rows):
            return []
        todo = self._slots.known[rows] - self._slots.cached[rows] - 1
        if not todo.any():
            return self._decode(rows)
        self._prefill(rows[todo > 0], todo[todo > 0])
        return []

    def copy(self, copies: Sequence[PrefixCopy]) -> None:
        """Copy the keys and values of prefixes from slot to slot."""
        if not copies:
            return
        sources, targets, lengths = (list(column) for column in zip(*copies, strict=True))
        with torch.inference_mode():
            self._model.cache.copy(sources=sources, targets=targets, length=max(lengths))
        self._slots.cached[targets] = lengths

    def close(self) -> None:
        """Give the memory of keys and values back."""
        self._model.cache = SlotCache(num_slots=1, max_context=1)

    def _prefill(self, rows: NDArray[np.int64], todo: NDArray[np.int64]) -> None:
        """Run one chunk of some of the rows that need prefill: rows of similar length, at most 8 chunks' worth of tokens."""
        slots = self._slots
        for row in rows.tolist():
            if (running := slots.running[row]) is not None and running.shown is not None:
                return self._prefill_shown(row, running.shown)
        todo = np.minimum(todo, self._prefill_chunk)
        order = np.argsort(todo, kind="stable")[::-1]
        most = 1 if self._is_alone else max(1, 8 * self._prefill_chunk // int(todo[order[0]]))
        rows, todo = rows[order[:most]], todo[order[:most]]
        width = int(todo[0])
        start = slots.cached[rows]
        steps = np.arange(width)
        is_real = steps < todo[:, None]
        positions = np.where(is_real, start[:, None] + steps, 0)
        ids = np.where(is_real, slots.ids[rows[:, None], positions], 0)
        self._model.prefill(rows, ids, positions, is_real=is_real)
        slots.cached[rows] += todo
        self._stats.prefill_steps += 1

    def _prefill_shown(self, row: int, shown: ShownPrompt) -> None:
        """Run one chunk of a prompt that shows media, with the inputs of those in the chunk."""
        slots = self._slots
        start, last = int(slots.cached[row]), int(slots.known[row]) - 1
        end = min(shown.behind(min(start + self._prefill_chunk, last)), last)
        positions = np.arange(start, end)[None]
        self._model.prefill(
            np.array([row]),
            shown.ids(slots.ids[row, start:end], start)[None],
            positions,
            is_real=np.ones(positions.shape, np.bool_),
            rope=shown.positions(start, end)[..., None, :],
            inputs=shown.inputs(start, end),
        )
        slots.cached[row] = end
        self._stats.prefill_steps += 1

    def _decode(self, rows: NDArray[np.int64]) -> list[Ended]:
        """Feed the last known token of every running slot and sample the next."""
        slots = self._slots
        extent_rows = int(rows[-1]) + 1
        if len(rows) < MIN_DENSITY * extent_rows and extent_rows > ROWS_PER_THREAD:
            rows = self._compact(rows)
            extent_rows = len(rows)
        cached = slots.cached[rows]
        logits = self._model.decode(
            rows,
            slots.ids[rows, cached],
            cached,
            num_rows=_round_up(extent_rows, self._row_multiple),
            offsets=slots.rope_offset[rows],
        )
        self._stats.decode_steps += 1
        return self._sample(rows, logits)

    def _sample(self, rows: NDArray[np.int64], logits: Tensor) -> list[Ended]:
        """Sample a token for each of `rows`; return those that end with it."""
        start = time.perf_counter()
        slots = self._slots
        if len(logits) > len(rows):
            logits = logits[self._model.tensor(rows)]
        running = [slots.running[row] for row in rows.tolist()]
        uniform = np.array([r.uniform.random() for r in running if r is not None], np.float64)
        with torch.inference_mode():
            tokens_B, logprobs_B = sample(
                logits,
                temperature=self._model.tensor(slots.temperature[rows]),
                top_p=self._model.tensor(slots.top_p[rows]),
                top_k=self._model.tensor(slots.top_k[rows]),
                uniform=self._model.tensor(uniform),
                banned=self._banned(running, logits.shape[1]),
            )
        tokens = tokens_B.cpu().numpy()
        known = slots.known[rows]
        slots.ids[rows, known] = tokens
        slots.logprobs[rows, known] = logprobs_B.cpu().numpy()
        slots.cached[rows] = known
        slots.known[rows] = known + 1
        has_stopped = (slots.stop[rows] == tokens[:, None]).any(axis=1)
        has_ended = has_stopped | (known + 1 >= slots.limit[rows])
        self._stats.decoded_tokens += len(rows)
        ended: list[Ended] = []
        for index in np.flatnonzero(has_ended).tolist():
            last = running[index]
            assert last is not None
            ended.append((last, FinishReason.STOP if has_stopped[index] else FinishReason.LENGTH))
        self._stats.sampling_s += time.perf_counter() - start
        return ended

    def _banned(self, running: list[SlotRequest | None], vocab: int) -> Tensor | None:
        """Return [B, V] which tokens are not to be drawn; None if all are allowed."""
        banned = [() if r is None else r.request.sampling.banned_token_ids for r in running]
        if not any(banned):
            return None
        mask = np.zeros((len(banned), vocab), np.bool_)
        for index, tokens in enumerate(banned):
            mask[index, list(tokens)] = True
        return self._model.tensor(mask)

    def _compact(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Move the running slots to the front, exchanging them with idle ones; return their new numbers."""
        low, high = self._seating.exchanges(rows)
        length = int(self._slots.cached[high + low].max())
        with torch.inference_mode():
            self._model.cache.swap(first=low, second=high, length=length)
        self._seating.exchange(low, high)
        return np.arange(len(rows))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
