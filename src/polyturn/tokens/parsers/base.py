"""The protocol of parsers, their registry, and `TurnParser`, the base of the built-in parsers.

    text  ->  reasoning format: (reasoning, rest)  ->  tool format: rest -> pieces of content and calls  ->  ParsedTurn

The two formats are separate, because models with the same format of calls write reasoning differently. Each family has
default reasoning tags (`default_reasoning`), which an option can replace.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from polyturn.core.messages import ToolCall
from polyturn.infra.plugins import Registry
from polyturn.tokens.parsers.reasoning import reasoning_formats, split_reasoning

Tools = Sequence[Mapping[str, Any]]
"""Tool schemas in OpenAI's function form."""


class ParsedTurn(NamedTuple):
    """The parts of one turn."""

    content: str
    """The text without reasoning and calls; unchanged if it has neither."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


class ToolCallParser(Protocol):
    """Parses tool calls and reasoning in the format of one model family."""

    def parse(self, text: str, *, id_prefix: str = "call", tools: Tools = ()) -> ParsedTurn:
        """Parse the text of one turn, without its stop token. Never raises.

        Args:
            text: The text of the model.
            id_prefix: The i-th call gets the id `{id_prefix}_{i}`, unless the family's templates need another form of id.
            tools: Schemas of the tools that may be called; formats with untyped arguments take the types from them.
        """
        ...


parsers: Registry[type[ToolCallParser]] = Registry("parsers")


class ParsedText(NamedTuple):
    """The calls in a text, and the pieces of text around them."""

    pieces: list[str]
    calls: list[ToolCall]
    """Each with the id that the model wrote, or "" if the format has none."""


class TurnParser(ABC):
    """The base of the built-in parsers; a family implements `read`."""

    call_tags: ClassVar[tuple[str, str]] = ("", "")
    """The tags around a call, so that reasoning tags inside arguments are ignored; "" if the format has none."""
    default_reasoning: ClassVar[str] = "qwen3"
    """The name of the family's reasoning format."""

    def __init__(
        self, *, reasoning: str | None = None, reasoning_is_open: bool = False, calls_in_reasoning: bool = False
    ) -> None:
        """Create a parser.

        Args:
            reasoning: Name of a reasoning format; None for the family's own.
            reasoning_is_open: Whether the generation prompt opens the reasoning. Then all text before the closing tag, or
                all text if there is none, is reasoning.
            calls_in_reasoning: Whether to execute calls inside reasoning.

        Raises:
            UnknownNameError: no reasoning format has that name.
        """
        self.reasoning_name = reasoning or self.default_reasoning
        self._reasoning = reasoning_formats.resolve(self.reasoning_name)
        self._is_open = reasoning_is_open
        self._calls_in_reasoning = calls_in_reasoning

    @abstractmethod
    def read(self, text: str, tools: Tools) -> ParsedText:
        """Find the calls in a text that has no reasoning. Takes linear time, never raises."""

    def call_id(self, id_prefix: str, index: int) -> str:
        """Return the id for a call that the model wrote without one."""
        return f"{id_prefix}_{index}"

    def parse(self, text: str, *, id_prefix: str = "call", tools: Tools = ()) -> ParsedTurn:
        """Parse one turn; see `ToolCallParser.parse`."""
        reasoning, rest = split_reasoning(text, self._reasoning, call_tags=self.call_tags, is_open=self._is_open)
        pieces, calls = self.read(rest, tools)
        if self._calls_in_reasoning and reasoning:
            calls = [*self.read(reasoning, tools).calls, *calls]
        content = join_content(pieces) if calls else "".join(pieces)
        return ParsedTurn(content, self._with_ids(calls, id_prefix), reasoning)

    def _with_ids(self, calls: Sequence[ToolCall], id_prefix: str) -> tuple[ToolCall, ...]:
        taken: set[str] = set()
        out = []
        for index, call in enumerate(calls):
            own = call.id if call.id and call.id not in taken else self.call_id(id_prefix, index)
            taken.add(own)
            # `dataclasses.replace` would take a third of the time of parsing the call.
            out.append(ToolCall(id=own, name=call.name, arguments=call.arguments, raw=call.raw, error=call.error))
        return tuple(out)


_END_MARKS = re.compile(r"(?:<\|[^<>|]{1,40}\|>|<｜[^<>｜]{1,40}｜>|</s>|\s)*+")
"""Control tokens after the last call; the decoded text may contain them."""


def join_content(pieces: Sequence[str]) -> str:
    """Join the pieces of text around calls with line breaks, each without leading and trailing white space."""
    return "\n".join(p.strip() for p in pieces if not _END_MARKS.fullmatch(p))


_MAX_LONGER = 8
"""The most opening tags that are tried as text inside an argument; the bound keeps parsing linear."""


def read_blocks(
    text: str, tags: tuple[str, str], read: Callable[[str, str], ToolCall], *, tells_end: bool = False
) -> ParsedText:
    """Parse the calls between two tags.

    A closing tag may be part of an argument. A block therefore ends at the first closing tag with which it can be parsed, or
    else at the last closing tag before the next block. Each character is read at most twice, a few times with `tells_end`.

    Args:
        text: The text with the blocks.
        tags: The opening and the closing tag of a block.
        read: Parses (text between the tags, text with the tags) to a call.
        tells_end: Whether `read` refuses text after a call, so that an argument may contain an opening tag.
    """
    opens, closes = tags
    tries = _MAX_LONGER if tells_end else 0
    pieces: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (start := text.find(opens, position)) >= 0:
        pieces.append(text[position:start])
        body = start + len(opens)
        following = text.find(opens, body)
        limit = len(text) if following < 0 else following
        first, last = text.find(closes, body, limit), text.rfind(closes, body, limit)
        while first < 0 and following >= 0 and tries:
            tries -= 1
            further = text.find(opens, following + len(opens))
            limit_ = len(text) if further < 0 else further
            ends = {text.find(closes, following, limit_), text.rfind(closes, following, limit_)} - {-1}
            fits = [e for e in sorted(ends) if read(text[body:e], text[start : e + len(closes)]).error is None]
            first, last = (fits[0], fits[0]) if fits else (first, last)
            following = further
        if first < 0:
            calls.append(broken(text[start:limit], f"the {opens} block is not closed; end it with {closes}"))
            position = limit
            continue
        call, position = read(text[body:first], text[start : first + len(closes)]), first + len(closes)
        if call.error is not None and last > first:
            longer = read(text[body:last], text[start : last + len(closes)])
            if longer.error is None:
                call, position = longer, last + len(closes)
        calls.append(call)
    pieces.append(text[position:])
    return ParsedText(pieces, calls)


def broken(raw: str, error: str, *, name: str = "") -> ToolCall:
    """Return a call that cannot be executed, with an error that the model reads."""
    return ToolCall(id="", name=name, raw=raw.rstrip(), error=error)
