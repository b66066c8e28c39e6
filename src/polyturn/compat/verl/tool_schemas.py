"""verl.tools.schemas, beside the native schemas: calls in the form that verl's parsers return."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as a model wrote it: the arguments are still text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call with its arguments read."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Return the call, and whether its arguments were not a JSON object (they are then empty)."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except json.JSONDecodeError:
            arguments = None
        is_bad = not isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={} if is_bad else arguments), is_bad


class OpenAIFunctionToolCall(BaseModel):
    """A call with its id, as it stands in an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema
