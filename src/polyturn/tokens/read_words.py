"""Finds the words in contents that change a template's output: `/no_think` may be a switch, and `<image>` may be removed.

A frame (`frames.py`) is the same for all contents, so it must not be used for contents with such words. The candidates are
the string literals of the template. A candidate counts if the template renders contents with it differently from contents
with a neutral word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from polyturn.core.messages import Message, ToolCall
from polyturn.tokens.frames import SPELLINGS
from polyturn.tokens.lexed import string_literals
from polyturn.tokens.turn_ends import Renderer

_MAX_CHARS = 80


class _TemplateRenderer(Renderer, Protocol):
    @property
    def chat_template(self) -> str | None: ...

    def has_control(self, text: str) -> bool: ...


def find_read_words(codec: _TemplateRenderer) -> tuple[str, ...]:
    """Return the literals of the template that change its output when a system, user or tool message contains them."""
    words = []
    for literal in dict.fromkeys(text.strip() for text in string_literals(codec.chat_template or "")):
        # Templates do not see control text in contents, because `trust` replaces it by placeholder words.
        if literal and len(literal) <= _MAX_CHARS and not codec.has_control(literal):
            words.append(literal)
    words_read = set[str]()
    for role in ("user", "tool", "system"):
        words_read |= set(_read_by(codec, role, words))
    return tuple(word for word in words if word in words_read)


def _read_by(codec: _TemplateRenderer, role: str, words: Sequence[str]) -> Iterator[str]:
    """Yield the words that change the render of a message in this role; a first render tries all of them together."""
    if role != "system" and not _changes(codec, role, [text for word in words for text in _sayings(word)]):
        return
    for word in words:
        if any(_changes(codec, role, [text]) for text in _sayings(word)):
            yield word


def _sayings(word: str) -> tuple[str, ...]:
    return word, f"Zq0aZ {word} Zq0bZ"


def _changes(codec: _TemplateRenderer, role: str, contents: Sequence[str]) -> bool:
    """Return whether the render with `contents` differs from that with neutral words in more than the words themselves."""
    plain = [f"Zq{number}plainZ" for number in range(len(contents))]
    rendered = codec.template.try_render(_conversation(role, plain), add_generation_prompt=True)
    if rendered is None or any(word not in rendered for word in plain):
        return False
    written = codec.template.try_render(_conversation(role, contents), add_generation_prompt=True)
    for spelling in (SPELLINGS["as it is"], SPELLINGS["as JSON"]):
        expected = rendered
        for word, content in zip(plain, contents, strict=True):
            expected = expected.replace(word, spelling(content))
        if written == expected:
            return False
    return True


def _conversation(role: str, contents: Sequence[str]) -> list[Message]:
    if role == "system":
        return [*(Message(role="system", content=text) for text in contents), Message(role="user", content="Hi")]
    out = [] if role == "user" else [Message(role="user", content="Hi")]
    for number, text in enumerate(contents):
        call = ToolCall(id=f"call{number:05d}", name="probe", arguments={"key": "value"})
        if role == "tool":
            out.append(Message(role="assistant", content="", tool_calls=(call,)))
            out.append(Message(role="tool", content=text, tool_call_id=call.id, name=call.name))
        else:
            out += [Message(role="user", content=text), Message(role="assistant", content="So.")]
    return out[:-1] if role == "user" else out
