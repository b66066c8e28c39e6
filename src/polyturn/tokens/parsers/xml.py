"""What the formats with tags around each argument share: named values one behind the other, up to a closing tag.

<parameter=city>          a tag with the name, the value's text, a closing tag; a closing tag inside a value does not end it
Köln                      unless another parameter, or the end, stands behind it
</parameter>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.arguments import convert, properties_of
from polyturn.tokens.parsers.base import Tools, broken

_NAME = re.compile(r"[^\s<>{}\[\]\"']+")


class BadArgumentsError(Exception):
    """Tagged arguments that cannot be read; the message says why, for the model."""


def read_values(text: str, head: re.Pattern[str], end: re.Pattern[str], form: str) -> dict[str, str]:
    """Return the texts of named values in a text that holds nothing else.

    Args:
        text: The values.
        head: Matches what opens a value; its first group is the name.
        end: Matches what closes a value, where another one or the end follows.
        form: How a value is written, for the error.

    Raises:
        BadArgumentsError: something else stands there, or a value is not closed.
    """
    values: dict[str, str] = {}
    position = _skip_space(text, 0)
    while position < len(text):
        opened = head.match(text, position)
        if opened is None:
            raise BadArgumentsError(f"expected {form}, found {text[position : position + 40]!r}")
        name = opened[1].strip()
        closed = end.search(text, opened.end())
        if closed is None:
            raise BadArgumentsError(f"the value of {name!r} is not closed; write {form}")
        if name in values:
            raise BadArgumentsError(f"the parameter {name!r} is there twice")
        values[name] = text[opened.end() : closed.start()]
        position = _skip_space(text, closed.end())
    return values


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def typed_call(name: str, values: Mapping[str, str], raw: str, tools: Tools) -> ToolCall:
    """Return the call whose arguments have the types that the tool's schema gives them."""
    properties = properties_of(tools, name)
    arguments: dict[str, Any] = {k: convert(v, properties.get(k)) for k, v in values.items()}
    return ToolCall(id="", name=name, arguments=arguments, raw=raw)


def check_name(name: str, raw: str, form: str) -> ToolCall | None:
    """Return the broken call for a text that cannot be a tool's name; None for one that can."""
    if _NAME.fullmatch(name):
        return None
    what = f"{name[:40]!r} is none" if name else "and this call has none"
    return broken(raw, f"a tool call needs a name, {what}; write {form}")
