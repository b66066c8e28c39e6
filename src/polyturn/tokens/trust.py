"""TrustRule: decides which control tokens a text may become. The decision depends only on the text's author and two options.

    author         control tokens that the author's texts may become
    owner          escape_prompts "delimiters": all except those that open or close turns, roles and media; "all": none;
                   "none": all
    model          none: the template or polyturn writes the tags around the model's reasoning and calls
    environment    none, neither in contents nor in names, roles or keys of a schema

With `escape_observations` off, the texts of model and environment may become any control token.

`DeltaEncoder` applies the rule to all text that it encodes: prompts, answers, histories, schemas, and continuations of a
message. It replaces each text that must not become a control token by a placeholder word and renders the template. It then
encodes the render, with the replaced texts as ordinary text at the positions of their words. All other text is encoded
together with the text around it, so it gets the same ids as in a full render.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from polyturn.core.arrays import Ids
from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.core.media import KINDS, kind_of
from polyturn.core.messages import Message, Origin, ToolCall
from polyturn.tokens.codec import Codec
from polyturn.tokens.frames import ROLES, map_all_strings, origin_of, unused_word
from polyturn.tokens.lexed import names_read

ESCAPES = ("delimiters", "all", "none")
"""The control texts of the owner that become ordinary text: those that open or close turns, roles or media; all; none."""

Change: TypeAlias = Callable[[str, Origin], str]
"""(text, origin) -> the text that the template gets instead."""

_WORD = re.compile(r"[\w. -]*", re.ASCII)
"""Text that contains no control token; a template may still build one around it, as in `<|` + role + `|>`."""

_PART_WORDS = frozenset({"type", "text", "reasoning", "is_open", *KINDS})
"""Keys and types of content parts that polyturn reads itself."""

_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
"""Keys of a JSON schema whose values map names to schemas; the schema's author chose these names."""

_UNESCAPED = re.compile(r"""[^\s"\\](?:[^"\\\x00-\x1f]*[^\s"\\])?""")
"""Matches the stretches of a text that `trim` and `tojson` leave unchanged: without quotes, backslashes and control
characters, and without white space at their ends. Only these are replaced by placeholder words, so the template still trims
and escapes the rest."""


_SIDE = re.compile(r"[^a-z]|begin|start|end")
"""Matches the parts in which an opening tag differs from its closing tag. Without them the two tags of a pair are equal:
`<tool_call>` and `</tool_call>` both become `toolcall`."""


class Written(NamedTuple):
    """A text and its author."""

    text: str
    origin: Origin


