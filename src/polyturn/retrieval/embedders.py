"""Embeds texts with an OpenAI-compatible endpoint or with a user's function.

    embed: {url: "http://127.0.0.1:8001/v1/embeddings", model: bge-small, token: …}
    embed: "vectors.py:embed"                                      def embed(texts: list[str]) -> matrix, a row per text

Queries and passages need the same embedder, so the index records the embedder's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyturn.core.errors import ConfigError, PolyturnError, did_you_mean, one_line
from polyturn.infra.plugins import import_attr
from polyturn.infra.threads import DaemonThreads
from polyturn.retrieval.dense import as_matrix
from polyturn.tools.http_service import HttpService

BATCH = 64
"""Number of passages in one request."""


class EmbeddingError(PolyturnError, RuntimeError):
    """Texts could not be embedded."""


class Embedder:
    """Turns texts into vectors."""

    name: str
    """The embedder's name, stored in the index."""

    def open(self) -> None:
        """Add one user."""

    async def close(self) -> None:
        """Remove one user."""

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of the texts: [texts, size].

        Raises:
            EmbeddingError: the texts could not be embedded, or there are not as many vectors as texts.
        """
        vectors = await self.vectors_of(texts)
        if len(vectors) != len(texts):
            raise EmbeddingError(f"{self.name} returned {len(vectors)} vectors for {len(texts)} texts")
        return vectors

    async def vectors_of(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors, unchecked; a subclass defines it."""
        raise NotImplementedError


class EndpointEmbedder(Embedder):
    """Embeds texts with an OpenAI-compatible endpoint."""

    def __init__(self, url: str, *, model: str, token: str | None = None, timeout_s: float = 30.0) -> None:
        self.name = model
        self._service = HttpService(url, timeout_s=timeout_s, max_concurrent=16, max_tries=3, token=token)

    def open(self) -> None:
        """Add a user; the first one opens the connections."""
        self._service.open()

    async def close(self) -> None:
        """Remove a user; the last one closes the connections."""
        await self._service.close()

    async def vectors_of(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the endpoint's vectors."""
        reply = await self._service.post({"model": self.name, "input": list(texts)})
        if reply.status != "ok":
            raise EmbeddingError(f"the embeddings endpoint {self._service.url} failed: {reply.error}")
        try:
            rows = sorted(reply.data["data"], key=lambda row: row["index"])
            return as_matrix([row["embedding"] for row in rows], what=self._service.url)
        except (LookupError, TypeError, ValueError) as problem:
            raise EmbeddingError(f"the reply of {self._service.url} cannot be read: {one_line(problem):.200}") from problem


class FunctionEmbedder(Embedder):
    """Embeds texts with a function, called in a thread."""

    def __init__(self, function: Callable[[list[str]], Any], *, name: str) -> None:
        self.name = name
        self._function = function
        self._threads = DaemonThreads(name="embed", max_threads=1)

    async def vectors_of(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the function's vectors."""
        try:
            return as_matrix(await self._threads.run(self._function, list(texts)), what=self.name)
        except Exception as problem:
            raise EmbeddingError(f"{self.name} failed: {one_line(problem):.300}") from problem


def read_embedder(value: Any, *, base: Path | None = None) -> Embedder | None:
    """Create the embedder that a config's `embed` describes; return None if it is None.

    Raises:
        ConfigError: the value is invalid.
    """
    if value is None:
        return None
    if isinstance(value, str):
        function = import_attr(value, base=base)
        if not callable(function):
            raise ConfigError(
                f"embed: {value!r} is not a function; use one that takes a list of texts and returns a row per text"
            )
        return FunctionEmbedder(function, name=value.rpartition("/")[2])
    known = {"url", "model", "token", "timeout"}
    if not isinstance(value, Mapping) or not {"url", "model"} <= set(value):
        raise ConfigError(f"embed is {str(value)!r:.100}; write {{url: …, model: …}}, or 'file.py:function'")
    for key in value:
        if key not in known:
            raise ConfigError(f"embed has no option {key!r}.{did_you_mean(str(key), known)}")
    try:
        timeout_s = float(value.get("timeout", 30.0))
    except (TypeError, ValueError):
        raise ConfigError(f"embed: timeout is {value['timeout']!r:.100}; use a number of seconds") from None
    return EndpointEmbedder(str(value["url"]), model=str(value["model"]), token=value.get("token"), timeout_s=timeout_s)


def embed_all(texts: Sequence[str], embedder: Embedder) -> NDArray[np.float32]:
    """Return the vectors of many texts, [texts, size]; blocks, and uses a new event loop."""

    async def embed() -> NDArray[np.float32]:
        embedder.open()
        try:
            batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
            return np.concatenate([await embedder.embed(batch) for batch in batches])
        finally:
            await embedder.close()

    return asyncio.run(embed())
