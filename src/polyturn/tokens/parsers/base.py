"""The protocol of parsers, their registry, and `TurnParser`, the base of the built-in parsers.

    text  ->  reasoning format: (reasoning, rest)  ->  tool format: rest -> pieces of content and calls  ->  ParsedTurn

The two formats are chosen separately, because models with the same format of calls may write reasoning differently. Each
parser names a default reasoning format (`default_reasoning`), which an option can replace.
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
            id_prefix: The i-th call gets the id `{id_prefix}_{i}`, unless the model wrote an id or the family's templates
                need another form of id.
            tools: Schemas of the tools that may be called. In formats whose arguments have no types, the types come from
                these schemas.
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
    """The tags around a call; "" if the format has none. Reasoning tags between them are part of the call's arguments."""
    default_reasoning: ClassVar[str] = "qwen3"
    """The name of the family's reasoning format."""

    def __init__(
        self, *, reasoning: str | None = None, reasoning_is_open: bool = False, calls_in_reasoning: bool = False
    ) -> None:
        """Create a parser.

        Args:
            reasoning: Name of a reasoning format; None for the family's own.
            reasoning_is_open: Whether the generation prompt ends with the opening tag of reasoning. Then all text before the
                closing tag is reasoning, or all text if there is no closing tag.
            calls_in_reasoning: Whether calls inside reasoning count as calls of the turn, before those after it.

        Raises:
            UnknownNameError: no reasoning format has that name.
        """
        self.reasoning_name = reasoning or self.default_reasoning
        self._reasoning = reasoning_formats.resolve(self.reasoning_name)
        self._is_open = reasoning_is_open
        self._calls_in_reasoning = calls_in_reasoning

    @abstractmethod
    def read(self, text: str, tools: Tools) -> ParsedText:
        """Find the calls in a text from which reasoning has been removed. Must take linear time and never raise."""

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
            # Not `dataclasses.replace`, which would take a third as long as parsing the call.
            out.append(ToolCall(id=own, name=call.name, arguments=call.arguments, raw=call.raw, error=call.error))
        return tuple(out)


_END_MARKS = re.compile(r"(?:<\|[^<>|]{1,40}\|>|<｜[^<>｜]{1,40}｜>|</s>|\s)*+")
"""Matches a piece that has only white space and the text of control tokens, such as end tokens after the last call."""


def join_content(pieces: Sequence[str]) -> str:
    """Join the pieces of text around calls with line breaks, without the white space at their ends. Drop pieces of control
    tokens."""
    return "\n".join(p.strip() for p in pieces if not _END_MARKS.fullmatch(p))


_MAX_LONGER = 8
"""Maximum number of opening tags in a text that are tried as part of an argument. The bound keeps parsing linear."""


def read_blocks(
    text: str, tags: tuple[str, str], read: Callable[[str, str], ToolCall], *, tells_end: bool = False
) -> ParsedText:
    """Parse the calls between two tags.

    A closing tag may be part of an argument. So a block ends at its first closing tag if it can be parsed with that end;
    otherwise at the last closing tag before the next block, if it can be parsed with that one; otherwise at the first. Each
    character is read at most twice, or a few times with `tells_end`.

    Args:
        text: The text with the blocks.
        tags: The opening and the closing tag of a block.
        read: Parses (text between the tags, text with the tags) to a call.
        tells_end: Whether `read` returns an error for a text that continues after a call. Then a block that has no closing
            tag before the next opening tag is also tried with that tag as part of an argument.
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
    """Return a call that cannot be executed; the model reads `error` in place of a result."""
    return ToolCall(id="", name=name, raw=raw.rstrip(), error=error)
