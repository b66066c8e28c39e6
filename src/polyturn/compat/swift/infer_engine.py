"""swift.infer_engine, and what swift.llm of earlier releases offered: requests, responses, and names of engines.

The engines are names only, for annotations and imports: a scheduler is given the engine of its episode.
"""

from __future__ import annotations

from typing import Any

from polyturn.core.errors import ConfigError


class InferEngine:
    """An engine of ms-swift. Not here: a scheduler uses `self.infer_engine`, which is given to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"{type(self).__name__} cannot be made here; a scheduler generates with self.infer_engine, and a reward that "
            "needs a model of its own asks a server"
        )


class TransformersEngine(InferEngine):
    """A name for annotations."""


class PtEngine(InferEngine):
    """A name for annotations."""


class SwiftVllmEngine(InferEngine):
    """A name for annotations."""


VllmEngine = SwiftVllmEngine  # the name that its users import


class GRPOVllmEngine(InferEngine):
    """A name for annotations."""
