"""Messages about an author's code: the author's function in a stack, and the line that defines a plug-in."""

from __future__ import annotations

import functools
import inspect
import math
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import polyturn
from polyturn.core.code_origin import OURS, PACKAGES, STDLIB, defined_at, describe_position
from polyturn.core.errors import ConfigError, errors_at, raised_at
from polyturn.rewards.gsm8k import compute_score
from support.refusals import refuses

PACKAGE, TOOL, HELPER = f"{PACKAGES[0]}retry.py", "/project/tool.py", "/project/helper.py"


def stack_through(*files: str) -> list[FrameType]:
    """Return the frames of calls through one function of each file, outermost first."""

    def frames() -> list[FrameType]:
        stack, at = [], inspect.currentframe()
        while len(stack) < len(files):
            assert at is not None and at.f_back is not None
            at = at.f_back
            stack.append(at)
        return stack[::-1]

    call: Any = frames
    for file in reversed(files):
        names = {"call": call}
        exec(compile("def work():\n    return call()\n", file, "exec"), names)
        call = names["work"]
    stack: list[FrameType] = call()
    return stack


@pytest.mark.parametrize(
    ("files", "described"),
    [
        ((OURS + "a.py", TOOL, HELPER), f"work ({TOOL}:1, now at {HELPER}:2)"),
        ((OURS + "a.py", PACKAGE, TOOL, PACKAGE), f"work ({TOOL}:1, now at {PACKAGE}:2)"),
        ((OURS + "a.py", PACKAGE, STDLIB + "a.py"), f"work ({PACKAGE}:1, now at {PACKAGE}:2)"),
        ((OURS + "a.py", STDLIB + "a.py"), ""),
    ],
)
def test_function_of_an_author_is_described_first(files: tuple[str, ...], described: str) -> None:
    assert describe_position(stack_through(*files)) == described


class Author:
    def method(self) -> None: ...


class Lookup:
    def __getattr__(self, name: str) -> Any:
        return {}[name]


@polyturn.tool
def tool() -> str:
    """Do nothing."""
    return ""


@functools.wraps(Author.method)
def wrapper(*args: Any) -> None: ...


def line(text: str) -> str:
    """Return the position of the first line of this file that begins with a text."""
    lines = Path(__file__).read_text().splitlines()
    return f" (test_code_origin.py, line {next(n for n, one in enumerate(lines, 1) if one.startswith(text))})"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (Author, "class Author"),
        (Author(), "class Author"),
        (Author.method, "    def method"),
        (Author().method, "    def method"),
        (functools.partial(functools.partial(Author.method), None), "    def method"),
        (wrapper, "    def method"),
        (tool, "@polyturn.tool"),
    ],
)
def test_line_of_an_authors_code_is_known(code: object, text: str) -> None:
    assert defined_at(code) == line(text)


@pytest.mark.parametrize("code", [compute_score, ConfigError, len, math.sqrt, int, 3, None, pytest.fixture, Path()])
def test_code_without_an_author_has_no_line(code: object) -> None:
    assert defined_at(code) == ""


def test_attributes_of_an_author_do_not_hide_the_message() -> None:
    with pytest.raises(ConfigError, match=r"^no$"), errors_at(Lookup()):
        raise ConfigError("no")


def test_error_about_a_plugin_names_its_line_once() -> None:
    def fails() -> None:
        with errors_at(Author), errors_at(Author):
            raise ConfigError("no")

    refuses(fails, ConfigError, f"no{line('class Author')}")
    with pytest.raises(ConfigError) as caught, errors_at(len):
        raise ConfigError("no")
    assert str(caught.value) == "no"


def test_code_compiled_by_cython_is_its_packages() -> None:
    with pytest.raises(pa.ArrowInvalid) as caught:
        pq.read_table(pa.BufferReader(b""))
    assert "test_code_origin.py" in raised_at(caught.value), "the last line of an author, not one of pyarrow"
