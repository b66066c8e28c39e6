"""Searches the texts of recorded trajectories: messages, reasoning, arguments of tool calls and tool results.

    words       "apples seven"      each word occurs in some text of the trajectory, ignoring case
    expression  "#### -?[0-9]+$"    one text of the trajectory matches

Texts are kept dictionary-encoded, so a prompt shared by a thousand trajectories is searched once, and a second search reads
no file. Expressions are RE2's, which take linear time. Texts are matched in pieces, so that a search can time out.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from polyturn.core.errors import DataError, one_line
from polyturn.core.reward import brief
from polyturn.store.part_file import PartFile

MAX_PATTERN = 500
"""Largest number of characters of the words or the expression."""
MAX_HELD = 1 << 30
"""Bytes of text to keep in memory; further text is read again for each search."""
TIMEOUT_S = 30.0
PartKey = tuple[str, tuple[int, int]]
"""Name of a part, and the time and size of its file."""
_PIECE = 4096
"""Number of texts between two checks of the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextQuery:
    """The words or the expression of a search."""

    text: str
    is_expression: bool = False
    stop: threading.Event | None = None
    """Ends the search when set."""
    until: float = field(default_factory=lambda: time.monotonic() + TIMEOUT_S)

    @property
    def patterns(self) -> list[str]:
        """The expressions, each of which must match some text of a trajectory."""
        words = [self.text] if self.is_expression else [re.escape(word) for word in self.text.split()]
        return [word for word in words if word]

    def check(self) -> None:
        """Check the length and syntax.

        Raises:
            DataError: the text is too long, or not a valid expression.
        """
        if not isinstance(self.text, str):
            raise DataError(f"the search text is {brief(self.text)}; use words: run.search('lamp chair')")
        if len(self.text) > MAX_PATTERN:
            raise DataError(f"the search text has {len(self.text)} characters; at most {MAX_PATTERN} are allowed")
        for pattern in self.patterns:
            try:
                pc.match_substring_regex(pa.array([""]), pattern, ignore_case=True)
            except (pa.ArrowException, UnicodeError) as problem:
                raise DataError(f"{self.text!r:.200} is not a regular expression: {one_line(problem)}") from problem

    def matches(self, texts: pa.Array, pattern: str) -> NDArray[np.bool_]:
        """Return [N] whether each text matches.

        Raises:
            DataError: the search took too long, or was stopped.
        """
        matching = []
        for start in range(0, len(texts), _PIECE):
            if self.stop is not None and self.stop.is_set():
                raise DataError("the search was stopped by its caller")
            if time.monotonic() > self.until:
                raise DataError(f"the search took longer than {TIMEOUT_S:g} s; use fewer words, or filter the table first")
            piece = pc.match_substring_regex(texts.slice(start, _PIECE), pattern, ignore_case=True)
            matching.append(pc.fill_null(piece, False).to_numpy(zero_copy_only=False))
        return np.concatenate([*matching, np.empty(0, np.bool_)])


class _Texts(NamedTuple):
    """The texts of one column of one row group."""

    distinct: pa.Array
    """[D] the distinct texts."""
    which: NDArray[np.int64]
    """[N] index in `distinct` of each text of the column."""
    row: NDArray[np.int64]
    """[N] row of each text in the part."""


class TextSearch:
    """The texts of a run's parts, read on the first search."""

    def __init__(self, read: Callable[[str, Callable[[Path], Any]], Any]) -> None:
        """Create a search; `read` reads a part by name and returns None for a missing or damaged one."""
        self._read = read
        self._held: dict[PartKey, tuple[int, list[_Texts]]] = {}
        self._lock = threading.Lock()

    def keep(self, parts: Iterable[PartKey]) -> None:
        """Drop all parts except these from memory."""
        known = set(parts)
        with self._lock:
            self._held = {key: cached for key, cached in self._held.items() if key in known}

    def rows(self, part: PartKey, pattern: str, query: TextQuery) -> NDArray[np.int64]:
        """Return the rows of a part with a matching text; empty if the part cannot be read.

        Raises:
            DataError: the search took too long.
        """
        rows = [np.empty(0, np.int64)]
        for texts in self._texts(part):
            hits = query.matches(texts.distinct, pattern)
            if hits.any():
                rows.append(texts.row[hits[texts.which]])
        return np.unique(np.concatenate(rows))

    def _texts(self, part: PartKey) -> list[_Texts]:
        with self._lock:
            if part in self._held:
                return self._held[part][1]
        texts: list[_Texts] = self._read(part[0], lambda path: list(_texts_in(PartFile(path)))) or []
        size = sum(one.distinct.nbytes + one.which.nbytes + one.row.nbytes for one in texts)
        with self._lock:
            if size + sum(of for of, _ in self._held.values()) <= MAX_HELD:
                self._held[part] = (size, texts)
        return texts


def _texts_in(file: PartFile) -> Iterator[_Texts]:
    start = 0
    for group, count in enumerate(file.rows_of_groups):
        lists = file.read(["texts"], groups=[group])["texts"].combine_chunks()
        yield _texts_of(lists.flatten(), start + np.asarray(pc.list_parent_indices(lists), np.int64))
        start += count


def _texts_of(values: pa.Array, row: NDArray[np.int64]) -> _Texts:
    if not pa.types.is_dictionary(values.type):
        values = values.dictionary_encode()
    if values.indices.null_count:
        row = row[values.indices.is_valid().to_numpy(zero_copy_only=False)]
    return _Texts(values.dictionary, values.indices.drop_null().to_numpy().astype(np.int64), row)
