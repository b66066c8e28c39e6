"""Removing reasoning from messages, for schedulers that do not show the model its earlier reasoning."""

from __future__ import annotations

import dataclasses
import re

from polyturn.core.messages import Message

_THOUGHT = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)


def without_reasoning(message: Message) -> Message:
    """Remove the reasoning of an assistant message, both the parsed field and reasoning in the text.

    If the generation prompt opened `<think>`, the text starts inside it, so everything up to `</think>` is removed.
    """
    if message.role != "assistant" or not isinstance(message.content, str):
        return message
    content = _THOUGHT.sub("", message.content)
    if "</think>" in content:
        content = content.rpartition("</think>")[2].lstrip()
    if content == message.content and message.reasoning is None:
        return message
    return dataclasses.replace(message, content=content, reasoning=None)
