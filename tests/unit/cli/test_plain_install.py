"""The commands import nothing that `pip install '.[train]'` does not install."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import polyturn

FOLDER = Path(polyturn.__file__).parent
BLOCKED = """
import importlib, json, sys

blocked, modules = json.loads(sys.argv[1])


class Refusing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Refusing)
for module in modules:
    importlib.import_module(module)
"""


def installed_with(name: str, extras: set[str]) -> set[str]:
    """Return the distributions that are installed with `name` and its extras."""
    names, todo = set[str](), [(name, frozenset(extras))]
    while todo:
        name, extras = todo.pop()
        try:
            requirements = [Requirement(text) for text in distribution(name).requires or ()]
        except PackageNotFoundError:
            continue
        names.add(canonicalize_name(name))
        for one in requirements:
            is_wanted = one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in {"", *extras})
            if is_wanted and canonicalize_name(one.name) not in names:
                todo.append((one.name, frozenset(one.extras)))
    return names


def test_commands_and_the_report_import_installed_packages_alone():
    installed = installed_with("polyturn", {"train"})
    assert {"torch", "starlette", "transformers"} <= installed and "fastapi" not in installed
    others = {
        module
        for module, owners in packages_distributions().items()
        if not any(canonicalize_name(owner) in installed for owner in owners)
    }
    commands = [f"polyturn.cli.{path.stem}" for path in sorted((FOLDER / "cli").glob("*.py")) if path.stem != "__main__"]
    arguments = json.dumps([sorted(others), [*commands, "polyturn.viewer.report"]])
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
