"""The length of a request's messages, bounded before anything is rendered or encoded on the event loop.

    check_length(messages, codec=…, limits=…)     returns soon for what is short, else once a thread has counted

Separate because a request comes from outside, as an environment's words do: a text of a few megabytes takes the tokenizer
seconds, and everything that the event loop serves would wait. Behind this check it is at most as long as the context.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from polyturn.core.errors import DataError
from polyturn.core.media import kind_of
from polyturn.core.messages import Message, Origin
from polyturn.rollout.limits import ContextPolicy, Limits
from polyturn.tokens.codec import Codec
from polyturn.tokens.frames import map_all_strings

LONG_CHARS = 1 << 16
"""Texts of together so many characters are counted in a thread; shorter ones need no count."""

LONG_WORD = 256
"""Characters of a role, a name or an id up to which it is not counted: few templates show all of them."""


class TooLongError(DataError):
    """A request that no context has room for."""


async def check_length(
    messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), codec: Codec, limits: Limits
) -> None:
    """Refuse messages that the context has no room for.

    Args:
        messages: The history.
        tools: The schemas that are shown with it.
        codec: Counts the tokens.
        limits: Say how long the context is. Where their policy shortens a history, only each message by itself must fit.

    Raises:
        TooLongError: there are too many tokens.
    """
    limit = limits.max_context
    if limit is not None and len(messages) > limit:
        raise TooLongError(f"there are {len(messages)} messages, more than a context of {limit} tokens holds")
    await check_text(messages, tools=tools, codec=codec, limits=limits)


async def check_text(
    messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), codec: Codec, limits: Limits
) -> None:
    """Refuse what `check_length` refuses, but for the number of messages: an environment's words may be megabytes, too."""
    limit = limits.max_context
    if limit is None:
        return
    # Only the owner's text is encoded with control tokens; in any other text, each takes several tokens.
    trusted = [_text_of(m) for m in messages if m.origin is Origin.OWNER] + ([json.dumps(tools)] if tools else [])
    foreign = [_text_of(m) for m in messages if m.origin is not Origin.OWNER]
    num_chars = sum(map(len, trusted + foreign))
    if num_chars <= LONG_CHARS:
        return
    if num_chars > limit * codec.longest_token:  # true whatever its tokens are, so megabytes are not counted
        raise TooLongError(f"the messages have {num_chars} characters, more than a context of {limit} tokens holds")
    counts = await asyncio.to_thread(lambda: codec.count(trusted) + codec.count(foreign, is_plain=True))
    if limits.context_policy is ContextPolicy.STOP and sum(counts) > limit:
        raise TooLongError(f"the messages have at least {sum(counts)} tokens, and the context holds {limit}")
    if max(counts) > limit:
        raise TooLongError(f"a message has at least {max(counts)} tokens, and the context holds {limit}")


def _text_of(message: Message) -> str:
    """Return all text of a message that a template may show: its content, and each of its names that is not a plain name."""
    calls = message.tool_calls
    words = [message.role, message.name or "", message.tool_call_id or "", *(w for c in calls for w in (c.id, c.name))]
    arguments = (call.raw or json.dumps(dict(call.arguments)) for call in calls)
    content = message.content if isinstance(message.content, str) else "".join(map(_text_of_part, message.content))
    return "".join((content, message.reasoning or "", *arguments, *(word for word in words if len(word) > LONG_WORD)))


def _text_of_part(part: Mapping[str, Any]) -> str:
    """Return the texts of a part of a content; a medium's source is none."""
    kind, texts = kind_of(part), list[str]()

    def note(text: str) -> str:
        texts.append(text)
        return text

    for key, value in part.items():
        if key not in ("type", kind):
            map_all_strings(value, note)
    return "".join(texts)
