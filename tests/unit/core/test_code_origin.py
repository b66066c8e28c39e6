"""Whose function a stack is described by: an author's before an installed package's."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any

import pytest

from polyturn.core.code_origin import OURS, PACKAGES, STDLIB, describe_position

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
