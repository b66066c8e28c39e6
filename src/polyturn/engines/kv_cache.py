"""SlotCache: keys and values of many sequences, one slot each, with transformers' `Cache` interface.

This module defines the memory layout of the cache. Before a forward pass, `aim` sets the positions of its tokens. The
model's attention layers then call `update`, which writes each row's new keys and values at these positions and returns the
keys and values to attend to:

    keys of one layer   [num_slots + 1, heads, capacity, head_dim]     padding is written to the last slot
    decode              rows are the slots 0..n-1: a view, nothing is copied
    prefill             rows are any slots: their first `extent` positions are gathered

Unused memory is zero, never NaN, because masked positions still enter the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

FIRST_CAPACITY = 64
"""Initial number of positions per slot. It grows by quarters instead of doubling: attention over compact slots was measured
a third faster than over half-empty ones."""


class SlotCache(Cache):
    """Keys and values of `num_slots` sequences of up to `max_context` tokens; memory grows with contexts."""

    def __init__(self, *, num_slots: int, max_context: int) -> None:
        super().__init__(layers=[])
        self._num_slots = num_slots
        self._max_context = max_context
        self._capacity = min(FIRST_CAPACITY, max_context)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows: Tensor | None = None
        self._num_rows = 0
        self._extent = 0
        self._is_fresh = False
        self._write_slots: Tensor = torch.empty(0)
        self._positions: Tensor = torch.empty(0)
        self._flat: dict[tuple[int, int], Tensor] = {}

    @property
    def trash(self) -> int:
        """Index of the slot for padding."""
        return self._num_slots

    def aim(
        self, *, rows: Tensor | None, write_slots: Tensor, positions: Tensor, extent: int, is_fresh: bool = False
    ) -> None:
        """Set the positions that the next forward pass reads and writes.

        Args:
            rows: [B] the slot of each row; None if row i is slot i.
            write_slots: [B, Q] the slot of each new token (`trash` for padding).
            positions: [B, Q] the position in the slot of each new token.
            extent: Number of positions that rows attend to, including the new ones.
            is_fresh: Whether every row starts at position 0 and `extent` is Q, so that rows attend only to the new keys.
        """
        self._rows, self._num_rows, self._extent, self._is_fresh = rows, len(positions), extent, is_fresh
        self._write_slots, self._positions = write_slots, positions
        self._flat.clear()
        if extent > self._capacity:
            self._grow(extent)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, heads, Q, head_dim] keys and values; return [B, heads, extent, head_dim] to attend to."""
        if layer_idx == len(self._keys):
            self._keys.append(self._zeros(key_states))
            self._values.append(self._zeros(value_states))
        keys = self._put(self._keys[layer_idx], key_states)
        values = self._put(self._values[layer_idx], value_states)
        if self._is_fresh:
            return key_states, value_states
        return self._look(keys), self._look(values)

    def copy(self, *, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` positions of each source slot to its target slot, as if simultaneously."""
        for store in (*self._keys, *self._values):
            store[targets, :, :length] = store[sources, :, :length]

    def swap(self, *, first: list[int], second: list[int], length: int) -> None:
        """Exchange the first `length` positions of the slots first[i] and second[i]."""
        self.copy(sources=second + first, targets=first + second, length=length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of positions that the last forward pass attended to."""
        return self._extent

    def _put(self, store: Tensor, states: Tensor) -> Tensor:
        _, heads, capacity, width = store.shape
        flat = self._flat.get((heads, capacity))
        if flat is None:  # the same for every layer of this shape in a pass
            head = torch.arange(heads, device=store.device).view(1, -1, 1)
            flat = ((self._write_slots.unsqueeze(1) * heads + head) * capacity + self._positions.unsqueeze(1)).view(-1)
            self._flat[heads, capacity] = flat
        store.view(-1, width).index_copy_(0, flat, states.reshape(-1, width))
        return store

    def _look(self, store: Tensor) -> Tensor:
        if self._rows is None:
            return store[: self._num_rows, :, : self._extent]
        return store[:, :, : self._extent].index_select(0, self._rows)

    def _zeros(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._num_slots + 1, like.shape[1], self._capacity, like.shape[3])

    def _grow(self, extent: int) -> None:
        old = self._capacity
        self._capacity = min(max(extent, old + old // 4), self._max_context)
        for stores in (self._keys, self._values):
            for index, store in enumerate(stores):
                stores[index] = self._zeros(store)
                stores[index][:, :, :old] = store