class TrustRule:
    """Decides which texts may become control tokens."""

    def __init__(self, codec: Codec, *, escape_prompts: str = "delimiters", escape_observations: bool = True) -> None:
        """Make a rule.

        Args:
            codec: The tokenizer and template.
            escape_prompts: One of `ESCAPES`: the control texts of the owner that become ordinary text.
            escape_observations: Whether the control texts of all other authors become ordinary text.

        Raises:
            ConfigError: `escape_prompts` is not one of `ESCAPES`.
        """
        if escape_prompts not in ESCAPES:
            raise ConfigError(f"escape_prompts cannot be {escape_prompts!r}.{did_you_mean(escape_prompts, ESCAPES)}")
        self._codec = codec
        self._escape_prompts = escape_prompts
        self._escape_observations = escape_observations

    @functools.cached_property
    def barred(self) -> Mapping[Origin, Collection[int]]:
        """Origin -> the control tokens that its texts must not become."""
        every, escapes = self._codec.control_tokens.keys(), self._escape_prompts
        of_owner = self._codec.delimiters if escapes == "delimiters" else every if escapes == "all" else ()
        of_others = every if self._escape_observations else ()
        return {origin: of_owner if origin is Origin.OWNER else of_others for origin in Origin}

    def may_spell_with_template(self, written: Sequence[Written]) -> bool:
        """Return whether one of the texts may form a forbidden control token together with the template text around it."""
        return any(self._bars_all(w.origin) and self._may_spell(w.text) for w in written)

    def hides_whole(self, text: str, origin: Origin) -> bool:
        """Return whether the whole text must be replaced by placeholder words.

        This is the case if its author must not write any control token, and the text may contain one or form one together
        with the template text around it.
        """
        return self._bars_all(origin) and (_WORD.fullmatch(text) is None or self._may_spell(text))

    def _bars_all(self, origin: Origin) -> bool:
        return len(self.barred[origin]) == len(self._codec.control_tokens)

    def _may_spell(self, text: str) -> bool:
        """Return whether a text may be the beginning, the middle or the end of a control token."""
        if self._codec.normalizes_control and not text.isascii():
            return True
        return not self._edges.isdisjoint(text) or (text != "" and text in self._all_control)

    @functools.cached_property
    def _edges(self) -> frozenset[str]:
        return frozenset(c for text in self._codec.control_tokens.values() for c in (text[0], text[-1]))

    @functools.cached_property
    def _all_control(self) -> str:
        return "\x00".join(self._codec.control_tokens.values())

    # The texts of messages and tools.

    def written(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), **foreign: Any) -> list[Written]:
        """Return the texts of messages and tools that `changed` and `changed_tools` change, with their authors."""
        # The methods that change texts also collect them, so the list cannot miss a text.
        written_values: list[Written] = []

        def note(text: str, origin: Origin) -> str:
            written_values.append(Written(text, origin))
            return text

        for message in messages:
            self.changed(message, note)
        self.changed_tools(tools, note, **foreign)
        return written_values

    def changed(self, message: Message, change: Change) -> Message:
        """Apply `change` to every text of a message, except for words that the template knows, such as roles.

        Return the message itself if nothing changes.
        """
        origin = origin_of(message)
        # A call in an owner's message follows the rule for the model: a control token in its arguments must not close it.
        of_calls = Origin.MODEL if origin is Origin.OWNER else origin

        def text(text_part: str) -> str:
            return change(text_part, origin)

        def call(one: ToolCall) -> ToolCall:
            return replace(
                one,
                id=change(one.id, of_calls),
                name=self._changed_word(one.name, lambda text_part: change(text_part, of_calls), known=self._compared),
                arguments=map_all_strings(one.arguments, lambda text_part: change(text_part, of_calls)),
                raw=self._changed_raw(one.raw, change, of_calls),
            )

        content = message.content
        out = replace(
            message,
            role=self._changed_word(message.role, text, known=self._compared),
            content=text(content) if isinstance(content, str) else tuple(self._changed_part(p, text) for p in content),
            tool_calls=tuple(map(call, message.tool_calls)),
            tool_call_id=None if message.tool_call_id is None else text(message.tool_call_id),
            name=None if message.name is None else self._changed_word(message.name, text, known=self._compared),
            reasoning=None if message.reasoning is None else text(message.reasoning),
        )
        return message if out == message else out

    def changed_tools(
        self, tools: Sequence[Mapping[str, Any]], change: Change, *, foreign: Collection[str] = ()
    ) -> list[Mapping[str, Any]]:
        """Apply `change` to every text in the schemas, including keys, except for words that the template knows.

        `foreign` contains the names of the tools whose schemas the environment wrote; the owner wrote all others.
        """
        out = []
        for tool in tools:
            origin = Origin.ENVIRONMENT if name_of(tool) in foreign else Origin.OWNER
            out.append(self._changed_schema(tool, _by(change, origin)))
        return out

    def _changed_schema(self, value: Any, text: Callable[[str], str], *, are_names: bool = False) -> Any:
        """Change the texts of a schema, including its keys, except for words that the template compares with or looks up.

        With `are_names`, the keys of `value` are names that the author chose, such as those of parameters; all are changed.
        """
        if isinstance(value, str):
            return self._changed_word(value, text, known=self._looked_up)
        if isinstance(value, Mapping):
            known = () if are_names else self._looked_up
            return {
                self._changed_word(str(k), text, known=known): self._changed_schema(
                    v, text, are_names=k in _OF_NAMES and not are_names
                )
                for k, v in value.items()
            }
        return [self._changed_schema(v, text) for v in value] if isinstance(value, list | tuple) else value

    def _changed_raw(self, raw: str, change: Change, origin: Origin) -> str:
        """Change the text of a call that could not be parsed, but keep the tags that open and close the call.

        The opening tag is kept if a call of the model begins with one. If it does not (a parser may start a call anywhere,
        for example inside a list), the whole text is changed. A tag at the end is kept only if it closes the opening tag: an
        unclosed call may end with another tag, such as the end of a turn or the start of a tool result, which is changed.
        """
        spans = self._codec.control_spans(raw) if origin is Origin.MODEL else []
        start = spans[0].end if spans and spans[0].start == 0 and spans[0].id in self._codec.call_tags else 0
        last = spans[-1].start if start and spans[-1].end == len(raw) else len(raw)
        first, closing = raw[:start], raw[last:]
        is_closed = last >= start and first != closing and _SIDE.sub("", first) == _SIDE.sub("", closing)
        end = last if is_closed else len(raw)
        return first + change(raw[start:end], origin) + raw[end:]

    def _changed_part(self, part: Mapping[str, Any], text: Callable[[str], str]) -> dict[str, Any]:
        """Change the texts of a content part, but not the source of a medium, which the template does not render."""
        kind = kind_of(part)

        def value(key: str, raw: Any) -> Any:
            if key == "type" and isinstance(raw, str):
                return self._changed_word(raw, text, known=self._compared | _PART_WORDS)
            return raw if kind is not None and key == kind else map_all_strings(raw, text)

        return {self._changed_word(str(k), text, known=self._looked_up | _PART_WORDS): value(k, v) for k, v in part.items()}

    def _changed_word(self, word: str, text: Callable[[str], str], *, known: Collection[str]) -> str:
        """Change a word, unless it is in `known` (the words that the template knows) and contains no control token."""
        return word if word in known and not self._codec.has_control(word) else text(word)

    @functools.cached_property
    def _compared(self) -> frozenset[str]:
        """The roles and the template's string literals. The template may compare a role, a type or a name with them, so
        replacing such a word could change what the template writes."""
        return ROLES | self._codec.literals

    @functools.cached_property
    def _looked_up(self) -> frozenset[str]:
        """The words of `_compared`, and the keys that the template looks up in messages, schemas and content parts."""
        return self._compared | names_read(self._codec.chat_template or "")


