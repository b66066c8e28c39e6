"""The protocol of parsers, their registry, and the frame that all built-in ones share: reasoning first, then calls.

    text  ->  reasoning format: (reasoning, rest)  ->  tool format: rest -> pieces of content and calls  ->  ParsedTurn

The two formats are separate things, because one way to write calls comes with several ways to write reasoning: a family says
which reasoning tags it writes by itself (`default_reasoning`), and a name can replace them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from polyturn.core.messages import ToolCall
from polyturn.core.plugins import Registry
from polyturn.tokens.parsers.reasoning import reasoning_formats, split_reasoning

Tools = Sequence[Mapping[str, Any]]
"""Tool schemas in OpenAI's function form."""


class ParsedTurn(NamedTuple):
    """One turn, read."""

    content: str
    """The text without reasoning and calls; exactly the text when it has neither."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


class ToolCallParser(Protocol):
    """Reads one model family's way to write tool calls and reasoning."""

    def parse(self, text: str, *, id_prefix: str = "call", tools: Tools = ()) -> ParsedTurn:
        """Read one turn's text, without its stop token. Never raises.

        Args:
            text: What the model wrote.
            id_prefix: The i-th call gets the id `{id_prefix}_{i}`, unless the family's templates ask for ids of their own.
            tools: Schemas of the tools that may be called; formats that write all arguments as text take types from them.
        """
        ...


parsers: Registry[type[ToolCallParser]] = Registry("parsers")


class ParsedText(NamedTuple):
    """The calls in a text, and the pieces of text around them."""

    pieces: list[str]
    calls: list[ToolCall]
    """With the id that the model wrote, or "" where the format has none."""


class TurnParser(ABC):
    """The frame of the built-in parsers; a family writes `read`."""

    call_tags: ClassVar[tuple[str, str]] = ("", "")
    """The tags around a call, so that a reasoning tag inside an argument is left alone; "" where there is none."""
    default_reasoning: ClassVar[str] = "qwen3"
    """The name of the reasoning format that the family writes."""

    def __init__(
        self, *, reasoning: str | None = None, reasoning_is_open: bool = False, calls_in_reasoning: bool = False
    ) -> None:
        """Make a parser.

        Args:
            reasoning: Name of a reasoning format; None for the family's own.
            reasoning_is_open: The generation prompt opens the reasoning, so that all text before its end, or all text of a
                turn that was cut before it ended, is reasoning.
            calls_in_reasoning: Take calls inside reasoning for calls. They are thoughts otherwise.

        Raises:
            UnknownNameError: no reasoning format has that name.
        """
        self.reasoning_name = reasoning or self.default_reasoning
        self._reasoning = reasoning_formats.resolve(self.reasoning_name)
        self._is_open = reasoning_is_open
        self._calls_in_reasoning = calls_in_reasoning

    @abstractmethod
    def read(self, text: str, tools: Tools) -> ParsedText:
        """Return the calls of a text without reasoning. Takes linear time, never raises."""

    def call_id(self, id_prefix: str, index: int) -> str:
        """Return the id of a call for which the model wrote none."""
        return f"{id_prefix}_{index}"

    def parse(self, text: str, *, id_prefix: str = "call", tools: Tools = ()) -> ParsedTurn:
        """Read one turn; see `ToolCallParser.parse`."""
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
            # Spelled out because `dataclasses.replace` costs a third of reading the call.
            out.append(ToolCall(id=own, name=call.name, arguments=call.arguments, raw=call.raw, error=call.error))
        return tuple(out)


_END_MARKS = re.compile(r"(?:<\|[^<>|]{1,40}\|>|<｜[^<>｜]{1,40}｜>|</s>|\s)*+")
"""Control tokens that can stand behind the last call, because the text was decoded with them."""


def join_content(pieces: Sequence[str]) -> str:
    """Return the content around calls: pieces without their outer white space, in lines."""
    return "\n".join(p.strip() for p in pieces if not _END_MARKS.fullmatch(p))


_MAX_LONGER = 8
"""Opening tags in a text that may turn out to stand in an argument; bounded, so that reading stays linear."""


def read_blocks(
    text: str, tags: tuple[str, str], read: Callable[[str, str], ToolCall], *, tells_end: bool = False
) -> ParsedText:
    """Read calls that stand between two tags.

    A block ends at the first closing tag with which it can be read, or at the last one before the next block: a closing tag
    may stand in an argument's text. Each character is read at most twice, and a few times more with `tells_end`.

    Args:
        text: What may hold blocks.
        tags: What opens and what closes a block.
        read: Makes a call of (the text between the tags, the text with them).
        tells_end: `read` refuses what goes on behind a call, so a block may hold an opening tag in an argument's text.
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
    """Return a call that cannot be executed, with the reason for the model to read."""
    return ToolCall(id="", name=name, raw=raw.rstrip(), error=error)
