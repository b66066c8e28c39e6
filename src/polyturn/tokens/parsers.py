"""Reading what the model wrote: content, tool calls, reasoning. On text only; nothing read here becomes tokens again.

    <think>2 and 2</think>Let me add.<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>
    ->  reasoning "2 and 2", content "Let me add.", one call

A call that cannot be parsed is kept, with the reason for the model to read, so that breaking a call never dodges its cost.
A call inside reasoning is a thought, not a call. Parsers take linear time and never evaluate code.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, NoReturn, Protocol

from polyturn.core.messages import ToolCall
from polyturn.core.registry import Registry


class ParsedTurn(NamedTuple):
    """One turn, read."""

    content: str
    """What is left without reasoning and calls; exactly the text when it has neither."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


class ToolCallParser(Protocol):
    """Reads one model family's way to write tool calls and reasoning."""

    def parse(self, text: str, *, id_prefix: str = "call") -> ParsedTurn:
        """Read one turn's text, without its stop token; the i-th call gets the id `{id_prefix}_{i}`. Never raises."""
        ...


parsers: Registry[type[ToolCallParser]] = Registry("parsers")


@parsers.register("hermes")
class HermesParser:
    """Calls as JSON between <tool_call> tags, reasoning between <think> tags: Hermes, Qwen 2.5 and Qwen 3."""

    def parse(self, text: str, *, id_prefix: str = "call") -> ParsedTurn:
        """Read one turn; see `ToolCallParser.parse`.

        The `<think>` tag may be missing because the generation prompt wrote it; reasoning that is not closed was cut, and
        everything after it belongs to it.
        """
        reasoning, rest = _split_reasoning(text)
        pieces: list[str] = []
        calls: list[ToolCall] = []
        position = 0
        while True:
            start = rest.find(_OPEN, position)
            if start < 0:
                pieces.append(rest[position:])
                break
            pieces.append(rest[position:start])
            body = start + len(_OPEN)
            following = rest.find(_OPEN, body)
            call, position = _read_block(rest, body, len(rest) if following < 0 else following, f"{id_prefix}_{len(calls)}")
            calls.append(call)
        if not calls:
            return ParsedTurn(rest, (), reasoning)
        content = "\n".join(p.strip() for p in pieces if p.strip())
        return ParsedTurn(content, tuple(calls), reasoning)


@parsers.register("none")
class PlainParser:
    """Reads no tool calls and no reasoning: all text is content."""

    def parse(self, text: str, *, id_prefix: str = "call") -> ParsedTurn:
        """Return the text as content."""
        return ParsedTurn(text)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _END_THINK = "<think>", "</think>"
_TAGS = re.compile("|".join((_OPEN, _CLOSE, _THINK, _END_THINK)))


def _split_reasoning(text: str) -> tuple[str | None, str]:
    """Return the reasoning, or None, and the text without it. A tag inside a tool call is part of the call."""
    tags = list(_TAGS.finditer(text))
    thoughts: list[str] = []
    kept: list[str] = []
    position = 0
    inside = ""  # the tag that is open
    for index, tag in enumerate(tags):
        if inside == _THINK:
            if tag[0] == _END_THINK:
                thoughts.append(text[position : tag.start()])
                position, inside = tag.end(), ""
        elif tag[0] == _END_THINK:
            following = tags[index + 1][0] if index + 1 < len(tags) else ""
            if not thoughts and not (inside and following == _CLOSE):  # opened by the generation prompt
                thoughts.append(text[: tag.start()])
                kept.clear()
                position, inside = tag.end(), ""
        elif inside:
            inside = "" if tag[0] == _CLOSE else inside
        elif tag[0] == _THINK:
            kept.append(text[position : tag.start()])
            position, inside = tag.end(), _THINK
        elif tag[0] == _OPEN:
            inside = _OPEN
    (thoughts if inside == _THINK else kept).append(text[position:])
    if not thoughts:
        return None, text
    return "\n".join(t.strip("\n") for t in thoughts), "".join(kept).lstrip("\n")


def _read_block(text: str, body: int, limit: int, call_id: str) -> tuple[ToolCall, int]:
    """Read the call whose JSON starts at `body`; another block starts at `limit`. Return it and where reading goes on."""
    start = body - len(_OPEN)
    close = text.find(_CLOSE, body, limit)
    if close < 0:
        error = "the <tool_call> block is not closed; end it with </tool_call>"
        return ToolCall(id=call_id, name="", raw=text[start:limit].rstrip(), error=error), limit
    call = _read_json(text[body:close], call_id, text[start : close + len(_CLOSE)])
    last = text.rfind(_CLOSE, close + 1, limit)
    if call.error is not None and last >= 0:  # a closing tag inside an argument's text: each character is read at most twice
        longer = _read_json(text[body:last], call_id, text[start : last + len(_CLOSE)])
        if longer.error is None:
            return longer, last + len(_CLOSE)
    return call, close + len(_CLOSE)


def _read_json(text: str, call_id: str, raw: str) -> ToolCall:
    try:
        data = _loads(text)
    except _BadJsonError as problem:
        return ToolCall(id=call_id, name="", raw=raw, error=f"the tool call is not valid JSON ({problem})")
    if not isinstance(data, dict):
        return ToolCall(id=call_id, name="", raw=raw, error=f"a tool call must be a JSON object, not {_json_type(data)}")
    name = data.get("name")
    if not isinstance(name, str) or not name:
        what = f"not {_json_type(name)}" if "name" in data and name != "" else "and this call has none"
        return ToolCall(id=call_id, name="", raw=raw, error=f'a tool call needs a "name" that is a string, {what}')
    arguments = data.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = _loads(arguments)
        except _BadJsonError as problem:
            return ToolCall(id=call_id, name=name, raw=raw, error=f'"arguments" is not valid JSON ({problem})')
    if not isinstance(arguments, dict):
        error = f'"arguments" must be a JSON object, not {_json_type(arguments)}'
        return ToolCall(id=call_id, name=name, raw=raw, error=error)
    return ToolCall(id=call_id, name=name, arguments=arguments, raw=raw)


class _BadJsonError(Exception):
    """Text that is not JSON; the message says why, for the model."""


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as problem:
        raise _BadJsonError(f"{problem.msg} at character {problem.pos}") from problem
    except RecursionError as problem:
        raise _BadJsonError("nested too deeply") from problem
    except ValueError as problem:  # NaN, or an integer of thousands of digits
        raise _BadJsonError(str(problem).partition(";")[0]) from problem


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return "a string" if isinstance(value, str) else "an array" if isinstance(value, list) else "an object"