class Hiding:
    """Replaces texts by placeholder words before a render. Then encodes the render, with each text in place of its word."""

    def __init__(self, rule: TrustRule, codec: Codec, written: Sequence[Written]) -> None:
        """Prepare placeholder words for `written`, all texts that may be hidden."""
        self._rule, self._codec, self._written = rule, codec, written
        self._hidden: dict[str, int] = {}

    @functools.cached_property
    def _word(self) -> str:
        """The prefix of the placeholder words, which occurs in none of the texts."""
        return unused_word((w.text for w in self._written), "Zq7Hidden")

    def control(self, text: str, origin: Origin) -> str:
        """Replace the control texts that the author must not write by placeholder words; a `Change`."""
        return self._codec.replace_control(text, self._stand_in, barred=self._rule.barred[origin])

    def whole(self, text: str, origin: Origin) -> str:
        """Replace the whole text if it may become part of a forbidden control token, else do as `control`; a `Change`."""
        if self._rule.hides_whole(text, origin):
            return _UNESCAPED.sub(lambda match: self._stand_in(match[0]), text)
        return self.control(text, origin)

    def encode(self, rendered: str, *, last_id: int | None) -> Ids:
        """Encode a render; in place of each placeholder word, encode the text that it hides as ordinary text."""
        if not self._hidden:
            return self._codec.encode_pieces([(rendered, False)], last_id=last_id)
        # Ignore case, because a template may change the case of a role or of a text, and so of its placeholder word.
        pieces = re.split(rf"{self._word}(\d+)Z", rendered, flags=re.IGNORECASE | re.ASCII)
        hidden = list(self._hidden)
        return self._codec.encode_pieces(
            [(hidden[int(piece)], True) if i % 2 else (piece, False) for i, piece in enumerate(pieces)], last_id=last_id
        )

    def _stand_in(self, text: str) -> str:
        # Equal texts get equal words, because a template may compare two texts with each other.
        return f"{self._word}{self._hidden.setdefault(text, len(self._hidden))}Z"


def name_of(tool: Mapping[str, Any]) -> str:
    """Return the name of a schema's tool."""
    return str(tool.get("function", tool).get("name"))


def _by(change: Change, origin: Origin) -> Callable[[str], str]:
    return lambda text: change(text, origin)
