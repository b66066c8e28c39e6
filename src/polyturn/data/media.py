"""Puts the media of a row's columns into the prompt's messages, at the prompt's markers.

    {"prompt": "<image>\\nWhich color?", "images": [{"bytes": b"…"}]}
      ->  content ({"type": "image", "image": "data:image/png;…"}, {"type": "text", "text": "\\nWhich color?"})

Each `<image>`, `<video>` or `<audio>` in a message, and each part such as {"type": "image"} without an image, takes the next
item of its column. Items of a kind without markers go to the start of the first user message. If the row has no such column,
`<image>` is plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.errors import DataError
from polyturn.core.media import KINDS, Source, kind_of, to_source

COLUMNS = {"images": "image", "videos": "video", "audios": "audio"}
"""Column -> the kind of its items."""


def with_media(messages: Sequence[Any], row: Mapping[str, Any], *, base: Path) -> list[Any]:
    """Return the messages of a row as dicts, with the media of its columns inserted.

    Args:
        messages: The prompt's messages.
        row: The row.
        base: The folder that relative paths are resolved against.

    Raises:
        DataError: an item cannot be read, or the number of items differs from the number of markers.
    """
    items = {kind: _items(row, column, kind, base) for column, kind in COLUMNS.items()}
    if not any(items.values()):
        return [_with_base(m, base) for m in messages]
    left = {kind: list(media) for kind, media in items.items()}
    present = [kind for kind in KINDS if items[kind]]
    filled = [_fill(_with_base(m, base), left, present) for m in messages]
    for column, kind in COLUMNS.items():
        if left[kind] and len(left[kind]) < len(items[kind]):
            raise DataError(
                f"the prompt has {len(items[kind]) - len(left[kind])} markers, but {column!r} has {len(items[kind])} items"
            )
    unused = [{"type": kind, kind: source} for kind in KINDS for source in left[kind]]
    if not unused:
        return filled
    for index, message in enumerate(filled):
        if isinstance(message, Mapping) and message.get("role") == "user":
            filled[index] = {**message, "content": [*unused, *_parts(message.get("content"))]}
            return filled
    raise DataError(f"the row has {len(unused)} media, but its prompt has no user message for them")


def _items(row: Mapping[str, Any], column: str, kind: str, base: Path) -> list[Source]:
    value = row.get(column)
    if value is None:
        return []
    values = value if isinstance(value, list | tuple) else [value]
    try:
        return [to_source(kind, item, base=base) for item in values]
    except DataError as problem:
        raise DataError(f"{column!r}: {problem}") from problem


def _with_base(message: Any, base: Path) -> Any:
    """Return a message with the media of its parts as sources, whose relative paths start from `base`."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        kind = kind_of(part) if isinstance(part, Mapping) else None
        value = None if kind is None else part.get(kind, part.get(f"{kind}_url"))
        parts.append(
            {**part, "type": kind, str(kind): to_source(str(kind), value, base=base)} if value is not None else part
        )
    return {**message, "content": parts}


def _fill(message: Any, left: dict[str, list[Source]], present: Sequence[str]) -> Any:
    """Return a message with each marker of a kind in `present` replaced by the next item of `left`."""
    if not isinstance(message, Mapping):
        return message
    pointer = re.compile("|".join(f"<{kind}>" for kind in present))
    content = message.get("content")
    if isinstance(content, str) and not pointer.search(content):
        return message
    parts: list[Any] = []
    for part in _parts(content):
        if not isinstance(part, Mapping):
            parts.append(part)
            continue
        kind = kind_of(part)
        if kind in present and part.get(str(kind)) is None:
            parts.append({**part, str(kind): _take(left, str(kind))})
        elif kind is None and isinstance(part.get("text"), str):
            position = 0
            for match in pointer.finditer(part["text"]):
                parts += _parts(part["text"][position : match.start()])
                parts.append({"type": match[0][1:-1], match[0][1:-1]: _take(left, match[0][1:-1])})
                position = match.end()
            parts += [{**part, "text": part["text"][position:]}] if position < len(part["text"]) else []
        else:
            parts.append(part)
    return {**message, "content": parts}


def _take(left: dict[str, list[Source]], kind: str) -> Source:
    if not left[kind]:
        column = next(column for column, of in COLUMNS.items() if of == kind)
        raise DataError(f"the prompt has more markers than {column!r} has {column}; add one for each <{kind}>")
    return left[kind].pop(0)


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return list(content)
    return [{"type": "text", "text": content}] if content else []
