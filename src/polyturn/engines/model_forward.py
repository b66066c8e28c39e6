"""ModelForward: one run of the model over slots of its cache, from NumPy arrays to logits.

Separate from the engine's scheduling because here and only here the model is called: where its tokens go in the cache, what
each may look at, and at which positions they stand for the model are decided in one place, for prefill and decoding alike.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyturn.engines.kv_cache import SlotCache
from polyturn.engines.routers import Routers, RoutingPass
from polyturn.engines.slots import EngineStats

EXTENT_STEP = 32
"""Attention looks at contexts rounded up to a multiple of this."""


class ModelForward:
    """Runs a module over the slots of a cache that it owns."""

    def __init__(
        self,
        module: nn.Module,
        *,
        num_slots: int,
        max_context: int,
        stats: EngineStats,
        routers: Routers | None = None,
    ) -> None:
        """Take a transformers causal language model; `stats.forward_s` counts the seconds inside it, and what its `routers`
        choose is in `routes` after each pass."""
        self.cache = SlotCache(num_slots=num_slots, max_context=max_context)
        self._module: Any = module
        self._max_context = max_context
        self._stats = stats
        parameter = next(module.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._routing = None if routers is None else RoutingPass(routers).__enter__()  # the module is this engine's own
        self.routes: Any = None
        """[B, Q, L, K] the experts that the tokens of the last pass went to; None without `routers`."""

    def prefill(
        self,
        rows: NDArray[np.int64],
        ids: NDArray[Any],
        positions: NDArray[np.int64],
        *,
        is_real: NDArray[np.bool_],
        rope: NDArray[np.int64] | None = None,
        inputs: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Compute keys and values of known tokens.

        Args:
            rows: [B] the slot of each row.
            ids: [B, Q] the tokens.
            positions: [B, Q] where they stand in their slots; rising by one, 0 for padding.
            is_real: [B, Q] False for padding.
            rope: [B, Q] or [3, B, Q] where they stand for the model; None where that is the same.
            inputs: The model's inputs for the media among the tokens.
        """
        is_fresh = not positions[:, 0].any()
        extent = positions.shape[1] if is_fresh else self._extent(positions)
        self.cache.aim(
            rows=self.tensor(rows),
            write_slots=self.tensor(np.where(is_real, rows[:, None], self.cache.trash)),
            positions=self.tensor(positions),
            extent=extent,
            is_fresh=is_fresh,
        )
        # Padding looks at position 0, which is finite, so that its softmax is defined.
        self._forward(self._module.base_model, ids, positions, extent, rope, inputs)

    def decode(
        self,
        rows: NDArray[np.int64],
        ids: NDArray[Any],
        positions: NDArray[np.int64],
        *,
        is_real: NDArray[np.bool_],
        num_rows: int,
        offsets: NDArray[Any],
    ) -> Tensor:
        """Feed tokens to some slots and return the logits of each one's successor, [num_rows, Q, V]: row i is slot i.

        Args:
            rows: [n] the slots, below `num_rows`.
            ids: [n, Q] their tokens: the last known one, and those drafted behind it.
            positions: [n, Q] where they stand; 0 for padding.
            is_real: [n, Q] False for padding.
            num_rows: How many rows are computed; those that are not in `rows` are thrown away.
            offsets: [n] what is added to the positions to get those that the model counts.
        """
        fed, at, rope = (np.zeros((num_rows, ids.shape[1]), np.int64) for _ in range(3))
        write_slots = np.full(fed.shape, self.cache.trash, np.int64)
        at[rows], fed[rows], write_slots[rows] = positions, ids, np.where(is_real, rows[:, None], self.cache.trash)
        rope[rows] = positions + offsets[:, None]
        extent = self._extent(positions)
        self.cache.aim(rows=None, write_slots=self.tensor(write_slots), positions=self.tensor(at), extent=extent)
        logits: Tensor = self._forward(self._module, fed, at, extent, rope, {}).logits
        return logits

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """Return an array on the model's device."""
        return torch.from_numpy(array).to(self._device)

    def _extent(self, positions: NDArray[np.int64]) -> int:
        length = int(positions.max()) + 1
        return min(-(-length // EXTENT_STEP) * EXTENT_STEP, self._max_context)

    def _forward(
        self,
        module: Any,
        ids: NDArray[Any],
        positions: NDArray[np.int64],
        extent: int,
        rope: NDArray[np.int64] | None,
        inputs: Mapping[str, Tensor],
    ) -> Any:
        """Run `module` on [B, Q] ids, each looking at the positions up to its own, of `extent`."""
        start = time.perf_counter()
        with torch.inference_mode():
            hidden = torch.arange(extent, device=self._device) > self.tensor(positions).unsqueeze(-1)
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))
            out = module(
                input_ids=self.tensor(ids.astype(np.int64, copy=False)),
                attention_mask=mask.unsqueeze(1),
                position_ids=self.tensor(positions if rope is None else rope),
                past_key_values=self.cache,
                use_cache=True,
                **{k: v.to(self._device, self._dtype if v.is_floating_point() else None) for k, v in inputs.items()},
            )
            if self._routing is not None:
                chosen = self._routing.read_choices().cpu().numpy().astype(self._routing.shape.dtype)
                self.routes = chosen.reshape(*ids.shape, *chosen.shape[1:])
        self._stats.forward_s += time.perf_counter() - start
        return out
