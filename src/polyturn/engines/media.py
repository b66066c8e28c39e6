"""ShownPrompt: a prompt with media, in the form used by the embedded engine's slots.

    ids    <|vision_start|> <|image_pad|> <|image_pad|> <|vision_end|> What ...
    keys        320             -7            -7             321       64  ...      7 identifies this picture

Two prompts with equal ids may differ, because different pictures have the same placeholders. So the number of a medium takes
the place of its placeholders when prefixes are compared. Ids do not determine a token's position for the model either (see
`tokens/positions.py`). A medium is computed in one piece: no cut of the cache or of a chunk falls inside it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from polyturn.core.arrays import Ids
from polyturn.core.errors import ConfigError, DataError, EngineError, TemplateError
from polyturn.core.generation import GenerateRequest
from polyturn.core.media import Media
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.tokens.positions import MediaRows


class ShownPrompt:
    """One request's media: its keys, positions, and the inputs of a range of its tokens."""

    def __init__(self, ids: Ids, media: tuple[Media, ...], rows: MediaRows, numbers: list[int]) -> None:
        self._ids = ids
        self._media = media
        self._processor = rows.media
        if (num_shown := rows.media.shown(ids, media)) < len(media):
            raise TemplateError(f"the request has {len(media)} media and its ids show {num_shown}")
        row = rows.row(ids, media)
        self.offset = row.offset
        """A token t after the prompt has the position t + offset."""
        self._positions = row.positions
        self.keys: Ids = ids.copy()
        """[T] the ids, or minus the medium's number at tokens that stand for a medium's features."""
        spans = []
        left = {kind: np.flatnonzero(row.types == number).tolist() for kind, number in rows.type_numbers.items()}
        for medium, number in zip(media, numbers, strict=True):
            count = self._processor.expansion(medium).num_features
            taken, left[medium.kind] = left[medium.kind][:count], left[medium.kind][count:]
            self.keys[taken] = -number
            spans.append((taken[0], taken[-1] + 1))
        self._spans = np.array(spans, np.int64)
        """[M, 2] half-open range of the tokens of each medium's features."""

    def before(self, index: int) -> int:
        """Return `index`, or the start of a medium that a cut at `index` would divide."""
        cut = (self._spans[:, 0] < index) & (index < self._spans[:, 1])
        return int(self._spans[cut, 0].min()) if cut.any() else index

    def behind(self, index: int) -> int:
        """Return `index`, or the end of a medium that a cut at `index` would divide."""
        cut = (self._spans[:, 0] < index) & (index < self._spans[:, 1])
        return int(self._spans[cut, 1].max()) if cut.any() else index

    def ids(self, keys: Ids, start: int) -> Ids:
        """Return the model's ids for the `keys` from index `start` on; after the prompt, keys are ids."""
        at = np.flatnonzero(keys < 0)
        if not len(at):
            return keys
        ids = keys.copy()
        ids[at] = self._ids[start + at]
        return ids

    def positions(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the positions of the tokens from `start` to `end`: [3, end - start], or [end - start] without M-RoPE."""
        steps = np.arange(start, end)
        if self._positions is None:
            return steps + self.offset
        inside = self._positions[:, start:end]
        behind = np.arange(max(start, self._positions.shape[1]), end) + self.offset
        return np.concatenate([inside, np.tile(behind, (3, 1))], axis=1)

    def inputs(self, start: int, end: int) -> dict[str, Any]:
        """Return the model's inputs for the media between `start` and `end`."""
        return self._processor.inputs(
            [m for m, (first, last) in zip(self._media, self._spans, strict=True) if start <= first and last <= end]
        )


class ShownPrompts:
    """Makes the `ShownPrompt` of each request, for one model and its processor."""

    def __init__(self, model: PreTrainedModel, processor: MediaProcessor) -> None:
        """Use the model and its processor.

        Raises:
            ConfigError: the tokens of an image attend to each other in both directions, which the cache does not support.
        """
        self._rows = MediaRows(model, processor)
        if "token_type_ids" in self._rows.takes:
            raise ConfigError(
                f"in {type(model).__name__} the tokens of an image attend to each other in both directions, and the "
                "embedded engine computes causal attention; use a served engine, or model.processor=none to train it "
                "on text"
            )
        self._features = np.array(processor.token_ids, np.int32)
        self._numbers: dict[bytes, int] = {}

    def of(self, request: GenerateRequest) -> ShownPrompt | None:
        """Return the media of a request; None for text.

        Raises:
            EngineError: ids and media do not match, or a medium cannot be processed.
        """
        if not request.media:
            if np.isin(request.prompt_ids, self._features).any():
                raise EngineError(f"request {request.request_id!r} has placeholders for media, and no media")
            return None
        try:
            prompt = ShownPrompt(
                request.prompt_ids, request.media, self._rows, [self._number(medium) for medium in request.media]
            )
        except (TemplateError, DataError) as problem:
            raise EngineError(f"request {request.request_id!r}: {problem}") from problem
        if prompt.keys[-1] < 0:
            raise EngineError(f"request {request.request_id!r} ends with a medium; text must follow it")
        return prompt

    def _number(self, medium: Media) -> int:
        digest = hashlib.blake2b(repr((medium.kind, medium.source)).encode(), digest_size=16).digest()
        return self._numbers.setdefault(digest, len(self._numbers) + 1)
