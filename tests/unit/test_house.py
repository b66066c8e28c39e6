"""`scripts/house.py` finds the violations of each rule in a tree that has them, and their lines."""

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
    "AGENTS.md": "[gone](src/gone.py)\n",
    "mkdocs.yml": "nav:\n  - lost.md\n",
    "tests/test_a.py": "import time\nbegan = time.time()\ntook = time.time() - began\nassert took < 1\n",
}
VIOLATIONS = {
    "imports_point_down": "core/a.py:2 core/a.py:2 core/b.py:3 rollout/a.py:1 rollout/a.py:1 rollout/a.py:1 rollout/a.py:2 "
    "tools/a.py:2",
    "no_cycle_of_imports": "polyturn:1",
    "only_compat_names_other_libraries": "tools/a.py:4",
    "one_class_to_a_name": "core/c.py:4",
    "public_names_agree": "polyturn/__init__.py:1 polyturn/__init__.py:1",
    "links_lead_somewhere": "AGENTS.md:1 docs/index.md:2 docs/index.md:2 docs/index.md:2",
    "pages_stand_in_the_navigation": "docs/index.md:1 mkdocs.yml:1",
    "examples_in_docstrings_exist": "core/a.py:1 core/a.py:1",
    "no_assert_on_wall_time": "tests/test_a.py:4",
}
"""The end of the path and the line of each violation of a rule."""


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("house")


def test_each_rule_finds_its_violation(house: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert house.main(tmp_path) == 1
    assert len(capsys.readouterr().out.splitlines()) == sum(len(ends.split()) for ends in VIOLATIONS.values())
    tree = house.Tree(tmp_path)
    found = {rule.__name__: sorted(f"{path}:{line}" for path, line, _ in rule(tree)) for rule in house.RULES}
    for rule, positions in found.items():
        ends = sorted(VIOLATIONS.get(rule, "").split())
        assert len(positions) == len(ends), (rule, positions)
        assert all(one.endswith(end) for one, end in zip(positions, ends, strict=True)), (rule, positions)


@pytest.mark.parametrize(
    ("source", "violation"),
    [
        ('"""Return what a run needs."""', "'Return what' hides"),
        ("# nobody waits", "'nobody' hides"),
        ('"""The call returns\n    what a run needs."""', "hides the thing"),
        ('"""Returns where servers run."""', "'Returns where' hides"),
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
