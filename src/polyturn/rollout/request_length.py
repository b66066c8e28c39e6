"""How long the messages of a request may be, found out before anything is rendered or encoded on the event loop.

    check_length(messages, codec=…, limits=…)     returns soon for what is short, else once a thread has counted

Separate because a request comes from outside: a text of a few megabytes takes the tokenizer seconds, and everything that the
event loop serves would wait. Behind this check a request is at most as long as the context.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from polyturn.core.errors import DataError
from polyturn.core.messages import Message
from polyturn.rollout.limits import ContextPolicy, Limits
from polyturn.tokens.codec import Codec

LONG_CHARS = 1 << 16
"""Texts of together so many characters are counted in a thread; shorter ones need no count."""


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
    texts = [*map(_text_of, messages), *([json.dumps(tools)] if tools else [])]
    num_chars, limit = sum(map(len, texts)), limits.max_context
    if num_chars <= LONG_CHARS or limit is None:
        return
    if num_chars > limit * codec.longest_token:
        raise TooLongError(f"the messages have {num_chars} characters, more than a context of {limit} tokens holds")
    counts = await asyncio.to_thread(codec.count, texts)
    if limits.context_policy is ContextPolicy.STOP and sum(counts) > limit:
        raise TooLongError(f"the messages have at least {sum(counts)} tokens, and the context holds {limit}")
    if max(counts) > limit:
        raise TooLongError(f"a message has at least {max(counts)} tokens, and the context holds {limit}")


def _text_of(message: Message) -> str:
    calls = (call.raw or json.dumps(dict(call.arguments)) for call in message.tool_calls)
    return "".join((message.text, message.reasoning or "", *calls))
