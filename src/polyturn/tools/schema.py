"""Tool schemas and tool responses, as the pydantic models that tool authors build and compare.

    OpenAIFunctionToolSchema(type="function", function={"name": "search", "parameters": {...}})

Authors compare schemas by the few fields declared below, but models must see the *whole* JSON schema (items, nested
properties, anyOf, default). So other keys are kept, `to_dict` renders them, and equality compares only the declared fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

MESSAGE_PARAMETERS = {
    "type": "object",
    "properties": {"message": {"type": "string", "description": "What to tell the agent, in plain words."}},
    "required": ["message"],
}
"""The parameters of a tool that takes a message."""
_SCHEMA_MARK = "\n\nInput, as JSON of this schema: "


class _Schema(BaseModel):
    """A part of a JSON schema. Undeclared keys are kept and rendered, but do not affect equality."""

    model_config = ConfigDict(extra="allow")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as plain JSON data, without declared fields that are unset or None."""
        named = {k: v for k, v in self.__dict__.items() if v is not None and (k in self.model_fields_set or self._always(k))}
        return {k: _plain(v) for k, v in {**named, **(self.model_extra or {})}.items()}

    def _always(self, field: str) -> bool:
        return False


class OpenAIFunctionPropertySchema(_Schema):
    """One parameter."""

    type: str | list[str] | None = None
    """None if the schema defines the type differently, such as with anyOf."""
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Schema):
    """All parameters of a function."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema | bool] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)

    def _always(self, field: str) -> bool:
        return field in ("type", "properties")


class OpenAIFunctionSchema(_Schema):
    """A function: its name, what it does, its parameters."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False

    def _always(self, field: str) -> bool:
        return field in ("description", "parameters")


class OpenAIFunctionToolSchema(_Schema):
    """A tool in OpenAI's format, as chat templates and servers expect it."""

    type: str = "function"
    function: OpenAIFunctionSchema

    def _always(self, field: str) -> bool:
        return field == "type"

    @classmethod
    def of(
        cls, name: str, description: str, properties: Mapping[str, Any], *, required: Sequence[str] | None = None
    ) -> OpenAIFunctionToolSchema:
        """Make the schema of a function with these properties; `required=None` requires all of them."""
        parameters = {
            "type": "object",
            "properties": properties,
            "required": list(properties if required is None else required),
        }
        function = {"name": name, "description": description, "parameters": parameters}
        return cls.model_validate({"type": "function", "function": function})

    @classmethod
    def from_mcp(cls, tool: Any, *, name: str | None = None) -> OpenAIFunctionToolSchema:
        """Convert an MCP tool (`mcp.types.Tool`); the parameters are exactly as the server declares them.

        Args:
            tool: A tool from `list_tools`.
            name: The name for the model, if it differs from the server's name.
        """
        function = {"name": name or tool.name, "description": tool.description or tool.title or ""}
        return cls.model_validate({"type": "function", "function": {**function, "parameters": tool.input_schema}})

    def to_mcp(self) -> Any:
        """Return the tool as an `mcp.types.Tool`."""
        from mcp.types import Tool

        function = self.function.to_dict()
        return Tool(name=function["name"], description=function["description"], input_schema=function["parameters"])

    @classmethod
    def from_a2a_skill(cls, skill: Any) -> OpenAIFunctionToolSchema:
        """Convert a skill of an A2A agent (`a2a.types.AgentSkill`).

        A skill describes its input only in words, so the schema has one parameter, a message. For a skill from
        `to_a2a_skill`, the original parameters are restored.
        """
        words, _, written = skill.description.partition(_SCHEMA_MARK)
        examples = "".join(f"\nExample: {example}" for example in skill.examples)
        name = re.sub(r"[^a-zA-Z0-9_-]+", "_", skill.id or skill.name).strip("_") or "ask_agent"
        description = f"{words or skill.name}{examples}"
        parameters = _read_object(written) or MESSAGE_PARAMETERS
        function = {"name": name, "description": description, "parameters": parameters}
        return cls.model_validate({"type": "function", "function": function})

    def to_a2a_skill(self, *, tags: Sequence[str] = ("tool",)) -> Any:
        """Convert the tool to an `a2a.types.AgentSkill`, with the JSON schema of its parameters in the description."""
        from a2a.types import AgentSkill

        function = self.function.to_dict()
        is_message = function["parameters"] == MESSAGE_PARAMETERS
        written = "" if is_message else _SCHEMA_MARK + json.dumps(function["parameters"], ensure_ascii=False)
        return AgentSkill(
            id=function["name"],
            name=function["name"],
            description=function["description"] + written,
            tags=list(tags),
            input_modes=["text/plain" if is_message else "application/json"],
        )


class ToolResponse(BaseModel):
    """The answer of a tool: text, and images or videos."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _must_be_list(cls, value: Any, info: Any) -> Any:
        if value is not None and not isinstance(value, list):
            name = str(info.field_name)
            raise ValueError(f"{name.capitalize()} must be a list, but got {type(value)}; wrap a single one: [{name}]")
        return value

    def is_empty(self) -> bool:
        """Return whether the response has no text and no media."""
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        """Return whether the response has only text."""
        return bool(self.text) and not self.image and not self.video


def _read_object(text: str) -> dict[str, Any] | None:
    """Parse a text as a JSON object; return None for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _plain(value: Any) -> Any:
    if isinstance(value, _Schema):
        return value.to_dict()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
