"""Chooses a parser for a chat template: the one that correctly parses the template's renders of turns with calls.

    template(assistant turn that calls add(a=2))  ->  "<tool_call>{...}</tool_call>"  ->  the parser that reads add(a=2)

The model's name is not used. The template renders turns with one call, with two calls, with nested arguments and with
reasoning; a parser fits if it reads exactly the calls of these turns. All forms of call ids that templates need are tried.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, TemplateError
from polyturn.core.messages import Message, ToolCall
from polyturn.infra.live import NameOrObject
from polyturn.tokens.codec import Codec
from polyturn.tokens.options import ParserOptions
from polyturn.tokens.parsers.base import ParsedTurn, ToolCallParser, Tools, TurnParser, parsers
from polyturn.tokens.parsers.reasoning import ReasoningFormat, reasoning_formats
from polyturn.tokens.turn_ends import common_length

AUTO = ParserOptions()
_USER = Message(role="user", content="Hi")
_SAID, _THOUGHT = "Zq4Said it.", "Zq4Thought of it"
_ARGUMENTS: dict[str, Any] = {
    "text": 'Grüße, 日本 "quoted"\nsecond line',
    "digits": "5",
    "count": 3,
    "exact": True,
    "nested": {"list": [1, "two", {"deep": False}], "empty": {}},
}
_OTHER: dict[str, Any] = {"text": "b", "digits": "07", "count": -1, "exact": False, "nested": {}}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "zq_probe",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "A text."},
                "digits": {"type": "string", "description": "A text of digits."},
                "count": {"type": "integer", "description": "A count."},
                "exact": {"type": "boolean", "description": "A flag."},
                "nested": {"type": "object", "description": "An object."},
            },
            "required": ["text"],
        },
    },
}
_PLAIN = Message(role="assistant", content="Qx9Plain")
_OPEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
"""An incomplete tag at the end of the common prefix of two texts."""
_ID_SHAPES = ("call_{}", "zq4Call0{}", "functions.zq_probe:{}")
"""Forms of call ids that templates require: any, nine letters and digits, or one that contains the tool's name."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """A turn and its render."""

    message: Message
    text: str

    def is_read_by(self, parser: ToolCallParser) -> bool:
        """Return whether the parser reads exactly the calls of the turn, and its content if the template writes it."""
        turn = _parse(parser, self.text)
        read_calls = [(c.name, dict(c.arguments), c.error) for c in turn.tool_calls]
        if read_calls != [(c.name, dict(c.arguments), None) for c in self.message.tool_calls]:
            return False
        # A template may write the content of a turn with calls as reasoning, or not at all.
        content = turn.content.strip()
        return (
            not content or content.endswith(self.message.text)
            if self.message.reasoning
            else content in (self.message.text, "")
        )


def build_parser(
    codec: Codec, options: ParserOptions = AUTO, *, needs_calls: bool = False, base: Path | None = None
) -> ToolCallParser:
    """Build the parser for `options`.

    Args:
        codec: Tokenizer and template, from which parser and reasoning format are detected if `options` does not name them.
        options: The names of the parser and the reasoning format.
        needs_calls: Whether the run has tools. If so, it is an error if no parser reads the template's calls.
        base: The folder from which relative file paths start.

    Raises:
        UnknownNameError: there is no such parser or reasoning format.
        TemplateError: the name is "auto", the run has tools, and no parser reads the template's calls.
        ConfigError: `options` has options besides the name, and the parser takes none.
    """
    name = options.name
    if name == "auto":
        name = detect(codec)
        if name == "none" and needs_calls:
            known = ", ".join(repr(n) for n in parsers if n != "none")
            raise TemplateError(
                "no parser reads back the tool calls that the chat template writes (or it writes none), and the run has "
                f"tools; name the parser in rollout.parser (known: {known}; or your own as file.py:Class, or registered by "
                '@polyturn.tokens.parsers.parsers.register("name")), or use a template that renders tool calls'
            )
    parser = parsers.resolve(name, base=base, key="rollout.parser")
    if not inspect.isclass(parser) or not issubclass(parser, TurnParser):
        if options.reasoning is not None or options.calls_in_reasoning:
            raise ConfigError(
                f"the parser {name!r} takes no options; leave out rollout.parser.reasoning and "
                "rollout.parser.calls_in_reasoning, or derive it from polyturn.tokens.parsers.TurnParser"
            )
        return parser()
    chosen = options.reasoning or detect_reasoning(codec, name, base=base)
    return parser(
        reasoning=chosen,
        reasoning_is_open=_is_open(codec, reasoning_formats.resolve(chosen)),
        calls_in_reasoning=options.calls_in_reasoning,
    )


def detect(codec: Codec) -> str:
    """Return the name of the parser that reads the template's tool calls; "none" if there is none."""
    families = {parsers.resolve(name): name for name in reversed(list(parsers)) if name != "none"}
    instances = [(name, family()) for family, name in reversed(families.items())]
    for ids, is_prompt in itertools.product(_ID_SHAPES, (True, False)):
        probes = _probes(codec, ids, is_prompt)
        for name, parser in instances if probes else ():
            if all(p.is_read_by(parser) for p in probes):
                return name
    return "none"


