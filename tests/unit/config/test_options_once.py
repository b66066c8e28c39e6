"""How many keys a configuration has, and that no two classes of options declare the same fields."""

from __future__ import annotations

import ast
import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest

import polyturn

ROOT = Path(__file__).parents[3]
MAX_KEYS = 150
MAX_SHARED = 4


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "benchmarks/house.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_configuration_has_no_more_keys_than_a_person_can_read(house: ModuleType) -> None:
    keys = house.keys()
    assert len(keys.of_runs) <= MAX_KEYS, "take one out, or give it to the plug-in that it belongs to"
    assert {"train.steps", "engine.kind"} <= set(keys.of_runs) and "engine.launch.replicas" not in keys.of_runs
    assert "warm_start.optim.lr" in keys.paths and "warm_start.optim.lr" not in keys.of_runs, "it stands elsewhere before"
    names = [name.rpartition(".")[2] for name in keys.of_plugins]
    assert {"num_slots", "replicas", "max_in_flight"} <= set(names) and not set(keys.of_runs) & set(keys.of_plugins)


def test_no_two_classes_of_options_declare_the_same_fields() -> None:
    """Fields of one name and one default, other than those that one class inherits from the other."""
    declared: dict[str, set[tuple[str, str]]] = {}
    for path in Path(polyturn.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith(("Options", "Settings", "Config")):
                declared[node.name] = {
                    (field.target.id, _default(field.value))
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None
                }
    assert {"ToolOptions", "SftOptions", "EmbeddedOptions", "LossSettings"} <= set(declared)
    shared = {pair: declared[pair[0]] & declared[pair[1]] for pair in itertools.combinations(sorted(declared), 2)}
    assert {pair for pair, fields in shared.items() if len(fields) > MAX_SHARED} == set()


def _default(value: ast.expr) -> str:
    """Return a default as it is written, also where it is an argument of pydantic's Field."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Field" and value.args:
        value = value.args[0]
    return ast.unparse(value)
