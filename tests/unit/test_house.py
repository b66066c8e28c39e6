"""`scripts/house.py` finds one violation of each rule in a tree that has them, and its place."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "src/polyturn/__init__.py": 'BY_TASK: dict = {"a": {"A": "x", "B": "y"}, "b": {"A": "x"}}\n'
    "from polyturn.core.a import A as A\n",
    "src/polyturn/core/a.py": '"""Gone(1) as gone.py has it, and Mine()."""\nimport torch\n\nclass Twice: ...\n',
    "src/polyturn/core/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jinja2\n",
    "src/polyturn/core/c.py": "from polyturn.core import d\nfrom polyturn.core.d import x\n\nclass Twice: ...\n",
    "src/polyturn/core/d.py": "from . import e\nfrom .c import y\n",
    "src/polyturn/tools/a.py": "def f():\n    from ..training.policy import Policy\n\n# as verl does\n",
    "src/polyturn/rollout/a.py": "from polyturn import engines, compat\nimport ray\n",
    "docs/index.md": "# Index\n[gone](gone.md) [head](#nothing) [code](../src/polyturn/tools/a.py#g) [here](#index)\n",
    "mkdocs.yml": "nav:\n  - lost.md\n",
    "tests/test_a.py": "import time\nbegan = time.time()\ntook = time.time() - began\nassert took < 1\n",
}
FOUND = """
src/polyturn/core/a.py:2: core imports torch; it needs the standard library, NumPy and pydantic_core only
src/polyturn/core/a.py:2: core imports torch when it is imported; import it where it is used
src/polyturn/core/b.py:3: core imports jinja2; it needs the standard library, NumPy and pydantic_core only
src/polyturn/rollout/a.py:1: rollout imports engines; use core.protocols
src/polyturn/rollout/a.py:1: compat is reached by entry points only
src/polyturn/rollout/a.py:1: rollout imports compat, which lies above it
src/polyturn/rollout/a.py:2: rollout imports ray
src/polyturn/tools/a.py:2: tools imports training, which lies above it
src/polyturn:1: these modules import one another: polyturn.core.c <- polyturn.core.d <- polyturn.core.c
src/polyturn/tools/a.py:4: verl is named outside compat; ask infra.stand_in or config.dialect
src/polyturn/core/c.py:4: src/polyturn/core/a.py has a class Twice too
src/polyturn/__init__.py:1: A stands twice in BY_TASK
src/polyturn/__init__.py:1: B is in only one of BY_TASK and the imports for type checkers
docs/index.md:2: there is no gone.md
docs/index.md:2: this page has no nothing
docs/index.md:2: ../src/polyturn/tools/a.py has no g
docs/index.md:1: mkdocs.yml does not list this page
mkdocs.yml:1: docs/lost.md does not exist
src/polyturn/core/a.py:1: the docstring names Gone, which does not exist
src/polyturn/core/a.py:1: the docstring names gone.py, which does not exist
tests/test_a.py:4: this assert needs a quick machine; assert on the cause, not on the time
"""


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("house")


def test_each_rule_finds_its_violation(house: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert house.main(tmp_path) == 1
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(FOUND.split("\n")[1:-1])


@pytest.mark.parametrize(
    ("source", "violation"),
    [
        ('"""Return what a run needs."""', "'Return what' hides"),
        ("# nobody waits", "'nobody' hides"),
        ("def f():\n    found = 1", "'found' does not tell"),
        ("f = lambda told: told", "'told' does not tell"),
    ],
)
def test_vague_words_are_violations(
    house: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, violation: str
) -> None:
    (tmp_path / "src/polyturn").mkdir(parents=True)
    (tmp_path / "src/polyturn/a.py").write_text("found = 1  # a module's constant\n")
    assert house.main(tmp_path) == 0
    (tmp_path / "src/polyturn/a.py").write_text(source)
    assert house.main(tmp_path) == 1
    assert violation in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "source"),
    [
        (1, "began = perf_counter()\nwork()\nassert 0.1 < perf_counter() - began"),
        (
            1,
            "def took(x):\n    start = perf_counter()\n    return perf_counter() - start\nassert min(map(took, x)) < 3",
        ),
        (1, "found, s = work(), time.perf_counter() - start\nassert found and s < 3"),
        (1, "until = time.monotonic() + 3\nwhile x:\n    assert loop.time() < until"),
        (0, "until = time.monotonic() + 60\nwhile not done() and time.monotonic() < until:\n    pass\nassert done()"),
        (0, "clock = lambda: now[0]\nassert clock() - began == 3"),
        (0, "row = {'until': time.time() - 100}\nassert row"),
        (0, "def f():\n    x = time.time() - 1\ndef g():\n    x = 2\n    assert x == 2"),
    ],
)
def test_asserts_on_durations_alone_are_found(house: ModuleType, count: int, source: str) -> None:
    assert len(house.timed_asserts(source)) == count
