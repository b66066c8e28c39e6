"""Shared by the engine benchmarks: a demo-sized random Qwen3, requests, and a median over interleaved repeats.

Other work may share the machine, so every script alternates between the compared variants within one run.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from transformers import PreTrainedModel

from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from polyturn.engines.embedded import EmbeddedEngine
from support.models import tiny_model

VOCAB = 512


def demo_model() -> PreTrainedModel:
    """Return a random Qwen3 of 0.85 million parameters, on one thread."""
    torch.set_num_threads(1)
    return tiny_model(VOCAB, hidden=128, layers=4, heads=4, kv_heads=2, intermediate=384, max_positions=1024)


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
    """Send all requests at once and return their completions; without `sessions` every request is a separate session."""

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


def in_turns(variants: dict[str, Callable[[], None]], *, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of `repeats` runs of each variant, in alternation, after one warm-up each."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios of runs that are adjacent in time."""
    return median(a / b for a, b in zip(over, under, strict=True))
