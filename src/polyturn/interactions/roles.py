"""Roles flipped: the conversation as its user sees it, for a model that plays the user.

    system     rules of the model              hidden
    user       How do I …?                     assistant  How do I …?
    assistant  <think>…</think> call search    hidden: thoughts, calls, what tools answered
    tool       …
    assistant  You can …                       user       You can …

Chat templates want a user's message first and roles that take turns, so one opens the conversation, and neighbours are
joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyturn.partners.partner import without_thoughts

OPENING = "Begin the conversation: write your first message."
SILENCE = "(no answer)"
"""The user's view of a message without text that is meant for it."""


def flipped(messages: Sequence[Mapping[str, Any]], *, instructions: str) -> list[dict[str, Any]]:
    """Return the prompt of a model that plays the user: instructions, then the conversation with the roles exchanged.

    Args:
        messages: The conversation in OpenAI's form, the model's turn last.
        instructions: Who the user is and what it wants.
    """
    out = [{"role": "system", "content": instructions}, {"role": "user", "content": OPENING}]
    for message in messages:
        if message.get("role") not in ("user", "assistant"):
            continue
        is_models = message["role"] == "assistant"
        text = without_thoughts(text_of(message)) if is_models else text_of(message)
        if is_models and not text:
            continue  # it thought, or called a tool
        role = "user" if is_models else "assistant"
        if out[-1]["role"] == role and len(out) > 2:  # the opening is an instruction, to which nothing is joined
            out[-1]["content"] += f"\n\n{text}"
        else:
            out.append({"role": role, "content": text})
    if out[-1]["role"] == "assistant":
        out.append({"role": "user", "content": SILENCE})
    return out


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message in OpenAI's form; what it shows besides text stands there as `[image]` and the like."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        kind = str(part.get("type", "text")) if isinstance(part, Mapping) else "text"
        parts.append(
            str(part.get("text", "")) if kind == "text" and isinstance(part, Mapping) else f"[{kind.split('_')[0]}]"
        )
    return "\n".join(parts)


@dataclass(slots=True)
class UserTurns:
    """The progress of a simulated user, counted from the messages where no view says it."""

    first: int | None = None
    """Number of a user's messages when it was first asked."""

    def turn_of(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of replies that the user has given."""
        num_users = sum(m.get("role") == "user" for m in messages)
        self.first = num_users if self.first is None else min(self.first, num_users)
        return num_users - self.first
