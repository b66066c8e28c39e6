"""`@polyturn.tool`: the schema read off a function, and how the function is called."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import threading
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest

import polyturn
from polyturn.core.errors import ConfigError, DataError, LifecycleError, RewardError
from polyturn.tools import FromTask
from polyturn.tools.function import FunctionTool, read_signature
from polyturn.tools.result_shape import normalize
from polyturn.tools.schema import ToolResponse
from support.refusals import refuses, refuses_later


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


def test_schema_comes_from_signature_and_docstring() -> None:
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


def test_schema_has_every_supported_type() -> None:
    function = read_signature(everything)[0].to_dict()["function"]
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
        "point": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        "path": {"type": "array", "items": {"type": "number"}},
        "unit": {"type": "string", "enum": ["m", "km"]},
    }
    assert function["parameters"]["required"] == ["text", "count", "ratio", "flag", "names", "table", "mode"]
    assert function["description"] == "Use every type.\n\nIt has a second paragraph: still the description."


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_schema_agrees_with_that_of_transformers() -> None:
    from transformers.utils import get_json_schema

    theirs = get_json_schema(search.function)
    theirs["function"].pop("return", None)  # the schema for a call has no return value
    assert search.schema == theirs


class Shop:
    """A shop, which can be called."""

    def __call__(self, item: str) -> str:
        """Look a price up."""
        return item


@pytest.mark.parametrize("function", [functools.partial(everything, unit="km"), Shop()])
def test_object_other_than_a_function_is_refused(function: Any) -> None:
    refuses(lambda: polyturn.tool(function), ConfigError, type(function).__name__)
    refuses(lambda: FunctionTool(function, name="it", schema=search.schema), ConfigError, type(function).__name__)


def test_decorated_function_is_still_a_function() -> None:
    assert asyncio.run(search("x", top_k=1)) == "x/1"
    assert search.__name__ == "search"
    assert isinstance(search, FunctionTool)


ARGUMENT = '"""Do it.\n\n    Args:\n        x: a thing%s\n    """'


@pytest.mark.parametrize(
    ("parameters", "docstring", "message"),
    [
        ("x: int", "", "'f': .* docstring"),
        ("x: int", '"""Do it.\n\n    Args:\n        y: something else\n    """', "'x'"),
        ("x", ARGUMENT % "", "'x'.* type hint"),
        ("*x: int", ARGUMENT % "", r"\*x.* variadic"),
        ("x: int, /", ARGUMENT % "", "positional-only"),
        ("x: str", ARGUMENT % " (choices: [red, blue])", r"'x'.*: \[red, blue\]"),
        ("x: threading.Lock", ARGUMENT % "", "no JSON form"),
        ("x: NoSuchName", ARGUMENT % "", "NoSuchName"),
        ("x: {}['a']", ARGUMENT % "", "annotation cannot be read .*KeyError"),
    ],
)
def test_function_that_tells_the_model_too_little_is_refused(parameters: str, docstring: str, message: str) -> None:
    names: dict[str, Any] = {"threading": threading}
    exec(f"from __future__ import annotations\ndef f({parameters}):\n    {docstring}\n    return 1", names)
    with pytest.raises(ConfigError, match=message):
        polyturn.tool(names["f"])


NO_TYPE: Any = {"a": int}


def test_bad_annotation_is_refused_with_the_line_of_the_tool() -> None:
    def f(x: dict[str, NO_TYPE]) -> str:
        """Do it.

        Args:
            x: a thing
        """
        return ""

    line = f.__code__.co_firstlineno
    refuses(
        lambda: polyturn.tool(f),
        ConfigError,
        "'f': the parameter 'x'",
        "no JSON form",
        f"{Path(__file__).name}, line {line}",
    )


def test_name_and_schema_may_be_given() -> None:
    named = polyturn.tool(name="find")(search.function)
    assert (named.name, named.schema["function"]["name"]) == ("find", "find")
    schema = {"type": "function", "function": {"name": "raw", "description": "d", "parameters": {"properties": {}}}}
    assert polyturn.tool(schema=schema)(lambda x: x).name == "raw"
    assert polyturn.tool(schema=schema, name="other")(lambda x: x).name == "other"


async def execute(tool: FunctionTool, arguments: dict[str, Any], *, id: str = "e", **create_kwargs: Any) -> Any:
    instance_id, _ = await tool.create(id, **create_kwargs)
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


async def test_hidden_parameters_come_from_the_row() -> None:
    assert list(look_up.schema["function"]["parameters"]["properties"]) == ["key"]
    outcome = await execute(look_up, {"key": "a", "scale": 100}, table={"a": 2}, scale=3, unrelated=1)
    assert outcome.response.text == "6"
    assert (await execute(look_up, {"key": "a"}, table={"a": 2})).response.text == "2"
    await refuses_later(lambda: look_up.create("e"), DataError, "'look_up'", "'table'")


async def test_execute_needs_a_live_instance() -> None:
    await refuses_later(lambda: search.execute("nobody", {"query": "x"}), LifecycleError, "'nobody'")


async def test_plain_function_does_not_block_the_loop() -> None:
    everybody = threading.Barrier(4)

    def wait() -> str:
        """Wait."""
        everybody.wait()
        return threading.current_thread().name

    tool = polyturn.tool(wait)
    names = await asyncio.gather(*(execute(tool, {}, id=i) for i in "abcd"))
    assert all(n.response.text.startswith("polyturn-tool-wait") for n in names)


@pytest.mark.parametrize(
    ("returned", "text", "reward", "metrics"),
    [
        ("hi", "hi", None, {}),
        (None, None, None, {}),
        (4, "4", None, {}),
        ({"a": "ü"}, '{"a": "ü"}', None, {}),
        ([1, 2], "[1, 2]", None, {}),
        (ToolResponse(text="x"), "x", None, {}),
        ({"text": "t", "image": [1]}, "t", None, {}),
        (("hi",), "hi", None, {}),
        (("hi", 1), "hi", 1.0, {}),
        (("hi", None, None), "hi", None, {}),
        (({"a": 1}, 0.5, {"hits": 3}), '{"a": 1}', 0.5, {"hits": 3}),
    ],
)
def test_tool_may_return_any_form_of_answer(returned: Any, text: str | None, reward: float | None, metrics: dict) -> None:
    outcome = normalize(returned)
    assert (outcome.response.text, outcome.reward, dict(outcome.metrics)) == (text, reward, metrics)


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        ((), TypeError),
        ((1, 2, 3, 4), TypeError),
        (("x", 1, "no mapping"), TypeError),
        (("x", float("nan")), RewardError),
        (("x", float("inf")), RewardError),
        (("x", "high"), RewardError),
    ],
)
def test_answer_of_no_form_is_an_error(returned: tuple, error: type[Exception]) -> None:
    with pytest.raises(error):
        normalize(returned)
