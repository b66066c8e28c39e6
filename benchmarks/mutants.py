"""Mutation test of the core: change one operator, constant or statement at a time, and check that a test fails.

    python benchmarks/mutants.py                       120 mutants; the last line of output is JSON
    python benchmarks/mutants.py --num 40 --seed 3 --packages tokens rollout
    python benchmarks/mutants.py --only "batching/layout.py:88"     those of one line, with the difference

First, all tests of the packages, the properties and the goldens run once, to record which functions each calls. Each mutant
then runs in another copy of `src`, until a test fails: with the tests that call its function, then with the tests of its
package that start processes, then with those of the mark "cluster". A surviving mutant is an error, unless
`mutants_argued.json` explains why the change has no effect.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/polyturn"
PACKAGES = ("core", "tokens", "rollout", "batching", "algorithms", "training")
EVERYWHERE = ("tests/property", "tests/golden")
"""Folders of tests that may execute any of the packages."""
ARGUED = Path(__file__).with_name("mutants_argued.json")
QUIET = ("-q", "-pno:cacheprovider", "-pno:xdist")
MAX_SECONDS = 1800.0
"""Seconds after which a set of tests counts as failed."""
PROCESSES = multiprocessing.get_context("forkserver")
"""Forks processes from one that has imported the dependencies of the tests, but nothing of the package."""
PRELOADED = ["torch", "transformers.models.qwen3.modeling_qwen3", "pytest", "hypothesis", "pyarrow.parquet", "pydantic"]

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change to one file."""

    file: str
    """Below src/polyturn."""
    function: str
    line: int
    span: tuple[int, int]
    """Start and end of the changed expression or statement, in bytes of the file."""
    before: str
    after: str

    @property
    def key(self) -> str:
        """Return a name of the mutant that does not depend on the code above it in the file."""
        return f"{self.file}: {self.function}: {self.before} -> {self.after}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    raw = path.read_bytes()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def visit(node: ast.AST, function: str) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = node.name if function == "" else f"{function}.{node.name}"
            if node.name in {"__repr__", "__str__"}:
                return
        for field, value in ast.iter_fields(node):
            if field in {"annotation", "returns", "decorator_list", "type_params", "bases", "keywords"} and not isinstance(
                node, ast.Call
            ):
                continue
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST) or _is_left_alone(child):
                    continue
                if function and isinstance(child, ast.expr | ast.stmt):
                    for changed in changes(child):
                        before = ast.get_source_segment(source, child) or ""
                        span = (
                            starts[child.lineno - 1] + child.col_offset,
                            starts[child.end_lineno - 1] + child.end_col_offset,
                        )
                        after = changed if isinstance(changed, str) else f"({ast.unparse(changed)})"
                        yield Mutant(name, function, child.lineno, span, " ".join(before.split()), after)
                yield from visit(child, function)

    source, name = raw.decode(), str(path.relative_to(SOURCE))
    yield from visit(ast.parse(source), "")


def _is_left_alone(node: ast.AST) -> bool:
    """Return whether the node has no behaviour to test: an error's message, a log line, a docstring, imports for types."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()) | ast.keyword(arg="strict"):  # an assertion, too, on lists that are zipped
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "log" | "_log")))):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def changes(node: ast.AST) -> Iterator[ast.expr | str]:
    """Yield the replacements of a node."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in COMPARISONS:
            yield ast.Compare(left, [COMPARISONS[type(operator)]()], [right])
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS and not isinstance(left, ast.JoinedStr):
            yield ast.BinOp(left, OPERATORS[type(operator)](), right)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute()]):
            yield "pass"


