"""BM25: scores passages for the words of a query (Robertson and Zaragoza 2009, with Lucene's idf).

When an index is built, `bm25s` computes each word's contribution to each passage's score and stores it in arrays. The
arrays are memory-mapped (processes share them, and no pickle is read), and summed for a query. `words` splits texts.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyturn.core.errors import ConfigError

K1, B = 1.2, 0.75
WORDS = "casefold-1"
"""Name of the rules for splitting texts into words; an index with other rules is refused."""

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+")


def words(text: str) -> list[str]:
    """Return a text's words, case-folded: "Über 3 Dinge, os.path" -> ["über", "3", "dinge", "os", "path"]."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def write_bm25(folder: Path, texts: Iterable[str]) -> None:
    """Score every word of every text and write the index to a folder.

    Raises:
        ConfigError: the texts contain no words, or bm25s is not installed.
    """
    vocabulary: dict[str, int] = {}
    cut: list[Any] = [array("i", (vocabulary.setdefault(w, len(vocabulary)) for w in words(text))) for text in texts]
    if not vocabulary:
        raise ConfigError("the passages contain no words, so they cannot be searched")
    scored = _bm25s().BM25(method="lucene", k1=K1, b=B)
    scored.index((cut, vocabulary), show_progress=False)
    scored.save(folder, show_progress=False)


class Bm25:
    """Scores passages for a query."""

    def __init__(self, folder: Path, *, num_passages: int) -> None:
        self._scored = _bm25s().BM25.load(folder, mmap=True, verbosity=0)
        scores = self._scored.scores
        is_whole = len(scores["indptr"]) >= len(self._scored.vocab_dict) and scores["indptr"][-1] == len(scores["indices"])
        if not is_whole or scores["num_docs"] != num_passages:
            raise ValueError("the index's words do not match its passages")

    def rank(self, query: str, *, limit: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the numbers and scores of the best passages, best first; ties in the order of passages.

        Passages without a word of the query are left out.
        """
        numbers: dict[int, list[int]] = {}
        for word, times in Counter(words(query)).items():  # each word is scored once, then weighted by its count
            if word in self._scored.vocab_dict:
                numbers.setdefault(times, []).append(self._scored.vocab_dict[word])
        scores = np.zeros(self._scored.scores["num_docs"], np.float32)
        for times, ids in numbers.items():
            scores += times * self._scored.get_scores_from_ids(ids)
        best = best_of(scores, limit=limit)
        best = best[scores[best] > 0]
        return best, scores[best]


def _bm25s() -> Any:
    try:
        import bm25s
    except ModuleNotFoundError as missing:
        raise ConfigError(f"word search needs {missing.name}: pip install 'polyturn[search]'") from None
    logging.getLogger("bm25s").setLevel(logging.INFO)  # at DEBUG, bm25s logs every step
    return bm25s


def best_of(scores: NDArray[np.float32], *, limit: int) -> NDArray[np.int64]:
    """Return the indices of the `limit` highest scores, highest first; ties in the order of indices."""
    if limit < len(scores):
        worst = np.partition(scores, len(scores) - limit)[len(scores) - limit]
        indices = np.flatnonzero(scores > worst)
        indices = np.concatenate([indices, np.flatnonzero(scores == worst)[: limit - len(indices)]])
    else:
        indices = np.arange(len(scores))
    return indices[np.argsort(-scores[indices], kind="stable")].astype(np.int64)
