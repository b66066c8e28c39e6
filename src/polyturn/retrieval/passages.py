"""Passages: reads searchable texts from a user's files and stores them for access by number.

    {"id": "7", "contents": "Oslo\\nOslo is …"}            one per line; the first line of the contents is the title
    {"id": 7, "title": "Oslo", "text": "Oslo is …"}       the same
    notes/travel.md                                      split into passages at paragraphs, titled by file and heading

On disk they are lines of JSON and the positions of line starts. Both are memory-mapped, so opening millions of passages is
instant and several processes share the memory.
"""

from __future__ import annotations

import gzip
import json
import mmap
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyturn.core.errors import DataError, one_line

TEXT_ENDINGS = (".txt", ".md", ".rst")
MAX_WORDS = 120
"""Largest number of words of a passage, without its title."""

_LINES, _STARTS = "passages.jsonl", "starts.npy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One text."""

    id: str
    contents: str
    """Title, line break and text."""

    @property
    def title(self) -> str:
        """The first line."""
        return self.contents.partition("\n")[0]

    @property
    def text(self) -> str:
        """The passage without its first line."""
        return self.contents.partition("\n")[2]


def read_passages(source: Path) -> Iterator[Passage]:
    """Yield the passages of a file or of a folder of texts.

    Args:
        source: A `.jsonl` file (or `.jsonl.gz`) with one passage per line, a text file, or a folder of text files.

    Raises:
        DataError: the file is missing or has another ending, or a line is not a passage; the message has the line.
    """
    if source.is_dir():
        files = sorted(path for path in source.rglob("*") if path.suffix in TEXT_ENDINGS and path.is_file())
        if not files:
            raise DataError(f"the folder {source} has no text files; passages are read from {', '.join(TEXT_ENDINGS)} files")
        for path in files:
            yield from _of_text(path, name=str(path.relative_to(source)))
    elif not source.is_file():
        raise DataError(f"there is no {source}; use a .jsonl file of passages, a text file or a folder of text files")
    elif source.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _of_lines(source)
    elif source.suffix in TEXT_ENDINGS:
        yield from _of_text(source, name=source.name)
    else:
        raise DataError(f"{source}: passages are read from .jsonl, .jsonl.gz, {', '.join(TEXT_ENDINGS)} files")


def _of_lines(path: Path) -> Iterator[Passage]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _of_line(line, where=f"{path}, line {number}", number=number)
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"{path} cannot be read after line {number}: {one_line(problem)}") from problem


def _of_line(line: bytes, *, where: str, number: int) -> Passage:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{where}: this is not JSON ({one_line(problem)})") from problem
    return _passage(row, where=where, number=number)


def _passage(row: Any, *, where: str, number: int) -> Passage:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: a passage must be an object, not {str(row)[:60]!r}")
    contents = row.get("contents")
    if contents is None and isinstance(row.get("text"), str):
        contents = f"{row.get('title') or ''}\n{row['text']}"
    if not isinstance(contents, str) or not contents.strip():
        raise DataError(
            f"{where}: a passage needs `contents`, a string whose first line is the title, or `text`, a string, with an "
            f"optional `title`; this one has {sorted(map(str, row))}"
        )
    name = row.get("id", number - 1)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise DataError(f"{where}: the id of a passage must be a string or a whole number, not {str(name)[:60]!r}")
    return Passage(id=str(name), contents=contents)


def _of_text(path: Path, *, name: str) -> Iterator[Passage]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # without a byte order mark, which would hide a heading
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path} cannot be read as text in UTF-8: {one_line(problem)}") from problem
    yield from cut(text, name=name)


def cut(text: str, *, name: str, max_words: int = MAX_WORDS) -> Iterator[Passage]:
    """Split a text into passages of at most `max_words`: short paragraphs are joined, and longer ones are cut into pieces.

    Args:
        text: The text. A paragraph whose first line begins with `#` starts a heading, which becomes part of the titles
            below it.
        name: Prefix of ids and titles.
        max_words: Largest number of words of a passage.
    """
    heading, number = "", 0
    current: list[str] = []

    def passage() -> Passage:
        title = f"{name}: {heading}" if heading else name
        return Passage(id=f"{name}#{number}", contents=f"{title}\n{' '.join(current)}")

    for paragraph in text.replace("\r\n", "\n").split("\n\n"):
        first = paragraph.strip().partition("\n")[0]
        is_heading = first.startswith("#") and first.lstrip("#").strip()
        words = paragraph.split()
        if current and (is_heading or len(current) + len(words) > max_words):
            yield passage()
            current, number = [], number + 1
        if is_heading:
            heading, words = first.lstrip("#").strip(), paragraph.strip()[len(first) :].split()
        while len(words) > max_words:
            current, words = words[:max_words], words[max_words:]
            yield passage()
            current, number = [], number + 1
        current += words
    if current:
        yield passage()


class PassageStore:
    """Passages on disk, by number."""

    def __init__(self, folder: Path) -> None:
        self._starts = np.load(folder / _STARTS, mmap_mode="r", allow_pickle=False)
        with (folder / _LINES).open("rb") as lines:
            self._lines = mmap.mmap(lines.fileno(), 0, access=mmap.ACCESS_READ)
        if self._starts.ndim != 1 or not len(self._starts) or self._starts[-1] != len(self._lines):
            raise ValueError(f"{_STARTS} does not match {_LINES}")

    @staticmethod
    def write(folder: Path, passages: Iterable[Passage]) -> Iterator[Passage]:
        """Write passages to a folder, yielding each one; the files are complete once the iterator has ended."""
        starts = [0]
        with (folder / _LINES).open("wb") as lines:
            for passage in passages:
                line = json.dumps({"id": passage.id, "contents": passage.contents}, ensure_ascii=False) + "\n"
                starts.append(starts[-1] + lines.write(line.encode(errors="replace")))
                yield passage
        np.save(folder / _STARTS, np.array(starts, np.int64), allow_pickle=False)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Passage:
        row = json.loads(self._lines[int(self._starts[number]) : int(self._starts[number + 1])])
        return Passage(id=row["id"], contents=row["contents"])
