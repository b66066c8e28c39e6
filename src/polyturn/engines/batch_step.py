"""BatchStep: the forward passes of the embedded engine over its slots; each prefills or decodes.

    more than a quarter of the running slots have more than one token to compute; or some have, and `MAX_WAIT` steps have
    passed or the engine is deterministic
                                        ->  prefill: a chunk of each of a few of these slots, without sampling
    otherwise                           ->  decode: feed the last token of each other slot, sample the next

This module works on arrays and tensors and never awaits; the engine handles requests and decides when to run. Only this
module calls the model: for prefill and decoding alike it sets the cache positions, attention masks and model positions of
tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from polyturn.core.errors import EngineError
from polyturn.core.generation import FinishReason
from polyturn.engines.kv_cache import SlotCache
from polyturn.engines.media import ShownPrompt
from polyturn.engines.routers import Routers, RoutingPass
from polyturn.engines.sampling import sample
from polyturn.engines.slot_allocator import PrefixCopy, SlotAllocator
from polyturn.engines.slots import EngineStats, SlotRequest, Slots

ROWS_PER_THREAD = 8
"""Deterministic mode pads decoding such that each thread gets a multiple of this many rows. With other numbers, the matrix
kernels, and so the rounding, change with the batch size (measured on CPUs)."""
MAX_WAIT = 4
"""Largest number of decoding steps for which a prompt waits until a quarter of the rows have a prompt to prefill."""
MIN_DENSITY = 0.75
"""Running slots are compacted if they fill a smaller share of the rows of a decoding step."""

EXTENT_STEP = 32
"""Attention lengths are rounded up to a multiple of this."""

Ended: TypeAlias = tuple[SlotRequest, FinishReason]
"""A finished request, and its finish reason."""


class BatchStep:
    """The passes of the model over the slots."""

    def __init__(
        self,
        module: Module,
        slots: Slots,
        allocator: SlotAllocator,
        *,
        prefill_chunk: int,
        is_alone: bool,
        stats: EngineStats,
        routers: Routers | None = None,
    ) -> None:
        """Run `module` over `slots`.

        Args:
            module: A transformers causal language model.
            slots: The state of all slots, written by this class and by `allocator`.
            allocator: Moves requests between slots.
            prefill_chunk: Largest number of tokens of one prompt in one forward pass.
            is_alone: Make a request's bits independent of other requests: prefill one prompt at a time, and pad decoding.
            stats: Counts the work.
            routers: The module's routers, if the slots keep routes.
        """
        self._slots = slots
        self._allocator = allocator
        self._prefill_chunk = prefill_chunk
        self._is_alone = is_alone
        self._stats = stats
        self._num_waited = 0
        self._row_multiple = ROWS_PER_THREAD * torch.get_num_threads() if is_alone else 1
        num_slots, self._max_context = slots.ids.shape
        # A padded step also computes rows beyond the last slot.
        num_rows = _round_up(num_slots, self._row_multiple)
        self._cache = SlotCache(num_slots=num_rows, max_context=self._max_context)
        self._module: Any = module
        parameter = next(module.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        # Never exited, because only this engine uses the module.
        self._routing = None if routers is None else RoutingPass(routers).__enter__()
        self._routes: Any = None
        """[B, Q, L, K] the experts of the tokens of the last pass; None without `routers`."""

    def run(self) -> list[Ended]:
        """Run the model once, to prefill if needed, else to decode; return the requests that finished."""
        rows = np.array([i for i, r in enumerate(self._slots.running) if r is not None], np.int64)
        if not len(rows):
            return []
        todo = self._slots.known[rows] - self._slots.cached[rows] - 1
        is_ready = todo == 0
        if is_ready.all() or self._may_wait(num_ready=int(is_ready.sum()), num_rows=len(rows)):
            return self._decode(rows[is_ready])
        self._prefill(rows[~is_ready], todo[~is_ready])
        return []

    def _may_wait(self, *, num_ready: int, num_rows: int) -> bool:
        """Return whether prompts wait for more prompts while the ready rows decode."""
        if self._is_alone or 4 * num_ready < 3 * num_rows or self._num_waited == MAX_WAIT:
            self._num_waited = 0
            return False
        self._num_waited += 1
        return True

    def copy(self, copies: Sequence[PrefixCopy]) -> None:
        """Copy the keys and values of prefixes from slot to slot."""
        if not copies:
            return
        sources, targets, lengths = (list(column) for column in zip(*copies, strict=True))
        with torch.inference_mode():
            self._cache.copy(sources=sources, targets=targets, length=max(lengths))
        self._slots.cached[targets] = lengths
        if self._slots.routes is not None:
            for source, target, length in copies:
                self._slots.routes[target, :length] = self._slots.routes[source, :length]
                self._slots.routed[target] = length

    def close(self) -> None:
        """Free the memory of keys and values."""
        self._cache = SlotCache(num_slots=1, max_context=1)

    def _prefill(self, rows: NDArray[np.int64], todo: NDArray[np.int64]) -> None:
        """Run one chunk of some of the rows that need prefill: rows of similar length, at most 8 chunks' worth of tokens."""
        slots = self._slots
        for row in rows.tolist():
            if (running := slots.running[row]) is not None and running.prompt_with_media is not None:
                return self._prefill_shown(row, running.prompt_with_media)
        todo = np.minimum(todo, self._prefill_chunk)
        order = np.argsort(todo, kind="stable")[::-1]  # rows of similar length, to avoid padding
        most = 1 if self._is_alone else max(1, 8 * self._prefill_chunk // int(todo[order[0]]))
        rows, todo = rows[order[:most]], todo[order[:most]]
        width = int(todo[0])
        start = slots.cached[rows]
        steps = np.arange(width)
        is_real = steps < todo[:, None]
        positions = np.where(is_real, start[:, None] + steps, 0)  # padding attends to position 0: its softmax is defined
        ids = np.where(is_real, slots.ids[rows[:, None], positions], 0)
        write_slots = np.where(is_real, rows[:, None], self._cache.trash)
        self._forward(self._module.base_model, ids, positions, rows=rows, write_slots=write_slots)
        if slots.routes is not None:
            slots.note_routes(rows, start, todo, self._routes)
        slots.cached[rows] += todo
        self._stats.prefill_steps += 1

    def _prefill_shown(self, row: int, prompt: ShownPrompt) -> None:
        """Run one chunk of a prompt with media, with the inputs of the media in the chunk."""
        slots = self._slots
        start, last = int(slots.cached[row]), int(slots.known[row]) - 1
        end = min(prompt.behind(min(start + self._prefill_chunk, last)), last)
        positions = np.arange(start, end)[None]
        self._forward(
            self._module.base_model,
            prompt.ids(slots.ids[row, start:end], start)[None],
            positions,
            rows=np.array([row]),
            write_slots=np.full_like(positions, row),
            rope=prompt.positions(start, end)[..., None, :],
            inputs=prompt.inputs(start, end),
        )
        if slots.routes is not None:
            slots.note_routes(np.array([row]), np.array([start]), np.array([end - start]), self._routes)
        slots.cached[row] = end
        self._stats.prefill_steps += 1

    def _decode(self, rows: NDArray[np.int64]) -> list[Ended]:
        """Feed the last known token of every running slot, and sample the next one."""
        slots = self._slots
        extent_rows = int(rows[-1]) + 1
        if len(rows) < MIN_DENSITY * extent_rows and extent_rows > ROWS_PER_THREAD:
            rows = self._compact(rows)
            extent_rows = len(rows)
        cached = slots.cached[rows]
        # Row i is slot i; results for slots that do not decode are discarded.
        num_rows = _round_up(extent_rows, self._row_multiple)
        fed, at, rope = (np.zeros((num_rows, 1), np.int64) for _ in range(3))
        write_slots = np.full((num_rows, 1), self._cache.trash, np.int64)
        fed[rows, 0], write_slots[rows, 0] = slots.ids[rows, cached], rows
        at[rows, 0], rope[rows, 0] = cached, cached + slots.rope_offset[rows]
        logits: Tensor = self._forward(self._module, fed, at, rows=None, write_slots=write_slots, rope=rope).logits
        self._stats.decode_steps += 1
        ended = self._keep(rows, *self._sample(rows, logits[:, -1]))
        if slots.routes is not None:
            slots.note_routes(rows, cached, np.ones_like(cached), self._routes[rows])
        return ended

    def _sample(
        self, rows: NDArray[np.int64], logits: Tensor
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int32] | None]:
        """Sample a token for each of `rows` from `logits` [B, V], a row per slot; return [n] tokens, [n] logprobs, and [n,
        K] supports."""
        start = time.perf_counter()
        slots = self._slots
        if len(logits) > len(rows):
            logits = logits[self._tensor(rows)]
        running = [r for row in rows.tolist() if (r := slots.running[row]) is not None]
        with torch.inference_mode():
            sampled = sample(
                logits,
                temperature=self._tensor(slots.temperature[rows]),
                top_p=self._tensor(slots.top_p[rows]),
                top_k=self._tensor(slots.top_k[rows]),
                uniform=self._tensor(np.array([r.uniform.random() for r in running])),
                keeps_support=self._tensor(keeps) if (keeps := slots.keeps_support[rows]).any() else None,
                banned=self._banned(running, logits.shape[-1]),
            )
        tokens, logprobs = sampled.tokens.cpu().numpy(), sampled.logprobs.cpu().numpy()
        if np.isnan(logprobs).any():
            raise EngineError(
                "the model computes NaN: its weights are broken, or its numbers are too large for their type (model.dtype)"
            )
        support = None if sampled.support is None else sampled.support.cpu().numpy().astype(np.int32)
        self._stats.sampling_s += time.perf_counter() - start
        return tokens, logprobs, support

    def _keep(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        support: NDArray[np.int32] | None,
    ) -> list[Ended]:
        """Store the sampled tokens of `rows`; return the requests that finish."""
        slots = self._slots
        known = slots.known[rows]
        slots.ids[rows, known] = tokens
        slots.logprobs[rows, known] = logprobs
        if support is not None:
            slots.note_support(rows, known, support)
        slots.cached[rows] = known
        slots.known[rows] = known + 1
        self._stats.decoded_tokens += len(rows)
        has_stopped = (tokens[:, None] == slots.stop[rows]).any(axis=1)
        has_ended = has_stopped | (slots.known[rows] >= slots.limit[rows])
        ended: list[Ended] = []
        for index in np.flatnonzero(has_ended).tolist():
            running = slots.running[rows[index]]
            assert running is not None
            ended.append((running, FinishReason.STOP if has_stopped[index] else FinishReason.LENGTH))
        return ended

    def _banned(self, running: list[SlotRequest], vocab: int) -> Tensor | None:
        """Return [B, V] whether a token must not be drawn; None if all are allowed."""
        banned = [r.request.sampling.banned_token_ids for r in running]
        if not any(banned):
            return None
        mask = np.zeros((len(banned), vocab), np.bool_)
        for index, tokens in enumerate(banned):
            mask[index, list(tokens)] = True
        return self._tensor(mask)

    def _compact(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Move the running slots to the front by exchanging them with idle ones; return their new indices."""
        low, high = self._allocator.exchanges(rows)
        length = int(self._slots.cached[high + low].max())
        with torch.inference_mode():
            self._cache.swap(first=low, second=high, length=length)
        self._allocator.exchange(low, high)
        return np.arange(len(rows))

    # The model.

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        """Return an array on the model's device."""
        return torch.from_numpy(array).to(self._device)

    def _forward(
        self,
        module: Any,
        ids: NDArray[Any],
        positions: NDArray[np.int64],
        *,
        rows: NDArray[np.int64] | None,
        write_slots: NDArray[np.int64],
        rope: NDArray[np.int64] | None = None,
        inputs: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Any:
        """Run `module`, and store the keys and values of its tokens; each token attends to the positions up to its own.

        Args:
            module: The causal language model, or its base model if no logits are needed.
            ids: [B, Q] the tokens.
            positions: [B, Q] index in the slot; consecutive, 0 for padding.
            rows: [B] the slot of each row; None if row i is slot i.
            write_slots: [B, Q] the slot of each token; the cache's `trash` for padding.
            rope: [B, Q] or [3, B, Q] position for the model; None if equal to `positions`.
            inputs: The model's inputs for the media among the tokens.
        """
        is_fresh = rows is not None and not positions[:, 0].any()
        extent = positions.shape[1] if is_fresh else min(_round_up(int(positions.max()) + 1, EXTENT_STEP), self._max_context)
        positions_BQ = self._tensor(positions)
        self._cache.aim(
            rows=None if rows is None else self._tensor(rows),
            write_slots=self._tensor(write_slots),
            positions=positions_BQ,
            extent=extent,
            is_fresh=is_fresh,
        )
        start = time.perf_counter()
        with torch.inference_mode():
            hidden = torch.arange(extent, device=self._device) > positions_BQ.unsqueeze(-1)  # [B, Q, extent]
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))
            out = module(
                input_ids=self._tensor(ids.astype(np.int64, copy=False)),
                attention_mask=mask.unsqueeze(1),
                position_ids=positions_BQ if rope is None else self._tensor(rope),
                past_key_values=self._cache,
                use_cache=True,
                **{k: v.to(self._device, self._dtype if v.is_floating_point() else None) for k, v in inputs.items()},
            )
            if self._routing is not None:
                chosen = self._routing.read_choices().cpu().numpy().astype(self._routing.shape.dtype)
                self._routes = chosen.reshape(*ids.shape, *chosen.shape[1:])
        self._stats.forward_s += time.perf_counter() - start
        return out


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
