"""`@polyturn.tool`: the schema read off a function, and how the function is called."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional

import pytest

import polyturn
from polyturn.core.errors import ConfigError, DataError, LifecycleError, RewardError
from polyturn.tools import FromTask
from polyturn.tools.function import FunctionTool, infer_schema
from polyturn.tools.result_shape import normalize
from polyturn.tools.schema import ToolResponse


@polyturn.tool
async def search(query: str, top_k: int = 3) -> str:
    """Search the passage index.

    Args:
        query: What to look for.
        top_k: How many passages
            to return.
    """
    return f"{query}/{top_k}"


def everything(
    text: str,
    count: int,
    ratio: float,
    flag: bool,
    names: list[str],
    table: dict[str, int],
    mode: Literal["fast", "slow"],
    maybe: Optional[str] = None,  # noqa: UP045
    either: int | str = 1,
    rows: list[list[int]] = [],  # noqa: B006
    anything: Any = None,
    point: tuple[int, int] = (0, 0),
    pair: tuple[int, str] = (0, ""),
    path: tuple[float, ...] = (),
    unit: str = "m",
) -> str:
    """Use every type.

    It has a second paragraph: still the description.

    Args:
        text: a
        count: b
        ratio (float): c
        flag: d
        names: e
        table: f
        mode: g
        maybe: h
        either: i
        rows: j
        anything: k
        point: l
        pair: m
        path: n
        unit: o (choices: ["m", "km"])

    Returns:
        text: nothing of this is a parameter
    """
    return text


def test_the_schema_comes_from_signature_and_docstring() -> None:
    assert search.schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the passage index.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for."},
                    "top_k": {"type": "integer", "description": "How many passages to return."},
                },
                "required": ["query"],
            },
        },
    }


def test_every_supported_type() -> None:
    function = infer_schema(everything).to_dict()["function"]
    found = {k: {x: y for x, y in v.items() if x != "description"} for k, v in function["parameters"]["properties"].items()}
    assert found == {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "names": {"type": "array", "items": {"type": "string"}},
        "table": {"type": "object", "additionalProperties": {"type": "integer"}},
        "mode": {"type": "string", "enum": ["fast", "slow"]},
        "maybe": {"type": "string", "nullable": True},
        "either": {"type": ["integer", "string"]},
        "rows": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        "anything": {},
        "point": {"type": "array", "items": {"type": "integer"}},
        "pair": {"type": "array"},
        "path": {"type": "array", "items": {"type": "number"}},
        "unit": {"type": "string", "enum": ["m", "km"]},
    }
    assert function["parameters"]["required"] == ["text", "count", "ratio", "flag", "names", "table", "mode"]
    assert function["description"] == "Use every type.\n\nIt has a second paragraph: still the description."


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_it_agrees_with_the_schema_that_transformers_reads() -> None:
    from transformers.utils import get_json_schema

    theirs = get_json_schema(search.function)
    theirs["function"].pop("return", None)  # what a function returns is not part of calling it
    assert search.schema == theirs


def test_it_is_still_the_function() -> None:
    assert asyncio.run(search("x", top_k=1)) == "x/1"
    assert search.__name__ == "search"
    assert isinstance(search, FunctionTool)


def no_docstring(x: int) -> int:
    return x


def no_description(x: int) -> int:
    """Do it.

    Args:
        y: something else
    """
    return x


def no_annotation(x) -> int:  # type: ignore[no-untyped-def]
    """Do it.

    Args:
        x: a number
    """
    return 1


def variadic(*things: int) -> int:
    """Do it.

    Args:
        things: numbers
    """
    return 1


def positional(x: int, /) -> int:
    """Do it.

    Args:
        x: a number
    """
    return x


def odd_choices(x: str) -> str:
    """Do it.

    Args:
        x: a word (choices: [red, blue])
    """
    return x


def odd_type(x: threading.Lock) -> int:  # type: ignore[valid-type]
    """Do it.

    Args:
        x: a lock
    """
    return 1


def unknown_type(x: NoSuchName) -> int:  # type: ignore[name-defined]  # noqa: F821
    """Do it.

    Args:
        x: what
    """
    return 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "'no_docstring': the function has no docstring"),
        (no_description, "there is no description for the argument 'x'"),
        (no_annotation, "the parameter 'x' is missing a type hint"),
        (variadic, r"\*things.* is a variadic parameter"),
        (positional, "positional-only"),
        (odd_choices, r"the parameter 'x' has choices that are no JSON list .*: \[red, blue\]"),
        (odd_type, "no JSON form"),
        (unknown_type, "NoSuchName"),
    ],
)
def test_what_is_missing_is_an_error_where_the_function_is_written(function: Callable, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        polyturn.tool(function)


def test_name_and_schema_may_be_given() -> None:
    named = polyturn.tool(name="find")(search.function)
    assert (named.name, named.schema["function"]["name"]) == ("find", "find")
    schema = {"type": "function", "function": {"name": "raw", "description": "d", "parameters": {"properties": {}}}}
    assert polyturn.tool(schema=schema)(no_docstring).name == "raw"
    assert polyturn.tool(schema=schema, name="other")(no_docstring).name == "other"


async def execute(tool: FunctionTool, arguments: dict[str, Any], **create_kwargs: Any) -> Any:
    instance_id, _ = await tool.create("e", **create_kwargs)
    try:
        return await tool.execute(instance_id, arguments)
    finally:
        await tool.release(instance_id)


@polyturn.tool
def look_up(key: str, table: Annotated[dict, FromTask], scale: Annotated[int, FromTask] = 1) -> int:
    """Look a key up.

    Args:
        key: The key.
    """
    return table[key] * scale


async def test_hidden_parameters_come_from_the_row_and_are_not_in_the_schema() -> None:
    assert list(look_up.schema["function"]["parameters"]["properties"]) == ["key"]
    outcome = await execute(look_up, {"key": "a", "scale": 100}, table={"a": 2}, scale=3, unrelated=1)
    assert outcome.response.text == "6"
    assert (await execute(look_up, {"key": "a"}, table={"a": 2})).response.text == "2"


async def test_a_hidden_parameter_that_the_row_lacks_is_named() -> None:
    with pytest.raises(DataError, match=r"'look_up'.*'table'.*create_kwargs"):
        await look_up.create("e")


async def test_execute_needs_a_live_instance() -> None:
    with pytest.raises(LifecycleError, match="'nobody'"):
        await search.execute("nobody", {"query": "x"})


async def test_a_plain_function_does_not_block_the_loop() -> None:
    everybody = threading.Barrier(4)

    def wait() -> str:
        """Wait."""
        everybody.wait()
        return threading.current_thread().name

    tool = polyturn.tool(wait)
    names = await asyncio.gather(*(execute_with_id(tool, i) for i in "abcd"))
    assert all(n.response.text.startswith("polyturn-tool-wait") for n in names)


async def execute_with_id(tool: FunctionTool, instance_id: str) -> Any:
    await tool.create(instance_id)
    return await tool.execute(instance_id, {})


@pytest.mark.parametrize(
    ("returned", "text", "reward", "metrics"),
    [
        ("hi", "hi", None, {}),
        (None, None, None, {}),
        (4, "4", None, {}),
        ({"a": "ü"}, '{"a": "ü"}', None, {}),
        ([1, 2], "[1, 2]", None, {}),
        (ToolResponse(text="x"), "x", None, {}),
        (("hi",), "hi", None, {}),
        (("hi", 1), "hi", 1.0, {}),
        (("hi", None, None), "hi", None, {}),
        (({"a": 1}, 0.5, {"hits": 3}), '{"a": 1}', 0.5, {"hits": 3}),
    ],
)
def test_every_form_of_answer(returned: Any, text: str | None, reward: float | None, metrics: dict) -> None:
    outcome = normalize(returned)
    assert (outcome.response.text, outcome.reward, dict(outcome.metrics)) == (text, reward, metrics)


def test_a_dict_with_images_is_a_response() -> None:
    assert normalize({"text": "t", "image": [1]}).response == ToolResponse(text="t", image=[1])


@pytest.mark.parametrize("returned", [(), (1, 2, 3, 4), ("x", 1, "no mapping")])
def test_an_answer_of_no_form_is_a_type_error(returned: tuple) -> None:
    with pytest.raises(TypeError, match="a tool returned"):
        normalize(returned)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "high"])
def test_a_reward_that_is_no_number_is_never_zero(reward: Any) -> None:
    with pytest.raises(RewardError, match="step reward"):
        normalize(("x", reward))
