"""Finds asserts on durations in tests. `house.py` rejects them, because they fail on a busy machine.

    timed_asserts("began = time.monotonic()\nwork()\nassert time.monotonic() - began < 2")  ->  [3]

A test should use causes instead: an event, a barrier, the order of calls, a virtual clock
(`tests/support/virtual_time.py`), or counted steps (`tests/support/steps.py`). To show that code does not wait for a slow
call, the test uses a call that never ends, and checks that the code returns.
"""

from __future__ import annotations

import ast

CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "thread_time"}
"""Functions that are only used to measure durations, in a module of any name."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def timed_asserts(source: str) -> list[int]:
    """Return the lines of asserts on a duration: the difference of two clock readings, or a reading and a deadline.

    A name with an assigned duration is a duration too within the same definition, and so is a call of a function that
    returns a duration within the same file.
    """
    if "assert " not in source or not any(clock in source for clock in (*CLOCKS, "time()")):
        return []
    body = ast.parse(source).body
    definitions = [[node] for node in body if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
    rest = [node for node in body if [node] not in definitions]
    scopes = [[child for node in nodes for child in ast.walk(node)] for nodes in (*definitions, rest)]
    names: list[set[str]] = [set() for _ in scopes]
    functions: set[str] = set()
    size = -1
    while size < (size := sum(map(len, names)) + len(functions)):
        for nodes, known in zip(scopes, names, strict=True):
            for node in nodes:
                if isinstance(node, FUNCTIONS):
                    returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value is not None]
                    functions |= {node.name} if any(_is_duration(value, known | functions) for value in returned) else set()
                elif isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign) and node.value is not None:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if _is_duration(node.value, known | functions):
                        known |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return sorted(
        node.lineno
        for nodes, known in zip(scopes, names, strict=True)
        for node in nodes
        if isinstance(node, ast.Assert)
        and any(_is_duration(side, known | functions) or _reads_clock(side) for side in _compared(node.test))
    )


def _compared(test: ast.expr) -> list[ast.expr]:
    return [side for n in ast.walk(test) if isinstance(n, ast.Compare) for side in (n.left, *n.comparators)]


def _is_duration(expression: ast.AST, durations: set[str]) -> bool:
    for n in ast.walk(expression):
        if isinstance(n, ast.Name) and n.id in durations:
            return True
        if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub) and (_reads_clock(n.left) or _reads_clock(n.right)):
            return True
    return False


def _reads_clock(node: ast.AST) -> bool:
    called = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
    names = {getattr(function, "id", None) for function in called} & CLOCKS
    return bool(names or {getattr(function, "attr", None) for function in called} & {*CLOCKS, "time"})  # loop.time too
