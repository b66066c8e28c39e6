"""Calls with an id that contains the tool's name: Kimi K2.

<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 2}<|tool_call_end|>
<|tool_calls_section_end|>

The id is kept as the model wrote it, because templates of this family identify a call and its result only by the id.
"""

from __future__ import annotations

import re

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.base import ParsedText, Tools, TurnParser, broken, parsers
from polyturn.tokens.parsers.json_calls import with_arguments
from polyturn.tokens.parsers.sections import read_sections

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?([^\s<>:{}\[\]\"']{1,200})(?::[0-9]{1,9})?")


@parsers.register("kimi_k2")
class KimiK2Parser(TurnParser):
    """See the head of the file."""

    call_tags = _CALL
    default_reasoning = "kimi_k2"

    def read(self, text: str, tools: Tools) -> ParsedText:
        """Read the sections."""
        return read_sections(text, _SECTION, _CALL, _read_call)


def _read_call(text: str, raw: str) -> ToolCall:
    written, separator, arguments = text.partition(_ARGUMENTS)
    written = written.strip()
    head = _ID.fullmatch(written)
    if head is None or not separator:
        return broken(raw, f"a tool call reads functions.NAME:NUMBER{_ARGUMENTS}{{…}}, not {text[:40]!r}")
    return with_arguments(head[1], arguments, raw, id=written)
