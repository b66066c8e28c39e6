"""Leaving reasoning out of a history, for schedulers that do not show the model how it had thought."""

from __future__ import annotations

import dataclasses
import re

from polyturn.core.messages import Message

_THOUGHT = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)


def without_reasoning(message: Message) -> Message:
    """Return an assistant message without its reasoning, whether a parser had read it or it stands in the text.

    A message whose `<think>` was opened by the generation prompt begins inside it: all up to `</think>` goes.
    """
    if message.role != "assistant" or not isinstance(message.content, str):
        return message
    content = _THOUGHT.sub("", message.content)
    if "</think>" in content:
        content = content.rpartition("</think>")[2].lstrip()
    if content == message.content and message.reasoning is None:
        return message
    return dataclasses.replace(message, content=content, reasoning=None)
