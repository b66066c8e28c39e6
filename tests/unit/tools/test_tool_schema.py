"""Tool schemas: the whole JSON schema is rendered, the named fields are compared, arguments are checked against it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from polyturn.tools.schema import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from polyturn.tools.validate import arguments_problem

RAW = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {
            "type": "object",
            "properties": {
                "queries": {"type": "array", "description": "q", "items": {"type": "string"}, "minItems": 1},
                "filter": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                "nested": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            },
            "required": ["queries"],
            "$defs": {"x": {}},
        },
        "strict": False,
    },
}


def test_every_keyword_of_the_raw_schema_is_rendered() -> None:
    assert OpenAIFunctionToolSchema.model_validate(RAW).to_dict() == RAW
    assert OpenAIFunctionToolSchema(**RAW).to_dict() == RAW


def test_keys_without_a_field_take_no_part_in_equality() -> None:
    """Users compare schemas whose unnamed keys differ."""
    assert OpenAIFunctionPropertySchema(type="array", item=1) == OpenAIFunctionPropertySchema(type="array", items={})
    assert OpenAIFunctionPropertySchema(type="array") != OpenAIFunctionPropertySchema(type="string")
    other = {**RAW, "function": {**RAW["function"], "parameters": {"type": "object", "properties": {}, "required": []}}}
    assert OpenAIFunctionToolSchema(**RAW) != OpenAIFunctionToolSchema(**other)


def test_a_schema_without_parameters_renders_empty_ones() -> None:
    shown = OpenAIFunctionToolSchema(type="function", function={"name": "now", "description": "d"}).to_dict()
    assert shown["function"]["parameters"] == {"type": "object", "properties": {}}


def test_a_named_field_that_is_none_is_not_rendered() -> None:
    assert OpenAIFunctionPropertySchema(type="string", description=None, enum=None).to_dict() == {"type": "string"}


@pytest.mark.parametrize(
    ("text", "arguments", "is_bad"), [('{"a": 1}', {"a": 1}, False), ("{a", {}, True), ("[1]", {}, True)]
)
def test_a_parsed_call_is_read(text: str, arguments: dict, is_bad: bool) -> None:
    parsed = OpenAIFunctionParsedSchema(name="f", arguments=text)
    call, bad = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
    assert (call.name, call.arguments, bad) == ("f", arguments, is_bad)


def test_a_response_knows_what_is_in_it() -> None:
    assert ToolResponse().is_empty()
    assert ToolResponse(text="").is_empty()
    assert ToolResponse(text="x").is_text_only()
    assert not ToolResponse(text="x", image=[1]).is_text_only()
    assert not ToolResponse(video=[1]).is_empty()


@pytest.mark.parametrize("field", ["image", "video"])
def test_media_must_be_a_list(field: str) -> None:
    with pytest.raises(ValidationError, match=f"{field.capitalize()} must be a list, but got"):
        ToolResponse(**{field: "x.png"})


PARAMETERS = {
    "type": "object",
    "required": ["text"],
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "mode": {"type": "string", "enum": ["fast", "slow"]},
        "maybe": {"type": "string", "nullable": True},
        "either": {"type": ["integer", "string"]},
        "items": {"type": "array", "items": {"type": "integer"}},
        "nested": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        "any_of": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "anything": {},
    },
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"count": 3, "ratio": 1, "flag": True, "mode": "fast", "maybe": None},
        {"either": "x", "items": [1, 2], "nested": {"a": 1, "b": 2}, "any_of": None, "anything": [None]},
    ],
)
def test_arguments_that_fit(more: dict[str, Any]) -> None:
    assert arguments_problem({"text": "t", **more}, PARAMETERS) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "the argument 'text' is missing"),
        ({"text": "t", "cuont": 1}, "there is no argument 'cuont'. Did you mean 'count'?"),
        ({"text": 3}, "'text' must be a string, not 3"),
        ({"text": None}, "'text' must be a string, not null"),
        ({"text": "t", "count": "3"}, "'count' must be an integer, not \"3\""),
        ({"text": "t", "count": 3.5}, "'count' must be an integer, not 3.5"),
        ({"text": "t", "count": True}, "'count' must be an integer, not true"),
        ({"text": "t", "mode": "medium"}, '\'mode\' must be one of "fast", "slow", not "medium"'),
        ({"text": "t", "either": 1.5}, "'either' must be an integer or string, not 1.5"),
        ({"text": "t", "items": [1, "x"]}, "'items[1]' must be an integer, not \"x\""),
        ({"text": "t", "nested": {}}, "the argument 'nested.a' is missing"),
        ({"text": "t", "nested": {"a": "x"}}, "'nested.a' must be an integer, not \"x\""),
        ({"text": "t", "any_of": "x"}, "'any_of' must be an integer, not \"x\""),
    ],
)
def test_arguments_that_do_not_fit_are_told_in_one_sentence(arguments: dict[str, Any], message: str) -> None:
    assert arguments_problem(arguments, PARAMETERS) == message


def test_a_schema_that_allows_further_arguments_gets_them() -> None:
    assert arguments_problem({"x": 1}, {"properties": {}, "additionalProperties": True}) is None
    assert arguments_problem({"x": 1}, {"additionalProperties": {"type": "string"}}) == "'x' must be a string, not 1"
