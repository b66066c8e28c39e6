"""swift.template: the names that plug-ins annotate with, and the template that a scheduler's engine has."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from polyturn.serving.protocol import Messages, Tool

__all__ = ["ContextType", "Messages", "Prompt", "Template", "TemplateMeta", "ThinkingTemplate", "Tool", "Word"]

Word = str | list[int]
Prompt = list[Word]


class ContextType(StrEnum):
    """The kind of a piece of a conversation; strategies of a loss scale are asked about responses."""

    RESPONSE = "response"
    SUFFIX = "suffix"
    OTHER = "other"


@dataclass
class TemplateMeta:
    """Facts about a template."""

    is_thinking: bool = False
    """Whether the chat template has reasoning."""


@dataclass
class Template:
    """The chat template of a run, for schedulers that ask for its tokenizer."""

    tokenizer: Any
    template_meta: TemplateMeta
    mode: str = "train"
    max_length: int | None = None

    @property
    def processor(self) -> Any:
        """The tokenizer, under the name that schedulers use for a processor."""
        return self.tokenizer

    def _get_response_prefix(self, inputs: Any = None) -> str:
        """Return the opening of a reply: none, because the chat template writes it as part of the prompt."""
        return ""

    def _swift_prepare_inputs(self, inputs: Any) -> None:
        """Take the reasoning out of the earlier replies of `inputs.messages`, in place."""
        last = len(inputs.messages) - 1
        for i, message in enumerate(inputs.messages):
            if message["role"] == "assistant" and i != last:
                message["content"] = without_reasoning(message["content"])


class ThinkingTemplate(Template):
    """The same of a model that writes reasoning: in release 3.8 the class says so, and not its meta."""


def without_reasoning(content: Any) -> Any:
    """Return a reply without its reasoning."""
    if not isinstance(content, str) or "</think>" not in content:
        return content
    return content.rpartition("</think>")[2].strip()
