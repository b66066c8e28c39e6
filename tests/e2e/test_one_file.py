"""The one-file example runs, on the library's public pieces, and stays short enough to be read in one go."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_file_grpo.py"


def test_it_trains_and_is_at_most_300_lines():
    assert len(EXAMPLE.read_text().splitlines()) <= 300
    main = runpy.run_path(str(EXAMPLE))["main"]
    history = asyncio.run(main(sft_steps=20, steps=3, groups_per_step=4, group_size=4, seed=0))
    assert len(history) == 3
    assert all(0.0 <= won <= 1.0 for won in history)
