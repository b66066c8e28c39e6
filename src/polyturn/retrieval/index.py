"""SearchIndex: a folder of passages that can be searched by words, by vectors, or by both.

    INDEX/  index.json      kind, version, number of passages, embedder of the vectors
            passages.jsonl  starts.npy                                  the texts
            vocab.index.json  params.index.json  *.csc.index.npy        BM25 scores, written by bm25s
            vectors.npy                                                 vectors, if any

A folder is written under a temporary name and then renamed, so a reader always sees a whole index. It contains no pickles,
so an index can be read without trusting its author.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from polyturn.core.errors import ConfigError, DataError, one_line
from polyturn.retrieval.bm25 import WORDS, Bm25, best_of, write_bm25
from polyturn.retrieval.dense import fuse, read_vectors, unit_rows, write_vectors
from polyturn.retrieval.passages import Passage, PassageStore

KIND, VERSION = "polyturn search index", 2
FUSED_DEPTH = 100
"""Each ranking contributes at least this many of its best passages to the fusion."""

_ABOUT = "index.json"


class Mode(Enum):
    """How passages are ranked."""

    BM25 = "bm25"
    DENSE = "dense"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A passage in a search result."""

    passage: Passage
    score: float


def build_index(
    passages: Iterable[Passage], folder: Path, *, vectors: NDArray[np.float32] | None = None, embedder: str | None = None
) -> int:
    """Write an index to a new folder and return the number of passages.

    Args:
        passages: The texts; iterated once.
        folder: The folder to create.
        vectors: [passages, size], a row per passage.
        embedder: Name of the vectors' embedder; searchers with another embedder are refused.

    Raises:
        ConfigError: the folder exists, the passages contain no words, or bm25s is not installed.
        DataError: there are no passages, or the number of vectors differs from the number of passages.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already; use a new folder for the index, or remove this one")
    scratch = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}")
    scratch.mkdir(parents=True)
    try:
        write_bm25(scratch, (passage.contents for passage in _some(PassageStore.write(scratch, passages))))
        num_passages = len(PassageStore(scratch))
        about: dict[str, Any] = {"kind": KIND, "version": VERSION, "words": WORDS, "num_passages": num_passages}
        if vectors is not None:
            if len(vectors) != num_passages:
                raise DataError(f"there are {len(vectors)} vectors for {num_passages} passages; each needs one, in order")
            write_vectors(scratch, vectors)
            about["vectors"] = {"size": vectors.shape[1], "embedder": embedder}
        (scratch / _ABOUT).write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return num_passages


def _some(passages: Iterable[Passage]) -> Iterable[Passage]:
    is_empty = True
    for passage in passages:
        is_empty = False
        yield passage
    if is_empty:
        raise DataError("there are no passages to index")


class SearchIndex:
    """An index on disk; `open` it. Safe to use from several threads."""

    def __init__(
        self,
        folder: Path,
        *,
        store: PassageStore,
        bm25: Bm25,
        vectors: NDArray[np.float32] | None,
        embedder: str | None,
    ) -> None:
        self.folder = folder
        self.embedder = embedder
        """Name of the vectors' embedder; None if unknown, or if there are no vectors."""
        self._store = store
        self._bm25 = bm25
        self._vectors = vectors

    @classmethod
    def open(cls, folder: Path) -> SearchIndex:
        """Open an index.

        Raises:
            ConfigError: the index does not exist, is damaged, or was built by another version of the library.
        """
        about = _read_about(folder)
        try:
            store = PassageStore(folder)
            bm25 = Bm25(folder, num_passages=len(store))
            vectors_about = about.get("vectors")
            vectors = None if vectors_about is None else read_vectors(folder)
            if len(store) != about["num_passages"] or (vectors is not None and vectors.shape[0] != len(store)):
                raise ValueError(f"{_ABOUT} has {about['num_passages']} passages, but there are {len(store)}")
        except (OSError, ValueError, TypeError, KeyError, EOFError) as problem:
            raise ConfigError(f"the index {folder} is damaged ({one_line(problem)}); build it again") from problem
        return cls(
            folder,
            store=store,
            bm25=bm25,
            vectors=vectors,
            embedder=vectors_about.get("embedder") if vectors_about else None,
        )

    def __len__(self) -> int:
        return len(self._store)

    @property
    def vector_size(self) -> int | None:
        """Size of the passages' vectors; None if there are none."""
        return None if self._vectors is None else self._vectors.shape[1]

    def search(
        self, query: str, *, topk: int, vector: NDArray[np.float32] | None = None, mode: Mode = Mode.BM25
    ) -> list[Hit]:
        """Return the best passages for a query, best first.

        Args:
            query: The query's text.
            topk: Largest number of passages.
            vector: The query's vector, [size], if the mode needs one.
            mode: How passages are ranked. Scores of different modes are not comparable.
        """
        if mode is Mode.BM25:
            numbers, scores = self._bm25.rank(query, limit=topk)
            return self._hits(zip(numbers.tolist(), scores.tolist(), strict=True))
        if self._vectors is None or vector is None or vector.shape != (self.vector_size,):
            shape = None if vector is None else vector.shape
            raise DataError(
                f"the index {self.folder} has vectors of size {self.vector_size}; the query's has the shape {shape}"
            )
        direction = unit_rows(vector[None], what="the query")[0]
        scores = np.asarray(self._vectors @ direction, np.float32)
        if mode is Mode.DENSE:
            best = best_of(scores, limit=topk)
            return self._hits(zip(best.tolist(), scores[best].tolist(), strict=True))
        depth = max(FUSED_DEPTH, topk)
        return self._hits(fuse([self._bm25.rank(query, limit=depth)[0], best_of(scores, limit=depth)], limit=topk))

    def _hits(self, ranked: Iterable[tuple[int, float]]) -> list[Hit]:
        return [Hit(passage=self._store[number], score=score) for number, score in ranked]


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / _ABOUT
    if not path.is_file():
        what = "no index" if folder.is_dir() else "nothing"
        raise ConfigError(
            f"there is {what} at {folder}; build one with `polyturn data index PASSAGES --out {shlex.quote(str(folder))}`"
        )
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ConfigError(f"the index {folder} is damaged ({_ABOUT}: {one_line(problem)}); build it again") from problem
    if not isinstance(about, dict) or about.get("kind") != KIND:
        raise ConfigError(f"{path} does not describe a search index; build one with `polyturn data index`")
    stored = (about.get("version"), about.get("words"))
    if stored != (VERSION, WORDS):
        raise ConfigError(
            f"the index {folder} has version {stored[0]!r} with words {stored[1]!r}; this polyturn reads version {VERSION} "
            f"with words {WORDS!r}. Build it again with `polyturn data index`"
        )
    return about
