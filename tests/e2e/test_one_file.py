"""The one-file example trains."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_file_grpo.py"


def test_one_file_example_trains():
    main = runpy.run_path(str(EXAMPLE))["main"]
    torch.set_num_threads(1)
    history = asyncio.run(main(sft_steps=20, steps=3, groups_per_step=4, group_size=4, seed=0))
    assert len(history) == 3
    assert all(0.0 <= won <= 1.0 for won in history)
