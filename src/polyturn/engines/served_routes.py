"""Read routes from the experts that servers report for each token.

    vLLM      routed_experts: base64 of an .npy file    [R, every layer, k]  uint8 or uint16
    SGLang    routed_experts: base64 of its bytes       [R * every layer * k]  int32

Both start at the requested token and end with the last but one token. Layers without experts have rows too, without meaning.
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
"""The flag of both servers that turns reporting on."""


class ServedRoutes:
    """The routes of one server's model."""

    def __init__(self, shape: RouteShape | None, *, is_needed: bool) -> None:
        """Read routes of `shape`; None reads none. With `is_needed`, a server without routes is an error."""
        self._shape = shape
        self._is_needed = is_needed

    @property
    def are_wanted(self) -> bool:
        """Whether requests ask for routes."""
        return self._shape is not None

    def check_reported(self, are_reported: bool, *, url: str) -> None:
        """Raise if routes are needed and the server does not report them.

        Raises:
            EngineError: the server does not report routes.
        """
        if self._is_needed and self._shape is not None and not are_reported:
            raise EngineError(
                f"algorithm.routing.replay is on and the server at {url} does not report the experts of tokens; start it "
                f"with {FLAG}, or set algorithm.routing.replay to auto or off"
            )

    def read_npy(self, request: GenerateRequest, num_sampled: int, text: str | None) -> Any | None:
        """Return the routes in vLLM's answer; None without any."""
        if self._shape is None or not text:
            return None
        return self._cut(request, num_sampled, np.load(io.BytesIO(_decoded(text)), allow_pickle=False))

    def read_bytes(self, request: GenerateRequest, num_sampled: int, text: str | None) -> Any | None:
        """Return the routes in SGLang's answer; None without any."""
        if self._shape is None or not text:
            return None
        flat = np.frombuffer(_decoded(text), np.int32)
        return self._cut(request, num_sampled, flat.reshape(-1, self._shape.num_hidden_layers, self._shape.top_k))

    def _cut(self, request: GenerateRequest, num_sampled: int, array: Any) -> Any | None:
        """Return the routes from the requested token on, even if the server reports more; None if it reports fewer."""
        assert self._shape is not None
        count = len(request.prompt_ids) + num_sampled - 1 - request.routed_from
        return self._shape.read(array[len(array) - count :]) if 0 < count <= len(array) else None


def _decoded(text: str) -> bytes:
    return base64.b64decode(text, validate=True)  # without validation, invalid characters would be skipped
