"""swift.template: annotation types for plug-ins, and a scheduler's `infer_engine.template`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from polyturn.serving.rollout_protocol import Messages, Tool

__all__ = ["ContextType", "Messages", "Prompt", "Template", "TemplateMeta", "ThinkingTemplate", "Tool", "Word"]

Word = str | list[int]
Prompt = list[Word]


class ContextType(StrEnum):
    """The kind of a piece of a conversation; loss-scale strategies only get responses."""

    RESPONSE = "response"
    SUFFIX = "suffix"
    OTHER = "other"


@dataclass
class TemplateMeta:
    """Facts about a template."""

    is_thinking: bool = False
    """Whether the chat template supports reasoning."""


@dataclass
class Template:
    """The chat template of a run, for schedulers that use its tokenizer."""

    tokenizer: Any
    template_meta: TemplateMeta
    mode: str = "train"
    max_length: int | None = None

    @property
    def processor(self) -> Any:
        """The tokenizer; schedulers of vision models use this name."""
        return self.tokenizer

    def _get_response_prefix(self, inputs: Any = None) -> str:
        """Return the prefix of a reply: empty, because the chat template adds it to the prompt."""
        return ""

    def _swift_prepare_inputs(self, inputs: Any) -> None:
        """Remove the reasoning from earlier replies of `inputs.messages`, in place."""
        last = len(inputs.messages) - 1
        for i, message in enumerate(inputs.messages):
            if message["role"] == "assistant" and i != last:
                message["content"] = without_reasoning(message["content"])


class ThinkingTemplate(Template):
    """The template of a model with reasoning: release 3.8 marks this by the class and not by `TemplateMeta`."""


def without_reasoning(content: Any) -> Any:
    """Return a reply without its reasoning."""
    if not isinstance(content, str) or "</think>" not in content:
        return content
    return content.rpartition("</think>")[2].strip()