def detect_reasoning(codec: Codec, name: NameOrObject, *, base: Path | None = None) -> str:
    """Return the name of the template's reasoning format; the default of the parser `name` if no known format fits."""
    family = parsers.resolve(name, base=base)
    own = family.default_reasoning if inspect.isclass(family) and issubclass(family, TurnParser) else "none"
    if own != "none" and not _writes(codec, reasoning_formats.resolve(own)):
        for other in reasoning_formats:
            if _writes(codec, reasoning_formats.resolve(other)):
                return other
    if own == "none":
        return next((n for n in reasoning_formats if _writes(codec, reasoning_formats.resolve(n))), own)
    return own


def _parse(parser: ToolCallParser, text: str) -> ParsedTurn:
    """Parse a rendered turn. If the parser raises, return a turn without calls, which matches no turn with calls."""
    tools: Tools = (_TOOL,)
    try:
        return parser.parse(text, tools=tools)
    except Exception:
        return ParsedTurn(text)


def _probes(codec: Codec, ids: str, is_prompt: bool) -> list[_Probe]:
    """Return the turns with calls that the template renders; empty unless it renders one with a single call."""

    def call(index: int, arguments: dict[str, Any]) -> ToolCall:
        return ToolCall(id=ids.format(index), name="zq_probe", arguments=arguments)

    one, other = call(0, _ARGUMENTS), call(1, _OTHER)
    turns = [
        Message(role="assistant", content="", tool_calls=(one,)),
        Message(role="assistant", content=_SAID, tool_calls=(other,)),
        Message(role="assistant", content="", tool_calls=(one, other)),
        Message(role="assistant", content=_SAID, tool_calls=(one,), reasoning=_THOUGHT),
    ]
    texts = [_render_turn(codec, turn, is_prompt) or "" for turn in turns]
    probes = [_Probe(turn, text) for turn, text in zip(turns, texts, strict=True) if "zq_probe" in text]
    if not any(p.message is turns[0] for p in probes):
        return []
    # A template that writes only the first of several calls (gpt-oss) cannot show how it writes two.
    return [p for p in probes if p.message is not turns[2] or p.text.count("zq_probe") > 1]


def _render_turn(codec: Codec, turn: Message, is_prompt: bool = True) -> str | None:
    """Render a turn without its opening and its end tokens; None if the template cannot.

    Args:
        codec: Tokenizer and template.
        turn: The assistant message.
        is_prompt: True: remove the prefix that the render shares with a generation prompt. False: remove the prefix that it
            shares with the render of another turn, for templates that open past turns differently.
    """
    render, other = codec.template.try_render, [_USER] if is_prompt else [_USER, _PLAIN]
    for tools in ((_TOOL,), ()):
        opening = render(other, tools=tools, add_generation_prompt=is_prompt)
        whole = render([_USER, turn], tools=tools)
        if opening is None or whole is None:
            continue
        common = common_length(opening, whole)
        if inside := _OPEN_TAG.search(whole, max(common - 60, 0), common):
            common = inside.start()
        return _without_end(whole[common:], codec)
    return None


def _without_end(text: str, codec: Codec) -> str:
    ends = tuple(codec.decode([i]) for i in codec.stop_token_ids)
    while (bare := text.rstrip()).endswith(ends) and ends:
        text = bare[: -max(len(e) for e in ends if bare.endswith(e))]
    return text


def _writes(codec: Codec, tags: ReasoningFormat) -> bool:
    """Return whether the template's render of a turn, or its generation prompt, contains the reasoning tags."""
    if not tags.opens:
        return False
    if any(tags.opens in prompt for prompt in _generation_prompts(codec)):
        return True
    if not codec.template.has_reasoning_field:
        return False
    text = _render_turn(codec, Message(role="assistant", content=_SAID, reasoning=_THOUGHT)) or ""
    before, thought, behind = text.partition(_THOUGHT)
    return bool(thought) and tags.opens in before and tags.closes in behind


def _is_open(codec: Codec, tags: ReasoningFormat) -> bool:
    """Return whether every generation prompt, after a user message or a tool result, ends inside reasoning."""
    prompts = _generation_prompts(codec)
    return bool(tags.opens and prompts) and all(p.rfind(tags.opens) > p.rfind(tags.closes) for p in prompts)


def _generation_prompts(codec: Codec) -> list[str]:
    """Return the generation prompts after a user message and, if the template renders results, after a tool result."""
    prompts, render = [], functools.partial(codec.template.try_render, tools=(_TOOL,))
    for ids in _ID_SHAPES:
        call = ToolCall(id=ids.format(0), name="zq_probe", arguments=_OTHER)
        turn = Message(role="assistant", content="", tool_calls=(call,))
        result = Message(role="tool", content="ok", tool_call_id=call.id, name=call.name)
        for messages in ([_USER], [_USER, turn, result]):
            closed, opened = render(messages), render(messages, add_generation_prompt=True)
            if closed is not None and opened is not None and opened.startswith(closed):
                prompts.append(opened[len(closed) :])
    return prompts
