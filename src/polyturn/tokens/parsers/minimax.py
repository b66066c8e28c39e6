"""Calls as <invoke> elements in one block: MiniMax M2.

<minimax:tool_call>
<invoke name="add">
<parameter name="a">2</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

import re
from itertools import zip_longest

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.base import ParsedText, Tools, TurnParser, broken, parsers
from polyturn.tokens.parsers.xml import BadArgumentsError, check_name, read_values, typed_call

_OPEN, _CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE = re.compile(r"<invoke name=([^<>\n]{0,200})>")
_END_INVOKE = "</invoke>"
_HEAD = re.compile(r"<parameter name=[\"']?([^<>\n\"']{1,200})[\"']?>")
_END = re.compile(r"</parameter>(?=\s*+(?:<parameter name=|\Z))")
_FORM = '<parameter name="NAME">VALUE</parameter>'
_INVOKE_FORM = '<invoke name="NAME">…</invoke>'


@parsers.register("minimax-m2")
class MinimaxM2Parser(TurnParser):
    """See the head of the file."""

    call_tags = (_OPEN, _CLOSE)
    default_reasoning = "minimax"

    def read(self, text: str, tools: Tools) -> ParsedText:
        """Read the calls of each block. A block ends at the last closing tag before the next opening tag."""
        pieces: list[str] = []
        calls: list[ToolCall] = []
        position = 0
        while (start := text.find(_OPEN, position)) >= 0:
            pieces.append(text[position:start])
            following = text.find(_OPEN, start + len(_OPEN))
            limit = len(text) if following < 0 else following
            close = text.rfind(_CLOSE, start, limit)
            end = limit if close < 0 else close
            position = limit if close < 0 else close + len(_CLOSE)
            block = _read_block(text[start + len(_OPEN) : end], tools)
            if not block:
                block.append(
                    broken(text[start:position], f"the {_OPEN} block calls nothing; write {_INVOKE_FORM} inside it")
                )
            calls += block
        pieces.append(text[position:])
        return ParsedText(pieces, calls)


def _read_block(text: str, tools: Tools) -> list[ToolCall]:
    starts = list(_INVOKE.finditer(text))
    calls = []
    for start, following in zip_longest(starts, starts[1:]):
        limit = len(text) if following is None else following.start()
        close = text.rfind(_END_INVOKE, start.end(), limit)
        if close < 0:
            calls.append(
                broken(text[start.start() : limit], f"the <invoke> element is not closed; end it with {_END_INVOKE}")
            )
            continue
        raw = text[start.start() : close + len(_END_INVOKE)]
        calls.append(_read_invoke(start[1].strip().strip("\"'"), text[start.end() : close], raw, tools))
    return calls


def _read_invoke(name: str, text: str, raw: str, tools: Tools) -> ToolCall:
    wrong = check_name(name, raw, _INVOKE_FORM)
    if wrong is not None:
        return wrong
    try:
        values = read_values(text, _HEAD, _END, _FORM)
    except BadArgumentsError as problem:
        return broken(raw, str(problem), name=name)
    return typed_call(name, values, raw, tools)