def circles(mutant: Mutant, calls: Mapping[str, Calls]) -> Iterator[list[str]]:
    """Yield the tests of a mutant from the nearest to the farthest: those that call its function, the quickest files first,
    then those of its package whose processes may, and at last those of its package with the mark "cluster"."""
    path = mutant.file.removesuffix(".py")
    of_file = {test for test, record in calls.items() if any(name.startswith(f"{path}:") for name in record.names)}
    of_function = {test for test in of_file if f"{path}:{mutant.function}" in calls[test].names}
    tests = of_function or of_file  # the body of a class is executed when it is imported
    seconds: dict[str, float] = defaultdict(float)
    for test in tests:
        seconds[test.partition("::")[0]] += calls[test].seconds
    if tests:
        yield sorted(tests, key=lambda test: (seconds[test.partition("::")[0]], test))
    package = f"tests/unit/{Path(mutant.file).parts[0]}/"
    if others := [t for t, record in calls.items() if record.has_processes and t not in tests and t.startswith(package)]:
        yield others
    yield ["-m", "cluster", package]


class Calls(NamedTuple):
    """The functions that a test calls in its process."""

    names: frozenset[str]
    """FILE:FUNCTION below src/polyturn."""
    has_processes: bool
    """Whether the test starts other processes, whose calls are not recorded."""
    seconds: float


class CallNotes:
    """A plug-in of pytest that records the functions that each test calls. A fixture counts for the first test that uses it,
    and for all of its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._called: set[tuple[str, str]] = set()
        self._of_file: dict[str, set[tuple[str, str]]] = defaultdict(set)
        self._of_test: dict[str, set[tuple[str, str]]] = {}
        self._seconds: dict[str, float] = {}

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(_SOURCE) or code.co_qualname in _STARTS:
            self._called.add((code.co_filename, code.co_qualname))

    def _traced(self, called: set[tuple[str, str]]) -> None:
        self._called = called
        threading.settrace(self._note)
        sys.settrace(self._note)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Record the calls of a test's fixtures, also for the tests of its file that share them."""
        self._traced(self._of_file[item.nodeid.partition("::")[0]])
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Record the calls of a test."""
        began = time.perf_counter()
        self._traced(self._of_test.setdefault(item.nodeid, set()))
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self._seconds[item.nodeid] = time.perf_counter() - began

    def pytest_sessionfinish(self) -> None:
        """Write all records to the folder."""
        notes = {}
        for test, called in self._of_test.items():
            every = called | self._of_file[test.partition("::")[0]]
            names = {_name(*one) for one in every if one[0].startswith(_SOURCE)}
            has_processes = any(not one[0].startswith(_SOURCE) for one in every)
            notes[test] = [sorted(names), has_processes, self._seconds.get(test, 0.0)]
        (self._folder / f"{os.getpid()}.json").write_text(json.dumps(notes))


_SOURCE = str(SOURCE)
_STARTS = {subprocess.Popen.__init__.__qualname__, multiprocessing.Process.start.__qualname__}


def _name(file: str, function: str) -> str:
    return f"{Path(file).relative_to(SOURCE).with_suffix('')}:{function.replace('.<locals>', '')}"


def note_calls(tests: Sequence[str], folder: Path) -> None:
    """Run `tests` in a new process, and write the calls of each to a folder."""
    os.chdir(ROOT)
    sys.path[:0] = [str(SOURCE.parent), str(ROOT)]
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for as long as the process lives)
    pytest.main([*QUIET, *tests], plugins=[CallNotes(folder)])
    os._exit(0)


def calls_of_tests(packages: Sequence[str], jobs: int) -> dict[str, Calls]:
    """Return test -> its calls, for the tests of the packages and those that may execute any of them."""
    files = [path for p in (*(f"tests/unit/{p}" for p in packages), *EVERYWHERE) for path in (ROOT / p).rglob("test_*.py")]
    shares = [[str(path.relative_to(ROOT)) for path in sorted(files)[i :: 4 * jobs]] for i in range(4 * jobs)]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:

        def run(share: list[str]) -> None:
            process = PROCESSES.Process(target=note_calls, args=(share, Path(folder)))
            process.start()
            process.join()

        list(pool.map(run, [share for share in shares if share]))
        return {
            test: Calls(frozenset(names), has_processes, seconds)
            for path in Path(folder).glob("*.json")
            for test, (names, has_processes, seconds) in json.loads(path.read_text()).items()
        }


class FirstFailure:
    """A plug-in of pytest that records the first failed test."""

    name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record a failure of a test or of its fixtures."""
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        """Record a file that cannot be imported."""
        if report.failed and not self.name:
            self.name = report.nodeid


