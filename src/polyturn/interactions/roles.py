"""Flips the roles of a conversation, for a model that plays the user.

    system     rules of the model              hidden
    user       How do I …?                     assistant  How do I …?
    assistant  <think>…</think> call search    hidden: reasoning, calls, tool results
    tool       …
    assistant  You can …                       user       You can …

Chat templates need a user's message first and alternating roles, so an opening message is added, and consecutive messages of
one role are joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyturn.partners.partner import without_thoughts

OPENING = "Begin the conversation: write your first message."
SILENCE = "(no answer)"
"""Shown in place of a message without text for the user."""


def flipped(messages: Sequence[Mapping[str, Any]], *, instructions: str) -> list[dict[str, Any]]:
    """Return the prompt of a model that plays the user: instructions, then the conversation with roles exchanged.

    Args:
        messages: The conversation in OpenAI's form; the last message is the model's turn.
        instructions: The system prompt, with the user's persona and goal.
    """
    out = [{"role": "system", "content": instructions}, {"role": "user", "content": OPENING}]
    for message in messages:
        if message.get("role") not in ("user", "assistant"):
            continue
        is_models = message["role"] == "assistant"
        text = without_thoughts(text_of(message)) if is_models else text_of(message)
        if is_models and not text:
            continue  # the message has only reasoning or tool calls
        role = "user" if is_models else "assistant"
        if out[-1]["role"] == role and len(out) > 2:  # nothing is joined to the opening, which is an instruction
            out[-1]["content"] += f"\n\n{text}"
        else:
            out.append({"role": role, "content": text})
    if out[-1]["role"] == "assistant":
        out.append({"role": "user", "content": SILENCE})
    return out


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message in OpenAI's form, with other parts as `[image]` and the like."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, Mapping) else {"text": part} for part in content]
    kinds = [str(part.get("type", "text")).partition("_")[0] for part in parts]
    return "\n".join(str(p.get("text", "")) if kind == "text" else f"[{kind}]" for kind, p in zip(kinds, parts, strict=True))


@dataclass(slots=True)
class UserTurns:
    """Counts a simulated user's replies from the messages; for calls without a `ConversationView`."""

    first: int | None = None
    """Number of user messages at the user's first reply."""

    def turn_of(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of replies that the user has made."""
        num_users = sum(m.get("role") == "user" for m in messages)
        self.first = num_users if self.first is None else min(self.first, num_users)
        return num_users - self.first
