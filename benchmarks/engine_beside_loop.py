"""Compares the speed of decoding beside a saturated event loop with decoding alone.

Eight tasks keep the loop busy, each for 0.5 ms at a time, like parsing and tools. Prints one JSON line with the ratio of the
decoding speeds (target 0.7), and how often per second each busy task still ran.
"""

from __future__ import annotations

import asyncio
import json
import time
from statistics import median

from _engine_common import ask_all, demo_model, in_turns, median_ratio, prompt

from polyturn.engines.embedded import EmbeddedEngine

NUM_REQUESTS = 32
NUM_TOKENS = 48
NUM_BUSY = 8
BUSY_S = 0.0005


def main() -> None:
    """Measure and print."""
    engine = EmbeddedEngine(demo_model(), num_slots=NUM_REQUESTS, share_prefixes=False)
    prompts = [prompt(100, i) for i in range(NUM_REQUESTS)]
    laps: list[int] = []

    async def busy() -> None:
        while True:
            end = time.perf_counter() + BUSY_S
            while time.perf_counter() < end:
                pass
            laps.append(1)
            await asyncio.sleep(0)

    async def run(num_busy: int) -> None:
        others = [asyncio.create_task(busy()) for _ in range(num_busy)]
        await ask_all(engine, prompts, [NUM_TOKENS] * NUM_REQUESTS)
        for other in others:
            other.cancel()

    variants = {"alone": lambda: asyncio.run(run(0)), "beside": lambda: asyncio.run(run(NUM_BUSY))}
    seconds = in_turns(variants, repeats=9)
    tokens = NUM_REQUESTS * NUM_TOKENS
    result = {
        "benchmark": "engine_beside_loop",
        "alone_tokens_per_s": round(tokens / median(seconds["alone"])),
        "beside_tokens_per_s": round(tokens / median(seconds["beside"])),
        "ratio": round(median_ratio(seconds["alone"], seconds["beside"]), 2),
        "busy_laps_per_s": round(len(laps) / NUM_BUSY / sum(seconds["beside"])),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
