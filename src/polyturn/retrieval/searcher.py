"""Searcher: searches an index from an event loop, for the search tool and the search server.

    hits = await searcher.search(["oslo", "rome"], topk=3)      a list of hits per query

A word search in a small index takes less than half a millisecond and runs on the event loop. Searches in large indices
and searches by vectors run in threads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyturn.core.errors import ConfigError, DataError, did_you_mean
from polyturn.infra.threads import DaemonThreads
from polyturn.retrieval.embedders import Embedder, EmbeddingError, read_embedder
from polyturn.retrieval.index import Hit, Mode, SearchIndex

INLINE_PASSAGES = 20_000
"""Largest product of passages and queries for which a word search runs on the event loop, without a thread."""


class Searcher:
    """Searches one index."""

    def __init__(self, index: SearchIndex, *, embedder: Embedder | None = None, mode: Mode | None = None) -> None:
        """Create a searcher; the default `mode` is hybrid with an embedder and bm25 without.

        Raises:
            ConfigError: the mode needs vectors that the index lacks, or an embedder for queries.
        """
        self.index = index
        self.mode = mode or (Mode.BM25 if embedder is None else Mode.HYBRID)
        self._embedder = embedder
        self._threads = DaemonThreads(name="search", max_threads=4)
        if self.mode is Mode.BM25:
            return
        if index.vector_size is None:
            raise ConfigError(
                f"the index {index.folder} has no vectors, which the mode {self.mode.value} needs; build it with "
                "`polyturn data index --embed …` or `--vectors`, or search with bm25"
            )
        if embedder is None:
            raise ConfigError(f"the mode {self.mode.value} needs vectors of queries; set `embed`")
        if index.embedder is not None and index.embedder != embedder.name:
            raise ConfigError(
                f"the passages of {index.folder} were embedded by {index.embedder!r}, but queries are by "
                f"{embedder.name!r}; use the same embedder for both"
            )

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *, base: Path | None = None) -> Searcher:
        """Create a searcher from `index`, `embed` and `mode` of a tool's config.

        Raises:
            ConfigError: a value is invalid.
        """
        name = config.get("mode")
        modes = [mode.value for mode in Mode]
        if name is not None and name not in modes:
            raise ConfigError(f"the mode of a search is {name!r}.{did_you_mean(str(name), modes)}")
        return cls(
            SearchIndex.open((base or Path()) / os.path.expanduser(str(config["index"]))),
            embedder=read_embedder(config.get("embed"), base=base),
            mode=None if name is None else Mode(name),
        )

    def open(self) -> None:
        """Add a user."""
        if self._embedder is not None:
            self._embedder.open()

    async def close(self) -> None:
        """Remove a user."""
        if self._embedder is not None:
            await self._embedder.close()

    async def search(self, queries: Sequence[str], *, topk: int) -> list[list[Hit]]:
        """Return the best passages for each query.

        Raises:
            EmbeddingError: the queries could not be embedded, or the vector of one has no direction.
        """
        vectors: NDArray[np.float32] | None = None
        if self._embedder is not None and self.mode is not Mode.BM25:
            vectors = await self._embedder.embed(queries)
            if vectors.shape[1] != self.index.vector_size:
                raise EmbeddingError(
                    f"{self._embedder.name} returned vectors of size {vectors.shape[1]}; the index has "
                    f"{self.index.vector_size}"
                )
        if self.mode is Mode.BM25 and len(self.index) * len(queries) <= INLINE_PASSAGES:
            return self._search(queries, vectors, topk)
        try:
            hits: list[list[Hit]] = await self._threads.run(self._search, queries, vectors, topk)
        except DataError as problem:
            raise EmbeddingError(str(problem)) from problem
        return hits

    def _search(self, queries: Sequence[str], vectors: NDArray[np.float32] | None, topk: int) -> list[list[Hit]]:
        rows = [None] * len(queries) if vectors is None else list(vectors)
        return [
            self.index.search(query, topk=topk, vector=vector, mode=self.mode)
            for query, vector in zip(queries, rows, strict=True)
        ]


def documents(hits: Sequence[Hit], *, with_scores: bool = True) -> list[dict[str, Any]]:
    """Return hits in the form of retrieval servers: {"document": {…}, "score": 0.7} with scores, else the bare documents."""
    documents = [{"id": hit.passage.id, "contents": hit.passage.contents} for hit in hits]
    if not with_scores:
        return documents
    return [{"document": doc, "score": round(hit.score, 6)} for doc, hit in zip(documents, hits, strict=True)]
