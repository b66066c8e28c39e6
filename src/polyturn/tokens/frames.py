"""Frames: the template's text around new messages, learned from one render and filled in for every later turn.

    a tool message  ->  "<|im_end|>\\n<|im_start|>user\\n<tool_response>\\n" SLOT "\\n</tool_response><|im_end|>\\n…"

A frame is only used where it gives what a real render gives on trial contents; how a template spells a content (as it is,
trimmed, as JSON) is found the same way. Here are also the small functions on messages that encoding and framing share.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from polyturn.core.messages import Message, Origin

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles that templates know; any other is a text like the rest."""

SlotKey: TypeAlias = tuple[int, str]
"""(index of the message, "content", "name" or "id")."""

_SLOT = re.compile(r"Zq7Slot(\d+)(content|name|id)Z")

SPELLINGS: Mapping[str, Callable[[str], str]] = {
    "as it is": lambda text: text,
    "trimmed": str.strip,
    "without outer newlines": lambda text: text.strip("\n"),
    "without leading newlines": lambda text: text.lstrip("\n"),
    "without leading space": str.lstrip,
    "without trailing space": str.rstrip,
    "as JSON": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "as ASCII JSON": lambda text: json.dumps(text)[1:-1],
    "trimmed, as JSON": lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
}
"""The spellings of a content in templates, from the commonest on."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The template's text around the contents of one shape of new messages."""

    literals: tuple[str, ...]
    """Template text; between literals i and i + 1 stands slot i."""
    slots: tuple[SlotKey, ...]
    control: tuple[int, ...]
    """The control tokens of the template text, in order: encoding with real contents must give exactly these."""
    spelling: Mapping[str, str]
    """role -> the key of `SPELLINGS` that its contents are written with."""

    def fill(self, new: Sequence[Message], change: Callable[[str, Origin], str] = lambda text, _: text) -> str:
        """Return the text of `new`, each of their texts spelled as the template does it and then changed."""
        texts = values(new)
        out = [self.literals[0]]
        for slot, literal in zip(self.slots, self.literals[1:], strict=True):
            text = texts[slot]
            if slot[1] == "content":
                text = SPELLINGS[self.spelling[new[slot[0]].role]](text)
            out += (change(text, origin_of(new[slot[0]])), literal)
        return "".join(out)


class Outline(NamedTuple):
    """The places of the texts in one shape of new messages, before it is known how the template spells them."""

    literals: tuple[str, ...]
    slots: tuple[SlotKey, ...]


def outline(new: Sequence[Message], text: str) -> Outline | None:
    """Split `text`, what a template writes for `with_slots(new)`; None where it does not show every content as it is."""
    pieces = _SLOT.split(text)
    slots = tuple((int(i), field) for i, field in zip(pieces[1::3], pieces[2::3], strict=True))
    if any(m.text and (index, "content") not in slots for index, m in enumerate(new)):
        return None
    return Outline(tuple(pieces[0::3]), slots)


def find_frame(
    text_outline: Outline, tried: Sequence[tuple[Sequence[Message], str]], *, control: tuple[int, ...]
) -> Frame | None:
    """Return the frame of an outline; None if the template treats contents in a way of its own.

    Args:
        text_outline: The outline.
        tried: Messages of its shape (`trials`), and what the template writes for them.
        control: The control tokens of the template text.
    """
    for spelling in _spellings({m.role for m in tried[0][0]}):
        frame = Frame(*text_outline, control, spelling)
        if all(frame.fill(new) == text for new, text in tried):
            return frame
    return None


def trials(new: Sequence[Message]) -> list[Sequence[Message]]:
    """Return messages of the shape of `new`, themselves the first, that show how a template spells contents."""
    return [new, *([_with_text(i, m, text) for i, m in enumerate(new)] for text in _TRIALS)]


def _spellings(roles: set[str]) -> Iterator[dict[str, str]]:
    """Yield ways to spell the contents of `roles`: all alike, then every mixture of two."""
    for spelling in SPELLINGS:
        yield dict.fromkeys(roles, spelling)
    if len(roles) == 2:
        for pair in itertools.product(SPELLINGS, repeat=2):
            yield dict(zip(sorted(roles), pair, strict=True))


_TRIALS = (
    "Two words.",
    "a \"quote\", a \\ and a {brace}: <b>1 < 2 & 3</b>\n\n\tnext 'line' é 日",
    '{"a": [1, null]}',
    "  padded\n\n",
    "\n\nnewlines\n",
    "12",
)
"""Contents that show whether a template trims, escapes or otherwise changes what it is given."""


def _kind(text: str) -> str:
    if not text:
        return "empty"
    if not text.strip():
        return "blank"
    return "text" if text == text.strip() else "padded"


def shape(new: Sequence[Message]) -> tuple[object, ...] | None:
    """Return the key on which the frame of `new` depends; None if only a real render will do."""
    out: list[object] = []
    for m in new:
        if not isinstance(m.content, str) or m.tool_calls or m.reasoning is not None or m.role not in ROLES:
            return None
        kind = _kind(m.content)
        if kind == "blank":  # a template may take it for empty, and another one for text
            return None
        out.append((m.role, kind, m.name is None, m.tool_call_id is None))
    return tuple(out)


def values(new: Sequence[Message]) -> dict[SlotKey, str]:
    """Return the environment's texts by slot."""
    out: dict[SlotKey, str] = {}
    for index, m in enumerate(new):
        out[index, "content"] = m.text
        if m.name is not None:
            out[index, "name"] = m.name
        if m.tool_call_id is not None:
            out[index, "id"] = m.tool_call_id
    return out


def with_slots(new: Sequence[Message]) -> list[Message]:
    """Return `new` with a placeholder for every environment text."""
    return [
        replace(
            m,
            content=f"Zq7Slot{index}contentZ" if m.text else "",
            name=None if m.name is None else f"Zq7Slot{index}nameZ",
            tool_call_id=None if m.tool_call_id is None else f"Zq7Slot{index}idZ",
        )
        for index, m in enumerate(new)
    ]


def _with_text(index: int, m: Message, text: str) -> Message:
    """Return `m` with a trial content of the same kind, and a trial name and id."""
    padded = text if text != text.strip() else f" \n{text}{index} \n"
    content = {"empty": "", "text": text.strip(), "padded": padded}[_kind(m.text)]
    name = None if m.name is None else f"trial_{index}"
    return replace(m, content=content, name=name, tool_call_id=None if m.tool_call_id is None else f"call_9_{index}")


def origin_of(message: Message) -> Origin:
    """Return a message's origin: the environment, if it states none."""
    return message.origin or Origin.ENVIRONMENT


def map_all_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return plain data with every string in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(k)): map_all_strings(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [map_all_strings(v, change) for v in value]
    return value


def prompt_key(messages: Sequence[Message]) -> tuple[object, ...] | None:
    """Return the key on which a prompt's ids depend; None for a prompt that holds a turn, which is not asked for twice."""
    if any(m.role == "assistant" or m.tool_calls or m.reasoning or not isinstance(m.content, str) for m in messages):
        return None
    return tuple((m.origin, m.role, m.content, m.name, m.tool_call_id) for m in messages)


def unused_word(texts: Iterable[str], stem: str) -> str:
    """Return a word that starts with `stem` and occurs in none of `texts`, in small letters or capitals."""
    lowered = [text.lower() for text in texts]
    words = (f"{stem}{number}Z" for number in itertools.count())
    return next(word for word in words if not any(word.lower() in text for text in lowered))
