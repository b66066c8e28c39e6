"""Imports point down, and `import polyturn` brings in nothing heavy.

Read from the source, imports inside functions and for annotations included. A package may import packages of lower ranks
and neighbours of its own rank; no two modules need each other. Only what importing polyturn costs leaves out what stands
under `if TYPE_CHECKING:`, which never runs.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import polyturn
from polyturn.core.registry import Registry

SRC = Path(polyturn.__file__).parent

RANKS = [
    {"core"},
    {"infra", "models"},
    {"tokens"},
    {"algorithms", "batching", "tracking", "store"},
    {"engines", "buffer"},
    {"tools", "rewards", "retrieval"},
    {"interactions"},
    {"data"},
    {"rollout"},
    {"evaluation"},
    {"training"},
    {"serving"},
    {"viewer"},
    {"cluster"},
    {"testing"},
    {"environments"},
    {"config"},
    {"build"},
    {"api"},
    {"cli"},
    {"compat"},
    {"__main__"},
]
RANK_OF = {package: rank for rank, packages in enumerate(RANKS) for package in packages}
MAY_IMPORT_RAY = {"cluster", "cli", "api", "build"}
MAY_IMPORT_TORCH_AT_THE_TOP = {"training", "algorithms", "engines", "batching", "cluster", "testing", "compat"}


class Import(NamedTuple):
    """One imported module, as `module` wrote it at `line`."""

    module: str
    line: int
    target: str
    at_top: bool
    runs: bool = True
    """False under `if TYPE_CHECKING:`."""

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"

    @property
    def package(self) -> str:
        """The part of polyturn that imports: "rollout", "build", or "" for polyturn/__init__.py."""
        return _part(self.module)

    @property
    def imported_package(self) -> str | None:
        """The part of polyturn that is imported; None when it is not ours."""
        return _part(self.target) if _root(self.target) == "polyturn" else None


def _root(dotted: str) -> str:
    return dotted.split(".")[0]


def _part(dotted: str) -> str:
    return dotted.removeprefix("polyturn").removeprefix(".").partition(".")[0]


def imports_of(source: str, module: str, *, is_package: bool = False) -> list[Import]:
    """Return every import of a module, also inside functions, for annotations and with relative names."""
    return list(_walk(ast.parse(source), module, is_package))


def _walk(node: ast.AST, module: str, is_package: bool, *, at_top: bool = True, runs: bool = True) -> Iterator[Import]:
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.body:
            yield from _walk(child, module, is_package, at_top=at_top, runs=False)
        for child in node.orelse:
            yield from _walk(child, module, is_package, at_top=at_top, runs=runs)
        return
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(module, node.lineno, alias.name, at_top, runs)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = module.split(".") if is_package else module.split(".")[:-1]
            base = ".".join([*above[: len(above) - node.level + 1], *([base] if base else [])])
        # `from polyturn import tools` imports the package polyturn.tools
        names = [f"{base}.{a.name}" for a in node.names] if base == "polyturn" else [base]
        for name in names:
            yield Import(module, node.lineno, name, at_top, runs)
    inner = at_top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, module, is_package, at_top=inner, runs=runs)


@functools.cache
def all_imports() -> list[Import]:
    found = []
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found += imports_of(path.read_text(), module, is_package=is_package)
    return found


def test_the_walk_sees_imports_in_functions_relative_ones_and_those_for_annotations() -> None:
    source = """
from typing import TYPE_CHECKING
from . import sibling
from ..engines.pool import Pool
from polyturn import tools
if TYPE_CHECKING:
    import ray
else:
    import queue
def f():
    async def g():
        import torch.nn
