"""Embeddings of texts: an OpenAI-compatible endpoint, or a function of yours.

    embed: {url: "http://127.0.0.1:8001/v1/embeddings", model: bge-small, token: …}
    embed: "vectors.py:embed"                                      def embed(texts: list[str]) -> matrix, a row for each

Queries and passages must be embedded alike, so the index records the name of its embedder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polyturn.core.errors import ConfigError, PolyturnError, did_you_mean, one_line
from polyturn.core.plugins import import_attr
from polyturn.infra.threads import DaemonThreads
from polyturn.retrieval.dense import as_matrix
from polyturn.tools.http_service import HttpService

BATCH = 64
"""Texts in one request, when passages are embedded."""


class EmbeddingError(PolyturnError, RuntimeError):
    """Texts could not be turned into vectors."""


class Embedder(Protocol):
    """Turns texts into vectors."""

    name: str
    """Its name; kept in the index."""

    def open(self) -> None:
        """Count one user."""

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return [texts, size]; raises EmbeddingError."""

    async def close(self) -> None:
        """Count one user off."""


class EndpointEmbedder:
    """Asks an OpenAI-compatible endpoint."""

    def __init__(self, url: str, *, model: str, token: str | None = None, timeout_s: float = 30.0) -> None:
        self.name = model
        self._service = HttpService(url, timeout_s=timeout_s, max_concurrent=16, max_tries=3, token=token)

    def open(self) -> None:
        """Count one user; the first one makes the connections."""
        self._service.open()

    async def close(self) -> None:
        """Count one user off; the last one closes the connections."""
        await self._service.close()

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return [texts, size].

        Raises:
            EmbeddingError: the endpoint failed, or its reply is not one vector for each text.
        """
        reply = await self._service.post({"model": self.name, "input": list(texts)})
        if reply.status != "ok":
            raise EmbeddingError(f"the embeddings of {self._service.url}: {reply.error}")
        try:
            rows = sorted(reply.data["data"], key=lambda row: row["index"])
            vectors = as_matrix([row["embedding"] for row in rows], what=self._service.url)
        except (LookupError, TypeError, ValueError) as problem:
            raise EmbeddingError(f"the reply of {self._service.url} cannot be read: {one_line(problem):.200}") from problem
        return _one_each(vectors, texts, who=self._service.url)


class FunctionEmbedder:
    """Calls a plain function, in a thread."""

    def __init__(self, function: Callable[[list[str]], Any], *, name: str) -> None:
        self.name = name
        self._function = function
        self._threads = DaemonThreads(name="embed", max_threads=1)

    def open(self) -> None:
        """Do nothing: there is nothing to open."""

    async def close(self) -> None:
        """Do nothing."""

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return [texts, size].

        Raises:
            EmbeddingError: the function raised, or did not return one vector for each text.
        """
        try:
            vectors = as_matrix(await self._threads.run(self._function, list(texts)), what=self.name)
        except Exception as problem:
            raise EmbeddingError(f"{self.name} failed: {one_line(problem):.300}") from problem
        return _one_each(vectors, texts, who=self.name)


def read_embedder(value: Any, *, base: Path | None = None) -> Embedder | None:
    """Return the embedder that a config's `embed` describes; None for None.

    Raises:
        ConfigError: it describes nothing that is known.
    """
    if value is None:
        return None
    if isinstance(value, str):
        function = import_attr(value, base=base)
        if not callable(function):
            raise ConfigError(f"embed: {value!r} is not a function; it must take a list of texts and return a row for each")
        return FunctionEmbedder(function, name=value.rpartition("/")[2])
    known = {"url", "model", "token", "timeout"}
    if not isinstance(value, Mapping) or not {"url", "model"} <= set(value):
        raise ConfigError(f"embed is {str(value)!r:.100}; write {{url: …, model: …}}, or 'file.py:function'")
    for key in value:
        if key not in known:
            raise ConfigError(f"embed: there is no {key!r}.{did_you_mean(str(key), known)}")
    timeout_s = float(value.get("timeout", 30.0))
    return EndpointEmbedder(str(value["url"]), model=str(value["model"]), token=value.get("token"), timeout_s=timeout_s)


def embed_all(texts: Sequence[str], embedder: Embedder) -> NDArray[np.float32]:
    """Return the vectors of many texts, in an event loop of its own."""

    async def embed() -> NDArray[np.float32]:
        embedder.open()
        try:
            batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
            return np.concatenate([await embedder.embed(batch) for batch in batches])
        finally:
            await embedder.close()

    return asyncio.run(embed())


def _one_each(vectors: NDArray[np.float32], texts: Sequence[str], *, who: str) -> NDArray[np.float32]:
    if len(vectors) != len(texts):
        raise EmbeddingError(f"{who} returned {len(vectors)} vectors for {len(texts)} texts")
    return vectors
