"""Calls as a name and pairs of key and value elements: GLM 4.5, 4.6 and 4.7 (the later ones without line breaks).

<tool_call>add
<arg_key>a</arg_key>
<arg_value>2</arg_value>
</tool_call>
"""

from __future__ import annotations

import functools
import re

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.base import ParsedText, Tools, TurnParser, broken, parsers, read_blocks
from polyturn.tokens.parsers.xml import BadArgumentsError, check_name, read_values, typed_call

_HEAD = re.compile(r"<arg_key>([^<>\n]{1,200})</arg_key>\s*+<arg_value>")
_END = re.compile(r"</arg_value>(?=\s*+(?:<arg_key>|\Z))")
_FORM = "<arg_key>NAME</arg_key><arg_value>VALUE</arg_value>"
_CALL_FORM = f"<tool_call>NAME{_FORM}</tool_call>"


@parsers.register("glm47")
@parsers.register("glm45")
@parsers.register("glm4")
@parsers.register("glm")
class GlmParser(TurnParser):
    """See the head of the file."""

    call_tags = ("<tool_call>", "</tool_call>")
    default_reasoning = "glm45"

    def read(self, text: str, tools: Tools) -> ParsedText:
        """Read the blocks."""
        return read_blocks(text, self.call_tags, functools.partial(_read_call, tools=tools))


def _read_call(text: str, raw: str, *, tools: Tools) -> ToolCall:
    name, key, rest = text.partition("<arg_key>")
    name = name.strip()
    wrong = check_name(name, raw, _CALL_FORM)
    if wrong is not None:
        return wrong
    try:
        values = read_values(key + rest, _HEAD, _END, _FORM)
    except BadArgumentsError as problem:
        return broken(raw, str(problem), name=name)
    return typed_call(name, values, raw, tools)