def run_tests(source: Path, tests: Sequence[str], report: Path) -> None:
    """Run `tests` with the package of `source`, in a new process; write the first failure to `report`."""
    os.chdir(ROOT)
    os.setpgrp()
    os.environ["PYTHONPATH"] = str(source)
    sys.path[:0] = [str(source), str(ROOT)]
    sys.dont_write_bytecode = True
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for as long as the process lives)
    first = FirstFailure()
    code = int(pytest.main(["-x", *QUIET, *tests], plugins=[first]))
    is_passed = code in {0, 5}  # 5: no test is there
    report.write_text("" if is_passed else first.name or f"pytest, exit {code}", encoding="utf-8")
    os._exit(0)


def failing(source: Path, tests: Sequence[str]) -> str:
    """Return the first of `tests` that fails with the package of `source`, or "" if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        process = PROCESSES.Process(target=run_tests, args=(source, tests, report))
        process.start()
        process.join(MAX_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # of processes that the tests left behind
            os.killpg(process.pid or 0, signal.SIGKILL)
        if process.is_alive():
            return "a test that does not end"
        return report.read_text(encoding="utf-8") if report.exists() else f"exit {process.exitcode}"


def catches(mutant: Mutant, calls: Mapping[str, Calls]) -> str:
    """Return the test that fails because of the mutant, or "" if all pass."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder) / "src/polyturn"
        shutil.copytree(SOURCE, tree, ignore=shutil.ignore_patterns("__pycache__"))
        path = tree / mutant.file
        raw = path.read_bytes()
        path.write_bytes(raw[: mutant.span[0]] + mutant.after.encode() + raw[mutant.span[1] :])
        for tests in circles(mutant, calls):
            by = failing(tree.parent, tests)
            if by and "::" in by and failing(SOURCE.parent, ["-m", "", by]):
                print(f"unsteady {by} fails without any mutant", flush=True)
            elif by:
                return by
    return ""


def main() -> None:
    """Print the survivors, and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=120, help="how many mutants, drawn over files by how many each has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES))
    parser.add_argument("--only", help="FILE:LINE, all mutants of one line")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    PROCESSES.set_forkserver_preload(PRELOADED)
    began = time.perf_counter()
    mutants = [m for p in options.packages for path in sorted((SOURCE / p).rglob("*.py")) for m in mutants_of(path)]
    if options.only:
        file, _, line = options.only.partition(":")
        drawn = [m for m in mutants if m.file == file and m.line == int(line)]
    else:
        drawn = random.Random(options.seed).sample(mutants, min(options.num, len(mutants)))
    argued = json.loads(ARGUED.read_text())
    calls = calls_of_tests(options.packages, options.jobs)
    called = frozenset().union(*(record.names for record in calls.values()))
    print(f"{len(calls)} tests call {len(called)} functions", flush=True)
    outcomes: dict[str, list[str]] = defaultdict(list)

    def run(mutant: Mutant) -> None:
        by = catches(mutant, calls)
        outcome = "caught" if by else "argued" if mutant.key in argued else "survived"
        outcomes[outcome].append(mutant.key)
        print(f"{outcome:8} {mutant.file}:{mutant.line} {mutant.before:.90} -> {mutant.after:.90}", by, flush=True)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, drawn))
    for key in outcomes["survived"]:
        print(f"argue or test: {key}")
    result = {
        "benchmark": "mutants", "seed": options.seed, "possible": len(mutants), "mutants": len(drawn),
        "caught": len(outcomes["caught"]), "argued": len(outcomes["argued"]), "survived": len(outcomes["survived"]),
        "seconds": round(time.perf_counter() - began),
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(bool(outcomes["survived"]))


if __name__ == "__main__":
    main()
