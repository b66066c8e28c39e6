"""verl's `@function_tool`: a decorator that registers, on the native function tools."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyturn.compat.verl import function_tool as module
from polyturn.compat.verl.function_tool import function_tool, get_function_tool
from polyturn.compat.verl.tool_registry import load_all_tools
from polyturn.compat.verl.tool_schemas import OpenAIFunctionCallSchema, OpenAIFunctionParsedSchema
from polyturn.core.errors import ConfigError
from polyturn.tools.schema import ToolResponse
from support.refusals import refuses


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    module.clear()
    yield
    module.clear()


async def test_every_form_of_the_decorator_registers() -> None:
    @function_tool
    def double(x: int) -> int:
        """Double a number.

        Args:
            x: The number.
        """
        return 2 * x

    @function_tool("look_up")
    async def find(key: str) -> tuple[str, float, dict[str, Any]]:
        """Look up.

        Args:
            key: What.
        """
        return key, 0.5, {"hits": 1}

    @function_tool("raw", schema={"type": "function", "function": {"name": "raw", "description": "Anything."}})
    def anything(**_: Any) -> None:
        return None

    assert double(4) == 8 and not double.is_async and find.is_async
    assert [get_function_tool(n).name for n in ("double", "look_up", "raw")] == ["double", "look_up", "raw"]
    assert await double.call({"x": 4}) == 8, "what the function returned, as verl's callers expect"
    assert await find.call({"key": "a"}) == ("a", 0.5, {"hits": 1})
    assert module.normalize_function_tool_return(await find.call({"key": "a"})) == (ToolResponse(text="a"), 0.5, {"hits": 1})
    assert await anything.call({}) is None


def test_mistakes_are_raised_at_the_decorator() -> None:
    def many(*args: int) -> None:
        """Take many."""

    def one(x: int) -> None:
        """Take one.

        Args:
            x: It.
        """

    refuses(lambda: function_tool(many), ValueError, "variadic")
    refuses(lambda: function_tool(functools.partial(one, x=1)), ValueError, "partial")
    function_tool(one)
    with pytest.raises(ValueError, match="registered"):

        @function_tool("one")
        def other(x: int) -> None:
            """Take another.

            Args:
                x: It.
            """

    refuses(lambda: get_function_tool("on"), KeyError, "'on'", "'one'")
    with pytest.raises(TypeError):
        module.normalize_function_tool_return((1, 2, 3, 4))


def test_files_of_functions_are_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = "from verl.tools.function_tool import function_tool\n"
    text = head + '@function_tool\ndef wave() -> str:\n    """Wave."""\n    return ""\n'
    (tmp_path / "tools.py").write_text(text)
    (tmp_path / "none.py").write_text("x = 1\n")
    assert [t.name for t in module.load_function_tools_from_path(str(tmp_path / "tools.py"))] == ["wave"]
    assert [t.name for t in load_all_tools(None, tmp_path / "tools.py")] == ["wave"]
    with caplog.at_level(logging.WARNING):
        assert module.load_function_tools_from_path(str(tmp_path / "none.py")) == []
    assert "no @function_tool decorators found" in caplog.text
    with pytest.raises(FileNotFoundError, match="function_tool_path does not exist"):
        module.load_function_tools_from_path(str(tmp_path / "gone.py"))


IN_A_LOOP = """
from verl.tools.function_tool import function_tool
for name in NAMES:
    @function_tool(name)
    def tool() -> str:
        "Say the name."
        return name
"""


def test_tools_of_a_loop_are_all_loaded(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(IN_A_LOOP.replace("NAMES", "('b', 'a')"))
    assert [t.name for t in module.load_function_tools_from_path(str(tmp_path / "loop.py"))] == ["b", "a"]
    plain = IN_A_LOOP.replace(
        "from verl.tools.function_tool import function_tool", "from polyturn import tool as function_tool"
    )
    (tmp_path / "native.py").write_text(plain.replace("NAMES", "('b', 'a')"))
    assert [t.name for t in load_all_tools(None, tmp_path / "native.py")] == ["b", "a"]
    (tmp_path / "same.py").write_text(IN_A_LOOP.replace("NAMES", "('c', 'c')"))
    refuses(
        lambda: module.load_function_tools_from_path(str(tmp_path / "same.py")), ConfigError, "'c' is already registered"
    )


def test_file_is_read_once_and_names_do_not_collide(tmp_path: Path) -> None:
    file = tmp_path / "tools.py"
    file.write_text(
        "from verl.tools.function_tool import function_tool\n@function_tool('calc_gsm8k_reward')\n"
        "def calc(answer: str) -> str:\n    'Check.\\n\\nArgs:\\n    answer: it'\n    return answer\n"
    )
    first = module.load_function_tools_from_path(str(file))
    assert module.load_function_tools_from_path(str(file)) == first
    items = {"tools": [{"class_name": "polyturn.tools.gsm8k.Gsm8kTool"}]}
    refuses(lambda: load_all_tools(items, file), ConfigError, "['calc_gsm8k_reward']", "collide")


@pytest.mark.parametrize(
    ("text", "arguments", "is_bad"), [('{"a": 1}', {"a": 1}, False), ("{a", {}, True), ("[1]", {}, True)]
)
def test_parsed_call_is_read(text: str, arguments: dict, is_bad: bool) -> None:
    parsed = OpenAIFunctionParsedSchema(name="f", arguments=text)
    call, bad = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
    assert (call.name, call.arguments, bad) == ("f", arguments, is_bad)
