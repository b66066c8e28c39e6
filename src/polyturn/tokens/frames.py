"""Frames: the template's text around new messages, taken from one render and reused for later messages of the same shape.

    a tool message  ->  "<|im_end|>\\n<|im_start|>user\\n<tool_response>\\n" SLOT "\\n</tool_response><|im_end|>\\n…"

A frame is used only if it equals a real render for several trial contents. The trials also show how the template spells a
content: unchanged, trimmed, or as JSON.
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
"""Roles that templates know. Any other role is treated as text, so messages with it get no frame."""

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
"""Name -> a function from a message's content to the text that the template writes for it; the most common first."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The template's text around the contents of one shape of new messages."""

    literals: tuple[str, ...]
    """Template text; slot i is between literals i and i + 1."""
    slots: tuple[SlotKey, ...]
    control: tuple[int, ...]
    """The control tokens of the template text, in order; encoding with real contents must give exactly these."""
    spelling: Mapping[str, str]
    """Role -> the key in `SPELLINGS` for its contents."""

    def fill(self, new: Sequence[Message], change: Callable[[str, Origin], str] = lambda text, _: text) -> str:
        """Fill the slots with the texts of `new`, each spelled as the template spells it and then passed to `change`."""
        texts = values(new)
        out = [self.literals[0]]
        for slot, literal in zip(self.slots, self.literals[1:], strict=True):
            text = texts[slot]
            if slot[1] == "content":
                text = SPELLINGS[self.spelling[new[slot[0]].role]](text)
            out += (change(text, origin_of(new[slot[0]])), literal)
        return "".join(out)


class Outline(NamedTuple):
    """The template text and the slots of new messages of one shape; how the template spells contents is not known yet."""

    literals: tuple[str, ...]
    slots: tuple[SlotKey, ...]


def outline(new: Sequence[Message], text: str) -> Outline | None:
    """Split `text`, the render of `with_slots(new)`, at its slots; None if a content is missing or changed."""
    pieces = _SLOT.split(text)
    slots = tuple((int(i), field) for i, field in zip(pieces[1::3], pieces[2::3], strict=True))
    if any(m.text and (index, "content") not in slots for index, m in enumerate(new)):
        return None
    return Outline(tuple(pieces[0::3]), slots)


def find_frame(
    text_outline: Outline, tried: Sequence[tuple[Sequence[Message], str]], *, control: tuple[int, ...]
) -> Frame | None:
    """Find the spelling with which the filled outline equals all real renders; None if no spelling does.

    Args:
        text_outline: The outline.
        tried: (messages, render) for several lists of messages of the outline's shape (`trials`).
        control: The control tokens of the template text.
    """
    for spelling in _spellings({m.role for m in tried[0][0]}):
        frame = Frame(*text_outline, control, spelling)
        if all(frame.fill(new) == text for new, text in tried):
            return frame
    return None


def trials(new: Sequence[Message]) -> list[Sequence[Message]]:
    """Return `new`, and messages of the same shape whose contents a template may trim or escape."""
    return [new, *([_with_text(i, m, text) for i, m in enumerate(new)] for text in _TRIALS)]


def _spellings(roles: set[str]) -> Iterator[dict[str, str]]:
    """Yield role -> spelling: first the same spelling for all roles; then, for two roles, every pair of spellings."""
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
"""Contents that show whether a template trims, escapes or otherwise changes contents."""


def _kind(text: str) -> str:
    if not text:
        return "empty"
    if not text.strip():
        return "blank"
    return "text" if text == text.strip() else "padded"


def shape(new: Sequence[Message]) -> tuple[object, ...] | None:
    """Return the cache key of the frame of `new`; None if the messages always need a real render."""
    out: list[object] = []
    for m in new:
        if not isinstance(m.content, str) or m.tool_calls or m.reasoning is not None or m.role not in ROLES:
            return None
        kind = _kind(m.content)
        if kind == "blank":  # some templates treat white space as empty, others as text
            return None
        out.append((m.role, kind, m.name is None, m.tool_call_id is None))
    return tuple(out)


def values(new: Sequence[Message]) -> dict[SlotKey, str]:
    """Return slot -> text for the content, name and id of each message."""
    out: dict[SlotKey, str] = {}
    for index, m in enumerate(new):
        out[index, "content"] = m.text
        if m.name is not None:
            out[index, "name"] = m.name
        if m.tool_call_id is not None:
            out[index, "id"] = m.tool_call_id
    return out


def with_slots(new: Sequence[Message]) -> list[Message]:
    """Return `new` with every content, name and id replaced by the placeholder of its slot; empty contents stay empty."""
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
    """Return the origin of a message; the environment if none is set."""
    return message.origin or Origin.ENVIRONMENT


def map_all_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every string in plain data, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(k)): map_all_strings(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [map_all_strings(v, change) for v in value]
    return value


def prompt_key(messages: Sequence[Message]) -> tuple[object, ...] | None:
    """Return the cache key of a prompt's ids; None for a prompt with an assistant turn, which rarely repeats."""
    if any(m.role == "assistant" or m.tool_calls or m.reasoning or not isinstance(m.content, str) for m in messages):
        return None
    return tuple((m.origin, m.role, m.content, m.name, m.tool_call_id) for m in messages)


def unused_word(texts: Iterable[str], stem: str) -> str:
    """Return a word that starts with `stem` and occurs in none of `texts`, in upper or lower case."""
    lowered = [text.lower() for text in texts]
    words = (f"{stem}{number}Z" for number in itertools.count())
    return next(word for word in words if not any(word.lower() in text for text in lowered))
