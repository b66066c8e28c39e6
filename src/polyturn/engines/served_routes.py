"""Routes from the experts that servers report for each token.

    vLLM      routed_experts: base64 of an .npy file    [R, every layer, k]  uint8 or uint16
    SGLang    routed_experts: base64 of its bytes       [R * every layer * k]  int32

Both begin where they are asked to and end with the last but one token. Layers without experts have rows too, which say
nothing.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from polyturn.core.errors import EngineError
from polyturn.core.generation import GenerateRequest
from polyturn.core.routing import RouteShape

FLAG = "--enable-return-routed-experts"
"""The flag with which either server reports them."""


class ServedRoutes:
    """The routes of one server's model."""

    def __init__(self, shape: RouteShape | None, *, is_needed: bool) -> None:
        """Read routes of `shape`, None for none; `is_needed` refuses a server that gives none."""
        self._shape = shape
        self._is_needed = is_needed

    @property
    def are_wanted(self) -> bool:
        """Whether requests ask for routes."""
        return self._shape is not None

    def check_given(self, gives: bool, *, url: str) -> None:
        """Refuse a server that gives none where they are needed.

        Raises:
            EngineError: it does.
        """
        if self._is_needed and self._shape is not None and not gives:
            raise EngineError(
                f"algorithm.routing.replay is on and the server at {url} does not say which experts tokens went to; start "
                f"it with {FLAG}, or set algorithm.routing.replay to auto or off"
            )

    def read_npy(self, request: GenerateRequest, num_sampled: int, text: str | None) -> Any | None:
        """Return the routes in vLLM's answer; None where there are none."""
        if self._shape is None or not text:
            return None
        return self._cut(request, num_sampled, np.load(io.BytesIO(_decoded(text)), allow_pickle=False))

    def read_bytes(self, request: GenerateRequest, num_sampled: int, text: str | None) -> Any | None:
        """Return the routes in SGLang's answer; None where there are none."""
        if self._shape is None or not text:
            return None
        flat = np.frombuffer(_decoded(text), np.int32)
        return self._cut(request, num_sampled, flat.reshape(-1, self._shape.num_hidden_layers, self._shape.top_k))

    def _cut(self, request: GenerateRequest, num_sampled: int, array: Any) -> Any | None:
        """Return the routes from where they were asked for; a server may say more, and one that says less has none."""
        assert self._shape is not None
        count = len(request.prompt_ids) + num_sampled - 1 - request.routed_from
        return self._shape.read(array[len(array) - count :]) if 0 < count <= len(array) else None


def _decoded(text: str) -> bytes:
    return base64.b64decode(text, validate=True)  # else what is not base64 would be left out, and the rest be read
