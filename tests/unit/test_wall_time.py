"""No test asserts on how long something took: a busy machine takes as long as it likes.

A test waits for causes instead: an event, a barrier where all meet, the order of calls, a clock of its own
(`polyturn.engines.virtual_time`), or counted steps (`tests/support/steps.py`). What must not wait for something slow is
given something that never ends, so that it proves itself by coming back.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parents[1]
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "thread_time"}
"""Functions that are read for nothing but durations, under whatever name their module has."""


def timed_asserts(source: str) -> list[int]:
    """Return the lines of asserts on a duration: a clock's reading less another, or a reading against a deadline.

    Names that such a value, or what a function of the file returns of it, is assigned to carry it on.
    """
    if not any(clock in source for clock in (*CLOCKS, "time()")):
        return []
    tree = ast.parse(source)
    tainted: set[str] = set()
    while (more := tainted | {name for node in ast.walk(tree) for name in _carried(node, tainted)}) != tainted:
        tainted = more
    return [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assert) and _compares_time(n.test, tainted)]


def _carried(node: ast.AST, tainted: set[str]) -> Iterator[str]:
    """Yield the names that a statement gives a duration to."""
    if isinstance(node, ast.Assign) and _is_duration(node.value, tainted):
        yield from (n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name))
    elif isinstance(node, ast.NamedExpr | ast.AnnAssign) and node.value is not None and _is_duration(node.value, tainted):
        yield from (n.id for n in ast.walk(node.target) if isinstance(n, ast.Name))
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value is not None]
        if any(_is_duration(value, tainted) for value in returned):
            yield node.name


def _is_duration(node: ast.AST, tainted: set[str]) -> bool:
    """Return whether an expression holds the difference of a clock's reading and something, or what carries one."""
    return any(
        (isinstance(n, ast.Name) and n.id in tainted)
        or (isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub) and (_reads_clock(n.left) or _reads_clock(n.right)))
        for n in ast.walk(node)
    )


def _reads_clock(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Call) and _is_clock(n.func) for n in ast.walk(node))


def _is_clock(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in CLOCKS
    if not isinstance(function, ast.Attribute):
        return False
    return function.attr in {*CLOCKS, "time"}  # time.time, loop.time


def _compares_time(test: ast.expr, tainted: set[str]) -> bool:
    compared = [side for n in ast.walk(test) if isinstance(n, ast.Compare) for side in (n.left, *n.comparators)]
    return any(_is_duration(side, tainted) or _reads_clock(side) for side in compared)


@pytest.mark.parametrize(
    "source",
    [
        "began = time.monotonic()\nwork()\nassert time.monotonic() - began < 2",
        "began = perf_counter()\nwork()\nassert 0.1 < perf_counter() - began",
        "start = time.time()\ntook = time.time() - start\nassert took < 1, took",
        "def took(x):\n    start = perf_counter()\n    return time.perf_counter() - start\nassert min(map(took, x)) < 3",
        "found, s = work(), time.perf_counter() - start\nassert found and s < 3",
        "began = loop.time()\nwork()\nassert loop.time() - began < 1.0",
        "until = time.monotonic() + 3\nwhile x:\n    assert time.monotonic() < until",
    ],
)
def test_an_assert_on_a_duration_is_found(source: str) -> None:
    assert len(timed_asserts(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "until = time.monotonic() + 60\nwhile not done() and time.monotonic() < until:\n    pass\nassert done()",
        "assert run_virtual(ask()) == ([1], 20.0)",
        "clock = lambda: now[0]\nassert clock() - began == 3",
        "row = {'until': time.time() - 100}\nassert row",
    ],
)
def test_a_clock_that_no_assert_compares_is_fine(source: str) -> None:
    assert timed_asserts(source) == []


def test_no_test_asserts_on_wall_time() -> None:
    sources = {path: path.read_text() for path in TESTS.rglob("*.py") if "data" not in path.parts}
    found = [f"{path}:{line}" for path, source in sources.items() for line in timed_asserts(source)]
    assert not found, "these need a quick machine; assert on the cause"


def test_no_example_of_a_property_has_a_deadline() -> None:
    assert settings.default is not None and settings.default.deadline is None
