"""Messages of a conversation, as typed values. Their text is derived from tokens, never the other way round.

    Message(role="user", content="What is 2+2?")
    Message(role="assistant", content="", tool_calls=(ToolCall(id="call_0", name="add", arguments={"a": 2, "b": 2}),))
    Message(role="tool", content="4", tool_call_id="call_0", name="add")

`to_openai` and `Message.from_openai` convert to and from the dicts of files, plug-ins and templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from polyturn.core.errors import DataError, one_line
from polyturn.core.media import Media, kind_of, media_of, normal_part


class Origin(Enum):
    """The author of a text. Only text of the owner may become control tokens (`tokens/trust.py`)."""

    OWNER = "owner"
    """The person who runs polyturn: dataset rows, schemas of the run's tools, messages with this origin."""
    MODEL = "model"
    """A model: completions, and summaries of them."""
    ENVIRONMENT = "environment"
    """All other authors: tools, users, environments, clients, schemas of foreign servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call that the model wrote. A call that could not be parsed is kept with its error, never dropped."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    raw: str = ""
    """The text that the model wrote for this call. If the call was read from a dict: its arguments as text if it is invalid,
    else empty."""
    error: str | None = None
    """Why the call could not be parsed, for the model to read; None if it was parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnText:
    """The model's own part of a message into which other text was inserted, such as a tool's answer or a hint."""

    text: str
    """The part without reasoning and calls."""
    written: str
    """The part exactly as the model wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str | tuple[Mapping[str, Any], ...] = ""
    """Text, or parts in OpenAI's form such as {"type": "text", "text": ...} and {"type": "image", "image": ...}. Media in
    any form become sources (`core/media.py`)."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    """On a tool message, the name of the tool that answered."""
    reasoning: str | None = None
    origin: Origin | None = field(default=None, compare=False)
    """The author. None counts as the environment, except in a task's prompt (`core.task.as_rows`). The comparison of
    messages ignores it."""
    written: str | None = field(default=None, compare=False)
    """The exact text of the model, with all tags and calls in order, but without the token that ends the turn and without
    the text of the generation prompt. If other text was inserted and the model continued after it, that text is included.
    None for a message that no model of this run wrote."""
    own: OwnText | None = field(default=None, compare=False)
    """The model's own part of `text` and `written`; None if all of it is the model's."""

    def __post_init__(self) -> None:
        # Convert media to sources, so that messages can be compared, pickled and written as JSON.
        if not isinstance(self.content, str) and any(kind_of(part) is not None for part in self.content):
            object.__setattr__(self, "content", tuple(normal_part(part) for part in self.content))

    @property
    def media(self) -> tuple[Media, ...]:
        """The images, videos and sounds of the message, in order."""
        return () if isinstance(self.content, str) else media_of(self.content)

    @property
    def text(self) -> str:
        """The text of the message: its content, or its text parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(p.get("text", "")) for p in self.content if p.get("type", "text") == "text")

    def to_openai(self) -> dict[str, Any]:
        """Return the message as an OpenAI-style dict, the form that templates and plug-ins read."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if not isinstance(self.content, str):
            out["content"] = [dict(p) for p in self.content]
        if self.reasoning is not None:
            out["reasoning_content"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
                for c in self.tool_calls
            ]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            out["name"] = self.name
        return out

    @classmethod
    def from_openai(cls, data: Mapping[str, Any] | Message, *, origin: Origin | None = None) -> Message:
        """Convert an OpenAI-style dict written by `origin` to a message; a `Message` is returned unchanged.

        Raises:
            DataError: there is no role, a tool call has no name, or the content or the tool calls have a wrong type.
        """
        if isinstance(data, Message):
            return data
        if "role" not in data:
            raise DataError(f"a message needs a 'role'; this one has the keys {sorted(data)}")
        content = data.get("content")
        if content is None:
            content = ""
        elif not isinstance(content, Iterable) or isinstance(content, Mapping | bytes):
            raise DataError(f"the content of a message is {content!r:.100}; give a text or a list of parts")
        elif not isinstance(content, str):
            content = tuple(dict(p) if isinstance(p, Mapping) else {"type": "text", "text": str(p)} for p in content)
        calls = data.get("tool_calls") or ()
        if not isinstance(calls, Iterable) or not all(isinstance(call, Mapping) for call in calls):
            raise DataError(f"the tool_calls of a message are {calls!r:.100}; give a list of objects")
        return cls(
            role=str(data["role"]),
            content=content,
            tool_calls=tuple(_call_from_openai(c, index) for index, c in enumerate(calls)),
            tool_call_id=data.get("tool_call_id"),
            name=data.get("name"),
            reasoning=data.get("reasoning_content") or data.get("reasoning"),
            origin=origin,
        )


def to_openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return `messages` as OpenAI-style dicts."""
    return [m.to_openai() for m in messages]


def count_chars(messages: Iterable[Message]) -> int:
    """Return the number of characters of the contents and reasoning of `messages`; media have none."""
    return sum(len(m.text) + len(m.reasoning or "") for m in messages)


def with_origin(messages: Iterable[Message], origin: Origin) -> tuple[Message, ...]:
    """Return `messages`, with `origin` set on those that have none."""
    return tuple(m if m.origin is not None else replace(m, origin=origin) for m in messages)


def _call_from_openai(data: Mapping[str, Any], index: int) -> ToolCall:
    function = data.get("function", data)
    if not isinstance(function, Mapping):
        raise DataError(f"the function of a tool call is {function!r:.100}; give an object with a name and arguments")
    if function is data and not data.get("name") and data.get("type", "function") != "function":
        function = {**data, "name": data["type"]}  # a flat form, whose type is the name of the tool
    if function.get("name") is None:
        raise DataError(f"a tool call needs a name; this one is {dict(data)!r}")
    written = function.get("arguments") or {}
    # A model may write a call with an empty name, and a scheduler that returns its history as dicts passes it here again.
    arguments, error = written, None if function["name"] else "a tool call needs a name"
    if isinstance(written, str):
        try:
            arguments = json.loads(written)
        except json.JSONDecodeError as problem:
            arguments, error = {}, f"arguments are not valid JSON ({problem.msg} at position {problem.pos})"
        except (ValueError, RecursionError) as problem:  # too many digits, or too many nested brackets
            arguments, error = {}, f"arguments cannot be read as JSON ({one_line(problem):.200})"
    if not isinstance(arguments, Mapping):
        arguments, error = {}, f"arguments must be a JSON object, not {type(arguments).__name__}"
    return ToolCall(
        id=str(data.get("id") or f"call_{index}"),
        name=str(function["name"]),
        arguments=arguments,
        raw=str(written) if error else "",
        error=error,
    )
