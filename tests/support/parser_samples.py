"""One turn as each model family writes it, and damaged copies of it: the samples on which parsers are tested and fuzzed.

    WRITINGS["hermes"]  ->  "<think>\\nI think.\\n</think>\\n\\nLet me see.\\n<tool_call>\\n{…}\\n</tool_call>\\n…"

Every writing means the same: the reasoning `REASONING`, the content `CONTENT` and the calls `CALLS` of the tools `TOOLS`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

_DATA = json.loads((Path(__file__).parents[1] / "data/parser_samples.json").read_text(encoding="utf-8"))

REASONING: str = _DATA["reasoning"]
CONTENT: str = _DATA["content"]
CALLS: tuple[tuple[str, dict[str, Any]], ...] = tuple(map(tuple, _DATA["calls"]))
TOOLS: tuple[dict[str, Any], ...] = tuple(_DATA["tools"])
WRITINGS: dict[str, str] = _DATA["writings"]
VARIANTS: tuple[tuple[str, str], ...] = tuple(map(tuple, _DATA["variants"]))
"""(parser, text): other ways to write the two calls, without reasoning and content."""
PIECES: tuple[str, ...] = (*_DATA["pieces"], "\ud800")
"""Texts that damage a writing: every family's tags, JSON in pieces, hard characters."""


def mutate(text: str, rng: random.Random) -> str:
    """Return a damaged copy of `text`: pieces cut out, put in, doubled, moved, cut off, or a text of random pieces."""
    if rng.random() < 0.05:
        return "".join(rng.choice(PIECES) for _ in range(rng.randrange(40)))
    for _ in range(rng.randrange(1, 6)):
        a, b = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        b = min(b, a + rng.choice((1, 3, 10, 40)))
        c = rng.randrange(len(text) + 1)
        odd = chr(rng.choice((32, 60, 34, 0x1F600, 0xD800)))
        damaged = [
            text[:a] + text[b:],
            text[:a] + rng.choice(PIECES) + text[a:],
            text[:b] + text[a:],
            text[: max(a, 1)] if rng.random() < 0.3 else text[:a] + odd + text[b:],
            text[:c] + text[a:b] + text[c:],
            text[:a] + rng.choice(PIECES) + text[b:],
        ]
        text = rng.choice(damaged)
    return text
