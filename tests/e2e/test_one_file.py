"""The one-file example runs, on public names alone, and stays short enough to be read in one go."""

from __future__ import annotations

import ast
import asyncio
import runpy
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_file_grpo.py"


def test_it_imports_polyturn_once_and_six_modules_at_most():
    found = [node for node in ast.walk(ast.parse(EXAMPLE.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(found) <= 6
    assert [ast.unparse(node) for node in found if "polyturn" in ast.unparse(node)] == ["import polyturn"]


def test_it_trains_and_is_at_most_300_lines():
    assert len(EXAMPLE.read_text().splitlines()) <= 300
    main = runpy.run_path(str(EXAMPLE))["main"]
    torch.set_num_threads(1)
    history = asyncio.run(main(sft_steps=20, steps=3, groups_per_step=4, group_size=4, seed=0))
    assert len(history) == 3
    assert all(0.0 <= won <= 1.0 for won in history)
