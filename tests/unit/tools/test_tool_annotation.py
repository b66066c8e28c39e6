"""Annotations beyond JSON's own types: the schema that the model reads, the value that the function gets, the errors."""

from __future__ import annotations

import dataclasses
import datetime
import pickle
from enum import Enum
from typing import Annotated, Any, Literal, NotRequired, Optional

import pytest
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

import polyturn
from polyturn.core.errors import ConfigError
from polyturn.tools.annotation import json_type
from polyturn.tools.episode_tools import EpisodeTools
from polyturn.tools.options import ToolOptions
from polyturn.tools.toolbox import Toolbox
from support.refusals import refuses
from support.tools_parts import call, task_with


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    """A point of the plan."""

    x: int = Field(ge=0, description="Metres from the left.")
    title: Optional[str] = None  # noqa: UP045  a property may have the name of a keyword


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    x: int


@dataclasses.dataclass
class Wall:
    ends: list[Point]
    colour: Colour = Colour.RED


class Visit(TypedDict):
    day: datetime.date
    wall: NotRequired[Wall]


class Tree(BaseModel):
    branches: list[Tree]


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


POINT = {
    "type": "object",
    "description": "A point of the plan.",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "description": "Metres from the left."},
        "title": {"type": "string", "nullable": True, "default": None},
    },
    "required": ["x"],
    "additionalProperties": False,
}
COLOUR = {"type": "string", "enum": ["red", "blue"]}
WALL = {
    "type": "object",
    "properties": {"ends": {"type": "array", "items": POINT}, "colour": {**COLOUR, "default": "red"}},
    "required": ["ends"],
    "additionalProperties": False,
}


def of_kind(kind: str) -> dict[str, Any]:
    properties = {"kind": {"type": "string", "enum": [kind]}}
    return {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (Colour, COLOUR),
        (Colour | None, {**COLOUR, "nullable": True}),
        (list[Point], {"type": "array", "items": POINT}),
        (Point | None, {**POINT, "nullable": True}),
        (Open, {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}),
        (Wall, WALL),
        (
            Visit,
            {
                "type": "object",
                "properties": {"day": {"type": "string", "format": "date"}, "wall": WALL},
                "required": ["day"],
                "additionalProperties": False,
            },
        ),
        (
            Annotated[int, Field(ge=1, le=9, description="n")],
            {"type": "integer", "minimum": 1, "maximum": 9, "description": "n"},
        ),
        (Annotated[Cat | Dog, Field(discriminator="kind")], {"oneOf": [of_kind("cat"), of_kind("dog")]}),
        (int | Colour, {"anyOf": [{"type": "integer"}, COLOUR]}),
        (list[dict], {"type": "array", "items": {"type": "object"}}),
        (set[str], {"type": "array", "uniqueItems": True, "items": {"type": "string"}}),
    ],
)
def test_schema_of_a_type_has_no_references(hint: Any, schema: dict[str, Any]) -> None:
    shown = json_type(hint, where="x")[1]
    assert shown == schema
    assert next(iter(shown)) in ("type", "anyOf", "oneOf")


def test_type_that_refers_to_itself_is_refused() -> None:
    refuses(lambda: json_type(Tree, where="tool 'f': the parameter 'x'"), ConfigError, "'x'", "Tree")


VALUE: Any = {"a": int}
"""No type, although it looks like one."""


class Unreadable(TypedDict):
    value: VALUE


@pytest.mark.parametrize(
    "hint",
    [
        Annotated[str, Field(pattern="(?=x)")],
        type,
        Colour.RED,
        VALUE,
        dict[str, VALUE],
        dict[str, Literal[int]],  # type: ignore[valid-type]
        list[Unreadable],
    ],
)
def test_annotation_without_a_schema_is_refused(hint: Any) -> None:
    refuses(lambda: json_type(hint, where="here"), ConfigError, "here", "no JSON form")


@polyturn.tool
def paint(
    colour: Colour,
    ends: list[Point],
    day: datetime.date,
    coats: Annotated[int, Field(ge=1, description="How many coats.")] = 1,
    scale: float = 1.0,
    box: tuple[int, int] = (0, 0),
) -> str:
    """Paint a wall.

    Args:
        colour: Of the wall.
        ends: Where it begins and ends.
        day: When.
        scale: Of the plan.
        box: Its size.
    """
    return f"{colour!r} {ends!r} {day!r} {coats!r} {scale!r} {box!r}"


GOOD = {"colour": "red", "ends": [{"x": 1}], "day": "2026-02-03"}


async def result_of(tool: Any, **arguments: Any) -> Any:
    async with EpisodeTools(Toolbox([tool], ToolOptions(timeout_s=60.0)), "e") as session:
        await session.start(task_with())
        (result,) = await session.call([call(tool.name, **arguments)])
    return result


async def test_function_gets_values_of_its_annotations() -> None:
    result = await result_of(paint, **GOOD, coats=2, scale=2, box=[3, 4])
    assert result.content == f"{Colour.RED!r} {[Point(x=1)]!r} {datetime.date(2026, 2, 3)!r} 2 2 (3, 4)"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"colour": "green"}, ("'colour'", '"red"', '"green"')),
        ({"coats": 0}, ("'coats'", "0", "minimum of 1")),
        ({"coats": "2"}, ("'coats'", "integer", '"2"')),
        ({"day": "tomorrow"}, ("'day'", "date", '"tomorrow"', "'paint'")),
        ({"ends": [{"x": 1}, {"x": -1}]}, ("'ends[1].x'", "-1", "minimum of 0")),
        ({"ends": [{"x": 1, "titel": "a"}]}, ("'ends[0].titel'",)),
        ({"ends": [{}]}, ("'ends[0].x'", "missing")),
        ({"box": [1, 2, 3]}, ("'box'", "[1, 2, 3]")),
    ],
)
async def test_model_reads_which_argument_is_wrong(wrong: dict[str, Any], words: tuple[str, ...]) -> None:
    result = await result_of(paint, **{**GOOD, **wrong})
    assert result.error == "schema"
    for word in words:
        assert word in result.content


def test_description_comes_from_docstring_else_field() -> None:
    properties = paint.schema["function"]["parameters"]["properties"]
    assert properties["coats"] == {"type": "integer", "minimum": 1, "description": "How many coats."}
    assert properties["ends"]["description"] == "Where it begins and ends."


async def test_tool_in_another_process_converts_arguments_too() -> None:
    arrived = pickle.loads(pickle.dumps(polyturn.tool(name="brush")(_module_level)))
    assert (await result_of(arrived, colour="blue")).content == repr(Colour.BLUE)


async def test_tool_with_a_given_schema_gets_plain_json() -> None:
    raw = polyturn.tool(schema=polyturn.tool(_module_level).schema)(_module_level)
    assert (await result_of(raw, colour="blue")).content == "'blue'"


def _module_level(colour: Colour) -> str:
    """Say the colour.

    Args:
        colour: Which.
    """
    return repr(colour)
