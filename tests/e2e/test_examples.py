"""The numbered examples run as they are, with a small random model: by `--tiny`, and the notebook cell by cell."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("0*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_trains_with_a_small_model(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--tiny"])
    run = runpy.run_path(str(script), run_name="__main__")["run"]
    steps = [row for row in run.metrics if "reward/mean" in row]
    assert len(steps) >= 2
    trajectories = list(run.trajectories)
    assert trajectories and all(t.error is None for t in trajectories)


def test_the_notebook_runs_where_an_event_loop_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "06_notebook.ipynb").read_text())["cells"]
    namespace: dict[str, object] = {"__name__": "__main__"}

    async def execute() -> None:
        for number, cell in enumerate(cells):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)

    asyncio.run(execute())
    assert "2 rows of metrics" in repr(namespace["run"])


def test_the_first_example_is_at_most_forty_lines_and_imports_polyturn_alone():
    text = (EXAMPLES / "01_train_gsm8k.py").read_text()
    assert len(text.splitlines()) <= 40
    imported = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert imported == ["import sys", "import polyturn", "from polyturn.testing import tiny"]