"""
    found = imports_of(source, "polyturn.rewards.group")
    assert [(i.target, i.at_top, i.runs) for i in found] == [
        ("typing", True, True),
        ("polyturn.rewards", True, True),
        ("polyturn.engines.pool", True, True),
        ("polyturn.tools", True, True),
        ("ray", True, False),
        ("queue", True, True),
        ("torch.nn", False, True),
    ]
    assert imports_of("from .x import y", "polyturn.core", is_package=True)[0].target == "polyturn.core.x"


def test_every_package_has_a_rank_and_none_is_missed() -> None:
    packages = {
        p.stem for p in SRC.iterdir() if p.name != "__init__.py" and (p.suffix == ".py" or (p / "__init__.py").exists())
    }
    assert packages <= set(RANK_OF), "give the new package a rank here"
    assert "core" in packages
    assert {i.package for i in all_imports()} >= packages - {"core"}


def test_imports_point_down() -> None:
    wrong = [
        str(i)
        for i in all_imports()
        if i.imported_package
        and i.imported_package != i.package
        and RANK_OF[i.imported_package] > RANK_OF.get(i.package, len(RANKS))
    ]
    assert not wrong


def test_no_two_modules_need_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for i in all_imports():
        if i.at_top and i.imported_package is not None:
            graph.setdefault(i.module, set()).add(i.target)
    order = list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the cycle
    assert order.index("polyturn.core.errors") < order.index("polyturn.core.builder") < order.index("polyturn.build")


def test_core_needs_the_standard_library_and_numpy_only() -> None:
    wrong = [
        str(i)
        for i in all_imports()
        if i.package == "core"
        and i.imported_package != "core"
        and _root(i.target) not in {*sys.stdlib_module_names, "numpy"}
    ]
    assert not wrong


def test_rollout_reaches_engines_only_through_the_protocols() -> None:
    assert not [str(i) for i in all_imports() if i.package == "rollout" and i.imported_package == "engines"]


def test_nothing_below_cluster_imports_ray() -> None:
    assert not [str(i) for i in all_imports() if _root(i.target) == "ray" and i.package not in MAY_IMPORT_RAY]


def test_nothing_below_training_imports_torch_when_it_is_imported_but_the_tensor_code() -> None:
    heavy = {"torch", "transformers"}
    wrong = [
        str(i)
        for i in all_imports()
        if i.runs and i.at_top and _root(i.target) in heavy and i.package not in MAY_IMPORT_TORCH_AT_THE_TOP
    ]
    assert not wrong


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def test_import_polyturn_brings_in_nothing_heavy() -> None:
    before, after = (set(_python(f"import sys{more}; print(*sys.modules)").split()) for more in ("", ", polyturn"))
    assert {_root(m) for m in after - before} <= {*sys.stdlib_module_names, "polyturn"}


@pytest.mark.parametrize("module", ["polyturn.core.protocols", "polyturn.core.builder", "polyturn.core.serde"])
def test_core_can_be_used_without_torch(module: str) -> None:
    assert _python(f"import sys, {module}; print('torch' in sys.modules)") == "False"


def test_every_public_name_loads_and_knows_its_own_name() -> None:
    found = {name: getattr(polyturn, name) for name in dir(polyturn) if name != "__version__"}
    own = {name: one.__name__ for name, one in found.items() if not isinstance(one, Registry)}
    # A decorator is a verb, and `rollout` a package that can be called.
    assert own == {name: {"declare": "Traits", "rollout": "polyturn.rollout"}.get(name, name) for name in own}


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'polyturn' has no attribute 'Nothing'"):
        _ = polyturn.Nothing  # type: ignore[attr-defined]


def test_compat_is_reached_by_entry_points_alone() -> None:
    wrong = [str(i) for i in all_imports() if i.imported_package == "compat" and i.package != "compat"]
    assert not wrong, "a library that polyturn stands in for is asked through core.stand_in and config.dialect"


@pytest.mark.parametrize("package", ["build", "serving", "core", "cli", "rollout", "tools"])
def test_no_library_that_polyturn_stands_in_for_is_named(package: str) -> None:
    named = re.compile(r"\b(verl|ms-swift|swift)\b", re.IGNORECASE)
    wrong = [
        f"{path.relative_to(SRC)}:{number}: {line.strip()}"
        for path in sorted((SRC / package).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if named.search(line)
    ]
    assert not wrong
