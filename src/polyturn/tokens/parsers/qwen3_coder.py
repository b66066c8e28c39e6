"""Calls as XML-like tags with bare values: Qwen 3 Coder, Step 3.5, Nanbeige and others.

<tool_call>
<function=add>
<parameter=a>
2
</parameter>
</function>
</tool_call>

The outer opening tag may be missing, as these models often leave it out. One line break on either side of a value is layout.
"""

from __future__ import annotations

import re
from itertools import zip_longest

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.base import ParsedText, Tools, TurnParser, broken, parsers
from polyturn.tokens.parsers.xml import BadArgumentsError, check_name, read_values, typed_call

_START = re.compile(r"<tool_call>\s*+(?:<function=)?|^[ \t]*+<function=", re.MULTILINE)
_HEAD = re.compile(r"<parameter=([^<>\n]{1,200})>")
_END = re.compile(r"</parameter>(?=\s*+(?:<parameter=|\Z))")
_CLOSE, _OUTER = "</function>", re.compile(r"\s*+</tool_call>")
_FUNCTION_FORM = "<tool_call><function=NAME>…</function></tool_call>"
_FORM = "<parameter=NAME>VALUE</parameter>"


@parsers.register("nanbeige")
@parsers.register("step3p5")
@parsers.register("qwen3_coder")
class Qwen3CoderParser(TurnParser):
    """See the head of the file."""

    call_tags = ("<tool_call>", "</tool_call>")

    def read(self, text: str, tools: Tools) -> ParsedText:
        """Read the calls. A call ends at the last closing tag before the next opening tag."""
        starts = list(_START.finditer(text))
        pieces: list[str] = []
        calls: list[ToolCall] = []
        position = 0
        for start, following in zip_longest(starts, starts[1:]):
            pieces.append(text[position : start.start()])
            limit = len(text) if following is None else following.start()
            close = text.rfind(_CLOSE, start.end(), limit)
            position = limit
            if not start[0].endswith("="):
                outer = text.rfind("</tool_call>", start.end(), limit)
                position = limit if outer < 0 else outer + len("</tool_call>")
                raw = text[start.start() : position]
                calls.append(broken(raw, f"the <tool_call> block has no function; write {_FUNCTION_FORM}"))
            elif close < 0:
                calls.append(
                    broken(text[start.start() : limit], f"the <function= block is not closed; end it with {_CLOSE}")
                )
            else:
                end = close + len(_CLOSE)
                outer_end = _OUTER.match(text, end)
                position = end if outer_end is None else outer_end.end()
                raw = text[start.start() : position]
                calls.append(_read_function(text[start.end() : close], raw.lstrip(), tools))
        pieces.append(text[position:])
        return ParsedText(pieces, calls)


def _read_function(text: str, raw: str, tools: Tools) -> ToolCall:
    name, closed, rest = text.partition(">")
    name = name.strip()
    wrong = check_name(name if closed else "", raw, _FUNCTION_FORM)
    if wrong is not None:
        return wrong
    try:
        values = read_values(rest, _HEAD, _END, _FORM)
    except BadArgumentsError as problem:
        return broken(raw, str(problem), name=name)
    bare = {k: v.removeprefix("\n").removesuffix("\n") for k, v in values.items()}
    return typed_call(name, bare, raw, tools)
