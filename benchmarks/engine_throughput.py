"""Compares the embedded engine with `model.generate` and transformers' continuous batching, for 32 requests at once.

There are two batches: completions of equal length (the best case of `generate`), and of lengths that differ by a factor of 4
(`generate` runs every row to the longest). Prints one JSON line; only requested tokens count. Targets: 0.8 and 1.0 times
`generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from statistics import median

import torch
import transformers
from _engine_common import ask_all, demo_model, in_turns, median_ratio, prompt
from transformers import ContinuousBatchingConfig, GenerationConfig

from polyturn.engines.embedded import EmbeddedEngine

NUM_REQUESTS = 32
PROMPT_LENGTH = 100


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--continuous", action="store_true", help="measure transformers' continuous batching too")
    arguments = options.parse_args()
    transformers.logging.set_verbosity_error()
    model = demo_model()
    prompts = [prompt(PROMPT_LENGTH, i) for i in range(NUM_REQUESTS)]
    lengths = {"equal": [32] * NUM_REQUESTS, "differ_4x": [16 + 48 * i // (NUM_REQUESTS - 1) for i in range(NUM_REQUESTS)]}
    result: dict[str, object] = {"benchmark": "engine_throughput", "requests": NUM_REQUESTS, "prompt": PROMPT_LENGTH}
    for name, counts in lengths.items():
        result[name] = measure(model, prompts, counts, repeats=arguments.repeats, continuous=arguments.continuous)
    print(json.dumps(result))


def measure(
    model: torch.nn.Module, prompts: list[list[int]], counts: list[int], *, repeats: int, continuous: bool
) -> dict[str, float]:
    """Return the median tokens per second of each variant, and the engine's ratio to the others."""
    engine = EmbeddedEngine(model, num_slots=NUM_REQUESTS, share_prefixes=False)
    ids = torch.tensor(prompts)

    def embedded() -> None:
        asyncio.run(ask_all(engine, prompts, counts))

    def generate() -> None:
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max(counts), do_sample=True, top_k=0)

    variants = {"embedded": embedded, "generate": generate}
    seconds = in_turns(variants, repeats=repeats)
    tokens = sum(counts)
    out = {f"{name}_tokens_per_s": round(tokens / median(values)) for name, values in seconds.items()}
    out["ratio_to_generate"] = round(median_ratio(seconds["generate"], seconds["embedded"]), 2)
    if continuous:
        slow = in_turns({"embedded": embedded, "continuous": lambda: run_continuous(model, prompts, counts)}, repeats=3)
        out["continuous_tokens_per_s"] = round(tokens / median(slow["continuous"]))
        out["ratio_to_continuous"] = round(median_ratio(slow["continuous"], slow["embedded"]), 2)
    return out


def run_continuous(model: torch.nn.Module, prompts: list[list[int]], counts: list[int]) -> None:
    """Run the batch with a `ContinuousBatchingManager`, with the fastest of the settings that were tried."""
    paging = ContinuousBatchingConfig(page_size=32, num_blocks=256, max_batch_tokens=128)
    config = GenerationConfig(do_sample=True, max_new_tokens=max(counts), eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=paging)
    manager.start()
    try:
        for index, (ids, count) in enumerate(zip(prompts, counts, strict=True)):
            manager.add_request(ids, request_id=str(index), max_new_tokens=count)
        done = 0
        while done < len(prompts):
            answer = manager.get_result(timeout=60)
            if answer is None:
                raise RuntimeError("continuous batching gave no result for 60 s")
            done += answer.is_finished()
    finally:
        manager.stop(block=True)


if __name__ == "__main__":
    main()
