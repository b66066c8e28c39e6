"""BM25: a score of a passage for the words of a query (Robertson and Zaragoza 2009; the idf that Lucene uses).

`bm25s` works out what a word adds to each passage's score when the index is built, keeps it in arrays that are mapped from
disk (no pickle is read, and processes share them), and sums them for a query. Ours is how texts are cut into words.
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
"""Names how texts are cut into words; an index that was cut otherwise is not read."""

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+")


def words(text: str) -> list[str]:
    """Return a text's words, without case: "Über 3 Dinge, os.path" -> ["über", "3", "dinge", "os", "path"]."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def write_bm25(folder: Path, texts: Iterable[str]) -> None:
    """Score every word of every text and write the index to a folder.

    Raises:
        ConfigError: bm25s is not installed.
    """
    vocabulary: dict[str, int] = {}
    cut: list[Any] = [array("i", (vocabulary.setdefault(w, len(vocabulary)) for w in words(text))) for text in texts]
    if not vocabulary:
        raise ConfigError("no passage holds a word; there is nothing to search for")
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
            raise ValueError("the words of the index do not fit its passages")

    def rank(self, query: str, *, limit: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the numbers and scores of the best passages, best first; of equals the earlier one.

        A passage that shares no word with the query is not among them.
        """
        numbers: dict[int, list[int]] = {}
        for word, times in Counter(words(query)).items():  # a word said a thousand times costs no more than once
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
        raise ConfigError(f"searching by words needs {missing.name}: pip install 'polyturn[search]'") from None
    logging.getLogger("bm25s").setLevel(logging.INFO)  # it tells every step at DEBUG
    return bm25s


def best_of(scores: NDArray[np.float32], *, limit: int) -> NDArray[np.int64]:
    """Return the places of the `limit` highest scores, highest first; of equals the earlier one."""
    if limit < len(scores):
        worst = np.partition(scores, len(scores) - limit)[len(scores) - limit]
        places = np.flatnonzero(scores > worst)
        places = np.concatenate([places, np.flatnonzero(scores == worst)[: limit - len(places)]])
    else:
        places = np.arange(len(scores))
    return places[np.argsort(-scores[places], kind="stable")].astype(np.int64)
