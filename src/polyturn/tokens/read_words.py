"""Finds the words in contents to which a template reacts, by rendering: `/no_think` as a switch, `<image>` to remove it.

A frame (`frames.py`) can stand for all contents only if the template does not react to them. The candidates are the string
literals of the template. The template reacts to a word if it writes contents with the word differently from contents with a
neutral word.
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
        # Control text in contents is hidden from templates (`trust`).
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
