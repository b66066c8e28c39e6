"""What a full context does to the history: the policies `compact` and `drop_oldest`, as pure functions on messages.

    prompt a0 o0 a1 o1 a2 o2   --drop_oldest-->   prompt a1 o1 a2 o2
    prompt a0 o0 a1 o1 a2 o2   --compact------>   prompt a0 [left out] a1 [left out] a2 o2

The newest observation always stays, because the model has not seen it yet. When nothing that a policy may do makes the
history fit, the episode ends with CONTEXT_FULL: a truncation, never a crash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from polyturn.core.messages import Message
from polyturn.rollout.limits import ContextPolicy

LEFT_OUT = "[left out to save space]"


def shorten(
    messages: Sequence[Message],
    *,
    policy: ContextPolicy,
    num_prompt: int,
    fits: Callable[[Sequence[Message]], bool],
) -> list[Message] | None:
    """Return a shorter history that fits, or None when the policy has none.

    Args:
        messages: The prompt, then turns and what they drew, the newest observation last.
        policy: What may be left out.
        num_prompt: How many leading messages are the task's prompt, which always stays.
        fits: Whether a history leaves room for at least one sampled token.
    """
    prompt, rest = list(messages[:num_prompt]), list(messages[num_prompt:])
    starts = [i for i, m in enumerate(rest) if m.role == "assistant"]
    if policy is ContextPolicy.STOP or not starts:
        return None
    for newest in range(1, len(starts)):
        if policy is ContextPolicy.DROP_OLDEST:
            candidate = prompt + rest[starts[newest] :]
        else:
            older = [m if m.role == "assistant" else _left_out(m) for m in rest[: starts[newest]]]
            candidate = prompt + older + rest[starts[newest] :]
        if fits(candidate):
            return candidate
    return None


def _left_out(message: Message) -> Message:
    is_short = len(message.text) <= len(LEFT_OUT) and not message.media
    return message if is_short else dataclasses.replace(message, content=LEFT_OUT)
