"""swift.infer_engine, and swift.llm of earlier releases: requests, responses, and names of engines.

The engines exist only for annotations and imports; a scheduler gets the engine of its episode.
"""

from __future__ import annotations

from typing import Any

from polyturn.core.errors import ConfigError


class InferEngine:
    """An engine of ms-swift, which cannot be created; a scheduler uses `self.infer_engine`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"{type(self).__name__} cannot be created here; a scheduler generates with self.infer_engine, and a reward "
            "that needs a model calls a server"
        )


class TransformersEngine(InferEngine):
    """A name for annotations."""


class PtEngine(InferEngine):
    """A name for annotations."""


class SwiftVllmEngine(InferEngine):
    """A name for annotations."""


VllmEngine = SwiftVllmEngine  # the name in users' imports


class GRPOVllmEngine(InferEngine):
    """A name for annotations."""
