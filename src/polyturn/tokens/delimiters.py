"""Delimiters: finds the control tokens that open or close turns, roles and media, by rendering sample conversations.

By default, if the text of a control token occurs in a prompt of the run's owner, it is encoded as that token, except for
delimiters (`trust.py`). A system prompt that explains <think> or <tool_call> needs the tokens with which the model was
trained, but it must not end its own turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from polyturn.core.messages import Message, ToolCall
from polyturn.tokens.turn_ends import ControlSpan, Renderer, TurnEnds

_MEDIA: tuple[Mapping[str, Any], ...] = (
    {"type": "image", "image": "x"},
    {"type": "image_url", "image_url": {"url": "x"}},
    {"type": "video", "video": "x"},
    {"type": "audio", "audio": "x"},
)
_CALL = ToolCall(id="call_0_0", name="probe", arguments={"key": "value"})


class _ControlRenderer(Renderer, Protocol):
    @property
    def control_tokens(self) -> Mapping[int, str]: ...

    @property
    def turn_ends(self) -> TurnEnds: ...

    @property
    def special_ids(self) -> frozenset[int]: ...


def find_delimiters(codec: _ControlRenderer) -> frozenset[int]:
    """Find stop tokens, special tokens, and the tokens that the template writes around messages and media.

    Pairs of tags around messages, such as <think> and </think>, are not delimiters.
    """
    known = set(codec.control_tokens.values())
    user, system = Message(role="user", content="Hi"), Message(role="system", content="Be brief.")
    delimiters = {*codec.turn_ends.stops, *codec.turn_ends.past, *codec.special_ids}
    for messages in ([user], [system, user], *_with_turns(user)):
        delimiters |= {s.id for s in _spans(codec, messages) if not _is_tag(codec.control_tokens[s.id], known)}
    for part in _MEDIA:
        showing = Message(role="user", content=({"type": "text", "text": "Hi"}, part))
        delimiters |= {s.id for s in _spans(codec, [showing], opened=(False,))}
    return frozenset(delimiters)


def find_call_tags(codec: _ControlRenderer) -> frozenset[int]:
    """Find the tokens that the template writes only into turns with a call."""
    user, answer = Message(role="user", content="Hi"), Message(role="assistant", content="Hello")
    calling = Message(role="assistant", content="Hello", tool_calls=(_CALL,))
    others = {*codec.turn_ends.stops, *codec.turn_ends.past, *codec.special_ids}
    others |= {s.id for turns in ([user, answer], [user, answer, user]) for s in _spans(codec, turns)}
    return frozenset(s.id for s in _spans(codec, [user, calling]) if s.id not in others)


def _with_turns(user: Message) -> Iterator[list[Message]]:
    answer = Message(role="assistant", content="Hello")
    calling = Message(role="assistant", content="", tool_calls=(_CALL,))
    result = Message(role="tool", content="4", tool_call_id=_CALL.id, name=_CALL.name)
    yield [user, answer, user]
    yield [user, calling, result]
    yield [user, answer, result]


def _spans(codec: Renderer, messages: list[Message], *, opened: tuple[bool, ...] = (False, True)) -> list[ControlSpan]:
    texts = (codec.template.try_render(messages, add_generation_prompt=is_opened) for is_opened in opened)
    return [s for text in texts if text is not None for s in codec.control_spans(text)]


def _is_tag(text: str, known: set[str]) -> bool:
    """Return whether `text` is one of a pair of control texts such as <think> and </think>."""
    if not (text.startswith("<") and text.endswith(">")) or text[1:2] in "|｜" or text[-2:-1] in "|｜":
        return False
    partner = text.replace("</", "<", 1) if text.startswith("</") else text.replace("<", "</", 1)
    return partner in known
