"""OpenTurn: a turn in progress; Reply: the answer to a turn.

Tools, interaction and scheduler add results and scores to an `OpenTurn`. When the episode ends, it becomes a frozen
`core.trajectory.Turn`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polyturn.core.code_origin import defined_at
from polyturn.core.errors import SchedulerError
from polyturn.core.generation import Completion, FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.trajectory import SpanRef, ToolResult

PROMPTED_REASONING = "_prompted_reasoning"
"""The key in a turn's info for the reasoning in the generation prompt before its completion; missing if there is none."""


@dataclass(slots=True, kw_only=True)
class OpenTurn:
    """A turn in progress."""

    index: int
    message: Message
    completion: Completion
    cut_by: StopReason
    """The tightest limit on the tokens of this completion; the episode's stop reason if the completion was cut."""
    text: str = ""
    """The sampled text, including reasoning and calls, without the token that ends a turn."""
    said_before: str = ""
    """The earlier text of the same message, if the turn continues a message; `message` contains both."""
    own_before: str = ""
    """The model's part of `said_before`."""
    stopped_by: str | None = None
    """The stop string that ended the turn, else None. `text` ends with it, or goes on to the end of the last token."""
    num_tokens: int = 0
    """Number of sampled tokens that are kept."""
    is_continued: bool = False
    """Whether the next turn continues the same message."""
    spans: list[SpanRef] = field(default_factory=list)
    tool_results: tuple[ToolResult, ...] = ()
    observation: tuple[Message, ...] = ()
    scores: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the completion stopped."""
        return self.completion.finish_reason

    def unanswered(self, *, sampled: Sequence[SpanRef]) -> OpenTurn:
        """Return the turn with only the spans `sampled` and without its answers, for a fork that answers it again."""
        timings = {name: value for name, value in self.timings.items() if name in ("start", "generate")}
        info = {name: value for name, value in self.info.items() if name == PROMPTED_REASONING}
        blank: dict[str, Any] = {"tool_results": (), "observation": (), "scores": {}, "info": info}
        return replace(self, spans=list(sampled), timings=timings, **blank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The environment's answer to a turn."""

    messages: tuple[Message, ...] = ()
    is_done: bool = False
    """Whether the episode is over. Its last messages are then recorded but never encoded."""
    goes_on: bool = False
    """Whether the model generates again without a new message, because the history was edited or its message continues."""
    info: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    """Named scores of the turn, added to `turn.scores`."""

    @classmethod
    def of(cls, value: Any, *, source: Callable[..., Any] | None = None) -> Reply:
        """Convert the result of a `step` to a reply; `source` is the method, for an error.

        Raises:
            SchedulerError: the result has an unsupported type.
        """
        if isinstance(value, Reply):
            if all(isinstance(m, Message) for m in value.messages):
                return value
            return replace(value, messages=cls.of(list(value.messages), source=source).messages)
        if value is None:
            return cls()
        if isinstance(value, str):
            return cls(messages=(Message(role="user", content=value),))
        if isinstance(value, Message | Mapping):
            return cls(messages=(Message.from_openai(value),))
        if isinstance(value, Sequence) and all(isinstance(m, Message | Mapping) for m in value):
            return cls(messages=tuple(Message.from_openai(m) for m in value))
        name = f"{type(source.__self__).__name__}.step" if inspect.ismethod(source) else "step"
        raise SchedulerError(
            f"{name} returned {value!r:.200}; return None, a text, a message, a list of messages, or a Reply"
            f"{defined_at(source)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenReward:
    """A reward that the scheduler itself gives to its episode."""

    score: float
    info: Mapping[str, Any] = field(default_factory=dict)
