"""What the engine benchmarks share: a demo-sized random Qwen3, requests, and a median over interleaved repeats.

Other work may share the machine, so every script compares ways of doing the same thing within one run, in turns.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from polyturn.engines.embedded import EmbeddedEngine

VOCAB = 512


def demo_model() -> Qwen3ForCausalLM:
    """Return a random Qwen3 of 0.85 million parameters, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def prompt(length: int, seed: int) -> list[int]:
    """Return `length` random ids."""
    return random.Random(seed).choices(range(VOCAB), k=length)


async def ask_all(
    engine: EmbeddedEngine,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    sessions: Sequence[str] | None = None,
) -> list[Completion]:
    """Send all requests at once and return their completions; without `sessions` each one ends with its request."""

    async def one(index: int) -> Completion:
        session = f"s{index}" if sessions is None else sessions[index]
        request = GenerateRequest(
            request_id=f"{session}/{time.perf_counter_ns()}",
            session_id=session,
            prompt_ids=prompts[index],
            sampling=SamplingParams(max_tokens=lengths[index], seed=index),
        )
        completion = await engine.generate(request)
        if sessions is None:
            await engine.end_session(session)
        return completion

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i)) for i in range(len(prompts))]
    return [t.result() for t in tasks]


def in_turns(ways: dict[str, Callable[[], None]], *, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of `repeats` runs of each way, taken in turns after one warm-up each."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios of runs that were neighbours in time."""
    return median(a / b for a, b in zip(over, under, strict=True))
