"""The numbered examples run as they are, with a small random model: by `--tiny`, and the notebook cell by cell."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from pathlib import Path

import pytest

from support.cases import each

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("0*.py"))


@pytest.mark.parametrize("script", each(len(SCRIPTS), SCRIPTS), ids=lambda path: path.stem)
def test_example_trains_with_a_small_model(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--tiny"])
    run = runpy.run_path(str(script), run_name="__main__")["run"]
    steps = [row for row in run.metrics if "reward/mean" in row]
    assert len(steps) >= 2
    trajectories = list(run.trajectories)
    assert trajectories and all(t.error is None for t in trajectories)


def test_notebook_runs_in_a_running_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "06_notebook.ipynb").read_text())["cells"]
    namespace: dict[str, object] = {"__name__": "__main__"}

    async def execute() -> None:
        for number, cell in enumerate(cells):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)

    asyncio.run(execute())
    assert "2 rows of metrics" in repr(namespace["run"])


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_notebook_runs_in_a_jupyter_kernel(tmp_path: Path):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient").NotebookClient(
        nbformat.read(EXAMPLES / "06_notebook.ipynb", as_version=4),
        timeout=500,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    cells = [cell for cell in client.execute()["cells"] if cell["cell_type"] == "code"]
    shown = [output["data"] for cell in cells for output in cell["outputs"] if "data" in output]
    assert any("2 rows of metrics" in data["text/plain"] and "<table" in data["text/html"] for data in shown)
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
