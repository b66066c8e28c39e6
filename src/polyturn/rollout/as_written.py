"""AsWritten: messages with their reasoning, as the model wrote it, for templates that have no field for it.

    message    reasoning "2 + 2 is 4."   content "4"                 what plug-ins read
    shown      content "<think>2 + 2 is 4.</think>\\n4"               what the template renders, its reasoning a part

Separate from the transcript because a message is told by its identity: the same object stands for the same text wherever it
is shown again, in a rewritten history and in a fork, and a message that a plug-in made is shown as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from polyturn.core.messages import Message


class AsWritten:
    """Messages with reasoning, and what the model wrote for them to the letter; forks share it."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: Iterable[tuple[Message, str]] = ()) -> None:
        """Begin with messages and their texts."""
        self.pairs = [(message, text) for message, text in pairs]

    def add(self, message: Message, text: str) -> None:
        """Remember what the model wrote for `message`."""
        self.pairs.append((message, text))

    def of(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return `messages` with what the model wrote back in the content."""
        if not self.pairs:
            return messages
        written = {id(message): text for message, text in self.pairs}
        return [_with_reasoning(m, written[id(m)]) if id(m) in written else m for m in messages]


_THOUGHT = re.compile(r"(\s*)<think>(.*?)(?:(</think>)(.*))?", re.DOTALL)


def _with_reasoning(message: Message, text: str) -> Message:
    """Return the message whose content is `text` up to the end of what it said, without the calls, its reasoning apart."""
    if message.text:
        start = text.rfind(message.text)
        if start < 0:  # the content stands in pieces around calls
            return message
        text = text[: start + len(message.text)]
    elif message.tool_calls:
        raw = message.tool_calls[0].raw
        if not raw or raw not in text:
            return message
        text = text.partition(raw)[0].rstrip()
    found = _THOUGHT.fullmatch(text)
    if found is None:
        return message
    before, thought, closing, after = found.groups()
    parts = (
        {"type": "text", "text": before},
        {"type": "reasoning", "text": thought, "is_open": closing is None},
        {"type": "text", "text": after or ""},
    )
    return replace(message, content=parts, reasoning=None)
