"""ConversationEncoder: whole conversations to ids, with what must not speak in control tokens as ordinary text.

    the owner's prompt       what opens and closes turns and media is text; all control text, or none, where that is asked
    an assistant's turn      nothing in it ends or opens a turn; names and arguments of calls are text
    the environment's words  text, whatever they say: tool results, user replies

Separate from `delta`, which encodes what follows a completion without looking at what the history says: here everything is
rendered, for prompts, for histories that a scheduler wrote, and for the sanity check.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polyturn.core.arrays import Ids
from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.core.messages import Message
from polyturn.tokens.codec import Codec, FenceError
from polyturn.tokens.frames import map_all_strings, map_environment, map_strings, map_text, unused_word

ESCAPES = ("delimiters", "all", "none")
"""Which control texts in a prompt are ordinary text: those that open and close turns and media, all, or none."""

_WORD = re.compile(r"[\w. -]*")
"""Names that spell nothing together with the template's text around them."""


class ConversationEncoder:
    """Encodes conversations as the template writes them, for one set of tools."""

    def __init__(
        self, codec: Codec, *, tools: tuple[Mapping[str, Any], ...], escape_prompts: str, escape_observations: bool
    ) -> None:
        """Make an encoder; `DeltaEncoder` says what the arguments mean.

        Raises:
            ConfigError: `escape_prompts` is not one of `ESCAPES`.
        """
        if escape_prompts not in ESCAPES:
            raise ConfigError(f"escape_prompts cannot be {escape_prompts!r}.{did_you_mean(escape_prompts, ESCAPES)}")
        self._codec = codec
        self._tools = tools
        self._escape_prompts = escape_prompts
        self._escape_observations = escape_observations

    def encode(self, messages: Sequence[Message], num_prompt: int | None, *, add_generation_prompt: bool) -> Ids:
        """Return the ids of a whole conversation.

        Args:
            messages: The conversation.
            num_prompt: How many leading messages are the text of the task's owner; None takes what stands before the first
                assistant's turn, without tool messages.
            add_generation_prompt: Whether the next turn is opened behind it.

        Raises:
            TemplateError: the template cannot render the messages.
        """
        codec = self._codec

        def render(shown: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
            return codec.render(shown, tools=tools, add_generation_prompt=add_generation_prompt)

        text = render(messages, self._tools)
        marker = unused_word([text], "Zq7Fence")
        own = [self._is_own(messages, i, num_prompt) for i in range(len(messages))]
        fenced = [self._fenced(m, is_own, marker) for m, is_own in zip(messages, own, strict=True)]
        tools = self._fenced_tools(marker)
        try:
            is_plain = fenced == list(messages) and tools == self._tools
            ids = codec.encode(text) if is_plain else codec.encode_fenced(render(fenced, tools), marker)
            foreign = [not is_own and self._escape_observations for is_own in own]
            if not any(f and self._may_spell(m) for m, f in zip(messages, foreign, strict=True)):
                return ids
            harmless = [map_environment(m, _harmless) if f else m for m, f in zip(fenced, foreign, strict=True)]
            expected = codec.control_in(codec.encode_fenced(render(harmless, tools), marker))
            if np.array_equal(codec.control_in(ids), expected):
                return ids
            # Template and content together spell a control token, or the template changes the content into one.
            closed = [
                self._closed(m, shown, marker) if f else shown for m, shown, f in zip(messages, fenced, foreign, strict=True)
            ]
            return codec.encode_fenced(render(closed, tools), marker)
        except FenceError:  # the template cuts contents at a word that stands inside a fence
            shown = [m if m is f else map_text(m, codec.defuse) for m, f in zip(messages, fenced, strict=True)]
            schemas = tuple(s if s == t else map_strings(s, codec.defuse) for s, t in zip(self._tools, tools, strict=True))
            return codec.encode(render(shown, schemas))

    def _closed(self, message: Message, fenced: Message, marker: str) -> Message:
        """Return `message` with every text of the environment fenced as a whole."""

        def close(text: str) -> str:
            return text if _WORD.fullmatch(text) else self._codec.enclose(text, marker)

        closed = map_environment(message, close, close)
        return replace(fenced, tool_calls=closed.tool_calls) if message.role == "assistant" else closed

    def _may_spell(self, message: Message) -> bool:
        """Return whether a text of the environment may be the beginning, the end or the middle of a control token."""
        found: list[str] = []

        def note(text: str) -> str:
            found.append(text)
            return text

        map_environment(message, note, note)
        control = self._codec.control_tokens.values()
        return any(not self._edges.isdisjoint(text) or (text and any(text in c for c in control)) for text in found)

    @functools.cached_property
    def _edges(self) -> frozenset[str]:
        return frozenset(c for text in self._codec.control_tokens.values() for c in (text[0], text[-1]))

    def _fenced_tools(self, marker: str) -> tuple[Mapping[str, Any], ...]:
        """Return the schemas, which somebody's server may have written, with no text that ends or opens a turn."""
        codec, prompts = self._codec, self._escape_prompts
        if prompts == "none" or not self._tools:
            return self._tools
        only = None if prompts == "all" else codec.delimiters
        return tuple(map_strings(t, lambda text: codec.fence(text, marker, only=only)) for t in self._tools)

    def _is_own(self, messages: Sequence[Message], index: int, num_prompt: int | None) -> bool:
        """Return whether message `index` is the text of the task's owner; what a tool says never is."""
        if messages[index].role == "tool":
            return False
        if num_prompt is not None:
            return index < num_prompt
        first_turn = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
        return index < first_turn

    def _fenced(self, message: Message, is_own: bool, marker: str) -> Message:
        """Return `message` with what must not speak in control tokens between markers; the message itself if nothing."""
        codec, prompts = self._codec, self._escape_prompts

        def all_of(text: str) -> str:
            return codec.fence(text, marker)

        def delimiters_of(text: str) -> str:
            return codec.fence(text, marker, only=codec.delimiters)

        if is_own:
            fenced = message if prompts == "none" else map_text(message, all_of if prompts == "all" else delimiters_of)
        elif not self._escape_observations:
            return message
        elif message.role == "assistant":
            fenced = self._fenced_turn(message, delimiters_of, all_of, marker)
        else:
            fenced = map_text(message, all_of)
        return message if fenced == message else fenced

    def _fenced_turn(
        self, turn: Message, delimiters_of: Callable[[str], str], all_of: Callable[[str], str], marker: str
    ) -> Message:
        """Fence a past turn: nothing in it ends or opens a turn, and a call's name and arguments are ordinary text."""

        def word_of(text: str) -> str:
            # Beside the template's own brackets a name such as "/tool_response" completes a control token.
            return text if _WORD.fullmatch(text) else self._codec.enclose(text, marker)

        calls = tuple(
            replace(c, id=all_of(c.id), raw=delimiters_of(c.raw))
            if c.error is not None
            else replace(
                c,
                id=all_of(c.id),
                name=word_of(c.name),
                arguments={word_of(k): map_all_strings(v, all_of) for k, v in c.arguments.items()},
            )
            for c in turn.tool_calls
        )
        turn = map_text(turn, delimiters_of)
        return replace(turn, tool_calls=calls, reasoning=None if turn.reasoning is None else delimiters_of(turn.reasoning))


def _harmless(text: str) -> str:
    return "x" if text.strip() else text
