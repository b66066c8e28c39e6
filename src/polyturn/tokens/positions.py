"""Position ids of a row: 0, 1, 2, … for most models, and three numbers per token for models with M-RoPE.

    token        t0  t1  <image 2x2 .........>  t2  t3
    temporal      0   1    2    2    2    2      4   5
    height        0   1    2    2    3    3      4   5
    width         0   1    2    3    2    3      4   5

Trainer and engine share this code, because their positions must agree. The positions come from the model's `get_rope_index`,
if it has one. The position of a token depends only on the tokens up to it, so a row may be cut or extended without changing
the positions of other tokens. After the last medium, each position is the token's index plus `offset`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyturn.core.arrays import Ids
from polyturn.core.media import KINDS, Media
from polyturn.tokens.multimodal import MediaProcessor

_TYPE_ARGUMENTS = ("token_type_ids", "mm_token_type_ids")
"""Names that models use for the argument with the type of each token."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowInputs:
    """The inputs of the model for a row, except its token ids."""

    positions: NDArray[np.int64] | None
    """[3, T], or None if the position of token t is t."""
    offset: int
    """For text tokens appended to the row: their position minus their index."""
    inputs: dict[str, Any]
    """Name -> tensor: the inputs of the row's media."""
    types: NDArray[np.int8]
    """[T] 0 for text, 1 for an image's features, 2 for a video's, 3 for a sound's."""


class MediaRows:
    """Computes the inputs of one model, except token ids."""

    def __init__(self, model: Any, media: MediaProcessor) -> None:
        """Read `get_rope_index` and the arguments of `forward` from a transformers model."""
        self.media = media
        base = model.base_model
        self._rope_index: Callable[..., Any] | None = (
            base.get_rope_index if callable(inspect.getattr_static(base, "get_rope_index", None)) else None
        )
        self._rope_takes = frozenset(inspect.signature(self._rope_index).parameters) if self._rope_index else frozenset()
        self.takes = frozenset(inspect.signature(base.forward).parameters)
        """The arguments of the model's forward pass."""
        self.type_numbers = {kind: number for number, kind in enumerate(KINDS, start=1)}
        """The number of each kind's features in `RowInputs.types`."""

    def row(self, ids: Ids, media: Sequence[Media]) -> RowInputs:
        """Return the inputs of the model for `ids`, a prefix of a segment with `media`.

        Raises:
            TemplateError: the features in `ids` are not those of a prefix of `media`.
            DataError: a medium cannot be processed.
        """
        types = self.media.types(ids)
        media_in_row = media[: self.media.shown(ids, media)]
        inputs = self.media.inputs(media_in_row)
        if self._rope_index is None or not media_in_row:
            return RowInputs(positions=None, offset=0, inputs=inputs, types=types)
        positions, offset = self._mrope(ids, types, inputs)
        return RowInputs(positions=positions, offset=offset, inputs=inputs, types=types)

    def stack(self, rows: Sequence[tuple[Ids, Sequence[Media]]], *, width: int, device: Any) -> dict[str, Any]:
        """Return the arguments, other than ids, of a forward pass over several rows, padded on the right to `width`.

        Positions are [1, width], or [3, B, width] if the model has M-RoPE and a row has media. The inputs of the media are
        concatenated in row order.

        Raises:
            TemplateError, DataError: see `row`.
        """
        import torch

        rows_made = [self.row(ids, media) for ids, media in rows]
        out: dict[str, Any] = {"position_ids": torch.arange(width)[None]}
        if any(row.positions is not None for row in rows_made):
            positions_3BT = np.tile(np.arange(width), (3, len(rows_made), 1))
            for b, row in enumerate(rows_made):
                if row.positions is not None:
                    positions_3BT[:, b, : row.positions.shape[1]] = row.positions
            out["position_ids"] = torch.from_numpy(positions_3BT)
        types_BT = np.zeros((len(rows_made), width), np.int64)
        for b, row in enumerate(rows_made):
            types_BT[b, : len(row.types)] = row.types
        out |= {name: torch.from_numpy(types_BT) for name in _TYPE_ARGUMENTS if name in self.takes}
        for name in dict.fromkeys(name for row in rows_made for name in row.inputs):
            out[name] = torch.cat([row.inputs[name] for row in rows_made if name in row.inputs])
        return {name: value.to(device) for name, value in out.items()}

    def _mrope(self, ids: Ids, types: NDArray[np.int8], inputs: dict[str, Any]) -> tuple[NDArray[np.int64], int]:
        import torch

        assert self._rope_index is not None
        ids_1T = torch.from_numpy(ids.astype(np.int64))[None]
        offered = {
            "mm_token_type_ids": torch.from_numpy(types.astype(np.int64))[None],
            "attention_mask": torch.ones_like(ids_1T),
            **inputs,
        }
        rope_arguments = {name: value for name, value in offered.items() if name in self._rope_takes}
        positions_31T, offsets = self._rope_index(input_ids=ids_1T, **rope_arguments)
        return positions_31T[:, 0].numpy().astype(np.int64), int(offsets.flatten()[0])
