"""Calls after [TOOL_CALLS]: Mistral, in its older form (a JSON list) and its newer one (name and arguments).

[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}, "id": "VvvODy9mT"}]
[TOOL_CALLS]add[ARGS]{"a": 2}[TOOL_CALLS]mul[CALL_ID]VvvODy9mT[ARGS]{"a": 2}

Templates of this family refuse ids that are not nine letters or digits, so a call without an id gets an id of this form.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.base import ParsedText, Tools, TurnParser, broken, parsers
from polyturn.tokens.parsers.json_calls import BadJsonError, call_from, find_end, loads, with_arguments

_OPEN = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*+([^\s\[\]{}\"']{1,200})\s*+(?:\[CALL_ID\]\s*+([A-Za-z0-9]{0,64})\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
_BETWEEN = re.compile(r"[\s,]*+")
_ID = re.compile(r"[A-Za-z0-9]{9}")


@parsers.register("mistral")
class MistralParser(TurnParser):
    """See the head of the file."""

    call_tags = (_OPEN, "")
    default_reasoning = "mistral"

    def call_id(self, id_prefix: str, index: int) -> str:
        """Return nine letters and digits that depend on the prefix and the index."""
        return hashlib.blake2b(f"{id_prefix}_{index}".encode("utf-8", "replace"), digest_size=8).hexdigest()[:9]

    def read(self, text: str, tools: Tools) -> ParsedText:
        """Read the calls after each [TOOL_CALLS]."""
        content, *sections = text.split(_OPEN)
        pieces: list[str] = [content]
        calls: list[ToolCall] = []
        for section in sections:
            rest = section.lstrip()
            objects, behind = _read_objects(rest) if rest[:1] in ("[", "{") else _read_named(section)
            calls += objects
            pieces.append(behind)
        return ParsedText(pieces, calls)


def _read_named(text: str) -> tuple[list[ToolCall], str]:
    head = _HEAD.match(text)
    if head is None:
        return [
            broken(_OPEN + text, f'{_OPEN} must be followed by NAME[ARGS]{{…}} or [{{"name": …, "arguments": {{…}}}}]')
        ], ""
    end = find_end(text, head.end())
    if end is None:
        return [broken(_OPEN + text, "the arguments are not closed; end them with }", name=head[1])], ""
    own = head[2] if head[2] and _ID.fullmatch(head[2]) else ""
    return [with_arguments(head[1], text[head.end() : end], _OPEN + text[:end], id=own)], text[end:]


def _read_objects(text: str) -> tuple[list[ToolCall], str]:
    """Read one object or a list of objects. The objects are read one by one, so that a cut list keeps the complete ones."""
    is_list = text.startswith("[")
    position = 1 if is_list else 0
    calls: list[ToolCall] = []
    while True:
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]  # it matches the empty text
        if text.startswith("{", position) and (is_list or not calls):
            end = find_end(text, position)
            if end is None:
                calls.append(broken(text[position:], "the tool call is not valid JSON (it is not closed; end it with })"))
                return calls, ""
            calls.append(_read_object(text[position:end]))
            position = end
        elif not is_list:
            return calls, text[position:]
        elif text.startswith("]", position):
            if not calls:
                calls.append(broken(_OPEN + text[: position + 1], f"the list after {_OPEN} is empty"))
            return calls, text[position + 1 :]
        elif position >= len(text) and calls:
            return calls, ""
        else:
            calls.append(
                broken(text[position:] or _OPEN + text, "the list of tool calls must hold JSON objects and end with ]")
            )
            return calls, ""


def _read_object(raw: str) -> ToolCall:
    try:
        data = loads(raw)
    except BadJsonError as problem:
        return broken(raw, f"the tool call is not valid JSON ({problem})")
    call = call_from(data, raw)
    own = data.get("id") if isinstance(data, dict) else None
    return replace(call, id=own) if isinstance(own, str) and _ID.fullmatch(own) else call
