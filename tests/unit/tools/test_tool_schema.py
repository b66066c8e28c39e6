"""Tool schemas: the whole JSON schema is rendered, its named fields are compared, and arguments are checked against it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from polyturn.tools.schema import (
    OpenAIFunctionPropertySchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from polyturn.tools.validate import ArgumentSchema

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


def test_schema_is_rendered_with_every_keyword() -> None:
    assert OpenAIFunctionToolSchema.model_validate(RAW).to_dict() == RAW
    assert OpenAIFunctionToolSchema(**RAW).to_dict() == RAW
    shown = OpenAIFunctionToolSchema(type="function", function={"name": "now", "description": "d"}).to_dict()
    assert shown["function"]["parameters"] == {"type": "object", "properties": {}}
    assert OpenAIFunctionPropertySchema(type="string", description=None, enum=None).to_dict() == {"type": "string"}


def test_unnamed_keys_take_no_part_in_equality() -> None:
    """Users compare schemas whose unnamed keys differ."""
    assert OpenAIFunctionPropertySchema(type="array", item=1) == OpenAIFunctionPropertySchema(type="array", items={})
    assert OpenAIFunctionPropertySchema(type="array") != OpenAIFunctionPropertySchema(type="string")
    other = {**RAW, "function": {**RAW["function"], "parameters": {"type": "object", "properties": {}, "required": []}}}
    assert OpenAIFunctionToolSchema(**RAW) != OpenAIFunctionToolSchema(**other)


def test_response_knows_what_it_holds() -> None:
    assert ToolResponse().is_empty()
    assert ToolResponse(text="").is_empty()
    assert ToolResponse(text="x").is_text_only()
    assert not ToolResponse(text="x", image=[1]).is_text_only()
    assert not ToolResponse(video=[1]).is_empty()
    for field in ("image", "video"):
        with pytest.raises(ValidationError, match=f"{field.capitalize()} must be a list"):
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
def test_fitting_arguments_have_no_problem(more: dict[str, Any]) -> None:
    assert ArgumentSchema(PARAMETERS).problem({"text": "t", **more}) is None


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
def test_unfitting_argument_is_named_to_the_model(arguments: dict[str, Any], message: str) -> None:
    assert ArgumentSchema(PARAMETERS).problem(arguments) == message


def test_additional_properties_are_checked() -> None:
    assert ArgumentSchema({"properties": {}, "additionalProperties": True}).problem({"x": 1}) is None
    strings = ArgumentSchema({"additionalProperties": {"type": "string"}})
    assert strings.problem({"x": 1}) == "'x' must be a string, not 1"
    named = ArgumentSchema({"additionalProperties": False, "properties": {}}, also=["x"])
    assert named.problem({"x": 1}) is None
    assert named.problem({"y": 1}) == "there is no argument 'y'. It takes none."


WHOLE = {
    "type": "object",
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    "properties": {
        "at": {"$ref": "#/$defs/point"},
        "count": {"type": "integer", "minimum": 1, "multipleOf": 2},
        "shape": {"oneOf": [{"type": "string"}, {"$ref": "#/$defs/point"}]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "some": {"type": "array", "maxItems": 2, "uniqueItems": True},
        "tagged": {
            "type": "object",
            "properties": {"a": {}},
            "patternProperties": {"^x-": {"type": "string"}},
            "additionalProperties": False,
        },
        "fixed": {"const": 7},
        "odd": {"type": "float"},
    },
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"at": {"x": 1}, "count": 4, "shape": "dot", "code": "AB", "some": [1, 2], "fixed": 7, "odd": "?"}, None),
        ({"shape": {"x": 3}, "tagged": {"a": 0, "x-1": "t"}}, None),
        ({"at": {"x": "1"}}, "'at.x' must be an integer, not \"1\""),
        ({"at": {}}, "the argument 'at.x' is missing"),
        ({"count": 0}, "'count': 0 is less than the minimum of 1"),
        ({"count": 3}, "'count': 3 is not a multiple of 2"),
        ({"count": 10**400 + 1}, "..."),
        ({"count": 4.0}, "'count' must be an integer, not 4.0"),
        ({"shape": {"x": "far"}}, "'shape.x' must be an integer, not \"far\""),
        ({"code": "abc"}, "'code': 'abc' does not match '^[A-Z]{2}$'"),
        ({"some": [1, 2, 3]}, "'some': [1, 2, 3] is too long"),
        (
            {"some": [{"a": 1, "b": 2}, {"b": 2, "a": 1}]},
            "'some': [{'a': 1, 'b': 2}, {'b': 2, 'a': 1}] has non-unique elements",
        ),
        ({"tagged": {"x-1": 1}}, "'tagged.x-1' must be a string, not 1"),
        ({"tagged": {"y": 1}}, "'tagged': 'y' does not match any of the regexes: '^x-'"),
        ({"fixed": 8}, "'fixed': 7 was expected"),
    ],
)
def test_whole_of_json_schema_is_checked(arguments: dict[str, Any], message: str | None) -> None:
    found = ArgumentSchema(WHOLE).problem(arguments)
    assert found == message or (message == "..." and "is not a multiple of 2" in str(found) and len(str(found)) < 300)


def test_arguments_may_stand_behind_a_reference() -> None:
    schema = ArgumentSchema({"$ref": "#/$defs/args", "$defs": {"args": WHOLE["$defs"]["point"]}})
    assert schema.problem({"x": 1}) is None
    assert schema.problem({"x": None}) == "'x' must be an integer, not null"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"properties": {"x": {"$ref": "https://127.0.0.1:1/schema.json"}}}, 1),
        ({"properties": {"x": {"$ref": "#/$defs/none"}}}, 1),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "properties": {"x": {"$ref": "#/$defs/a"}}}, 1),
        ({"properties": {"x": {"minimum": "three"}}}, 1),
        ({"properties": {"x": {"pattern": "(a"}}}, "text"),
        ({"properties": {"x": 7}}, 1),
    ],
    ids=["remote", "nowhere", "endless", "no number", "no pattern", "no schema"],
)
def test_call_passes_unchecked_if_its_schema_is_broken(
    schema: dict[str, Any], value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    check = ArgumentSchema(schema, tool="theirs")
    assert check.problem({"x": value}) is None
    assert check.problem({"x": value}) is None
    assert ["'theirs'" in message for message in caplog.messages] == [True], "warned of once"
