"""Harmony channels: gpt-oss. A turn is a sequence of messages. Each has a channel and may have a recipient (`to=…`).

<|channel|>analysis<|message|>Two and two.<|end|>                                                    reasoning
<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}<|call|>  a call
<|start|>assistant<|channel|>final<|message|>Four.<|return|>                                         content

A message whose recipient is a tool is a call, whatever its channel.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.base import ParsedText, ParsedTurn, Tools, TurnParser, broken, join_content, parsers
from polyturn.tokens.parsers.json_calls import with_arguments

_MARK = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=([^\s<>]{1,200})")
_CHANNEL = re.compile(r"<\|channel\|>\s*+(\w+)")


class _Part(NamedTuple):
    """One message of a turn."""

    header: str
    body: str | None
    """The text after the header; None if the message was cut in its header."""
    raw: str


@parsers.register("gpt-oss")
class GptOssParser(TurnParser):
    """See the head of the file. Reasoning is always the text of the analysis channel; `reasoning` has no effect."""

    default_reasoning = "gpt-oss"

    def parse(self, text: str, *, id_prefix: str = "call", tools: Tools = ()) -> ParsedTurn:
        """Read one turn; see `ToolCallParser.parse`."""
        if _MARK.search(text) is None:
            parsed = self.read(text, tools)
            return ParsedTurn("".join(parsed.pieces), self._with_ids(parsed.calls, id_prefix))
        thoughts = []
        pieces = []
        calls: list[ToolCall] = []
        for part in _parts(text):
            recipient = _RECIPIENT.search(part.header)
            channel = _CHANNEL.search(part.header)
            if recipient is not None and recipient[1] != "assistant":
                calls.append(_read_call(recipient[1], part))
            elif part.body is None:
                continue
            elif channel is not None and channel[1] == "analysis":
                thoughts.append(part.body)
            else:
                pieces.append(part.body)
        content = join_content(pieces) if calls else "\n".join(pieces)
        reasoning = "\n".join(thoughts) if thoughts else None
        return ParsedTurn(content, self._with_ids(calls, id_prefix), reasoning)

    def read(self, text: str, tools: Tools) -> ParsedText:
        """Return a text without marks as content. If it begins with a recipient, it was cut there and is a broken call."""
        cut = _RECIPIENT.match(text.lstrip())
        return ParsedText([text], []) if cut is None else ParsedText(["", ""], [_read_call(cut[1], _Part(text, None, text))])


def _parts(text: str) -> list[_Part]:
    """Split a turn into its messages."""
    parts: list[_Part] = []
    begin = position = 0
    header: str | None = ""  # of the message whose body is being read; "" also for text that begins without one
    is_body = _MARK.search(text) is not None and not text.lstrip().startswith(("<|", "to="))
    for mark in _MARK.finditer(text):
        kind = mark[0]
        if kind == "<|message|>" and not is_body:
            header, position, is_body = text[begin : mark.start()], mark.end(), True
        elif kind in _ENDS or kind == "<|start|>" or (kind == "<|channel|>" and is_body):
            if is_body:
                parts.append(_Part(header or "", text[position : mark.start()], text[begin : mark.end()]))
            elif _RECIPIENT.search(text, begin, mark.start()):
                parts.append(_Part(text[begin : mark.start()], None, text[begin : mark.end()]))
            begin = mark.start() if kind == "<|channel|>" else mark.end()
            position, is_body, header = begin, False, ""
    if is_body:
        parts.append(_Part(header or "", text[position:], text[begin:]))
    elif begin < len(text):
        parts.append(_Part(text[begin:], None, text[begin:]))
    return [p for p in parts if p.body != "" or p.header]


def _read_call(recipient: str, part: _Part) -> ToolCall:
    name = recipient.removeprefix("functions.")
    if not name:
        return broken(part.raw, "a tool call needs a name; write to=functions.NAME")
    if part.body is None:
        return broken(part.raw, "the tool call ends before its arguments; write them after <|message|>", name=name)
    return with_arguments(name, part.body, part.raw.strip())
