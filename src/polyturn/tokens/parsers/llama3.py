"""Calls as bare JSON, or after <|python_tag|>: Llama 3.1, 3.2 and 3.3.

{"name": "add", "parameters": {"a": 2}}; {"name": "now", "parameters": {}}
<|python_tag|>{"name": "add", "parameters": {"a": 2}}
<|python_tag|>brave_search.call(query="rain")

Without the tag, a turn that begins with a JSON object is a call only if it has the keys of a call, because an answer may be
JSON too.
"""

from __future__ import annotations

import re
from typing import Any

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.base import ParsedText, Tools, TurnParser, broken, parsers
from polyturn.tokens.parsers.json_calls import BadJsonError, call_from, find_end, loads
from polyturn.tokens.parsers.pythonic import read_python_calls

_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"(?:[\s;,]|<\|python_tag\|>)*+")
_LOOKS_LIKE = re.compile(r"\s*+\{\s*+\"(?:name|type|function|parameters)\"\s*+:")
_PYTHON = re.compile(r"\s*+[A-Za-z_][\w.]*+\(")
_KEYS = {"name", "parameters", "arguments", "type", "id", "function"}


@parsers.register("llama3")
class Llama3Parser(TurnParser):
    """See the head of the file."""

    call_tags = (_TAG, "")

    def read(self, text: str, tools: Tools) -> ParsedText:
        """Read the calls after the tag; without a tag, those at the beginning of the text."""
        content, tag, rest = text.partition(_TAG)
        if not tag:
            return _read_bare(text, tools) if _LOOKS_LIKE.match(text) else ParsedText([text], [])
        if _PYTHON.match(rest):
            python_calls = read_python_calls(rest, tag=tag)
            return ParsedText([content, *python_calls.pieces], python_calls.calls)
        calls, behind = _read_objects(rest)
        if not calls:
            calls = [broken(tag + rest, f'{_TAG} must be followed by {{"name": …, "parameters": {{…}}}}')]
            behind = ""
        return ParsedText([content, behind], calls)


def _read_bare(text: str, tools: Tools) -> ParsedText:
    end = find_end(text, text.index("{"))
    if end is not None:
        try:
            data = loads(text[:end])
        except BadJsonError:
            data = None
        if isinstance(data, dict) and not _is_call(data, tools):
            return ParsedText([text], [])
    calls, behind = _read_objects(text)
    return ParsedText(["", behind], calls)


def _is_call(data: dict[str, Any], tools: Tools) -> bool:
    """Return whether an object is meant as a call: it has a name and only keys of a call, and it has arguments or its name
    is that of a tool."""
    if not data.keys() <= _KEYS or "name" not in data:
        return False
    known = {f.get("name") for f in (t.get("function", t) for t in tools)}
    return "parameters" in data or "arguments" in data or data["name"] in list(known)


def _read_objects(text: str) -> tuple[list[ToolCall], str]:
    """Read consecutive JSON objects; return their calls and the text after the last object."""
    calls: list[ToolCall] = []
    position = 0
    while True:
        start = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]  # it matches the empty text
        if not text.startswith("{", start):
            return calls, text[position:].strip(" \n;,")
        end = find_end(text, start)
        if end is None:
            calls.append(broken(text[start:], "the tool call is not valid JSON (it is not closed; end it with })"))
            return calls, ""
        raw = text[start:end]
        try:
            calls.append(call_from(loads(raw), raw))
        except BadJsonError as problem:
            calls.append(broken(raw, f"the tool call is not valid JSON ({problem})"))
        position = end
