"""Compares the embedded engine with transformers' `generate` and the CPU servers of vLLM and SGLang, on SmolLM2-135M.

    python benchmarks/engines_smollm2.py [--peers generate vllm sglang] [--model FOLDER]

Each engine answers the same 8 or 32 questions of `examples/sums` at once, with 64 tokens each at temperature 1, in float32
on all cores. They run one after another, because servers would compete for the cores. The embedded engine runs before and
after each peer, so that changes of the machine's speed are visible. Prints one JSON line with median tokens per second.
Target: 0.8 times vLLM at 32 requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers
from _real_servers import CLIENTS, server
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from polyturn import models
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.core.protocols import Engine
from polyturn.core.seeds import derive_seed
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.options import ServerOptions
from polyturn.engines.request_limits import ServedModel

BATCHES, NUM_NEW, REPEATS = (8, 32), 64, 3
CONTEXT = 256
Answer = Callable[[list[list[int]]], Awaitable[int]]
"""(Prompts) -> number of sampled tokens, after answering all prompts at once."""


def questions(tokenizer: Any, count: int) -> list[list[int]]:
    """Return prompts of sums in the format of the example."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "sums"))
    from teacher import sums

    rows = sums(seed=0, num_held_out=64, is_held_out=True)[:count]
    conversations = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    return [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=True, return_dict=False) for c in conversations
    ]


def of_engine(engine: Engine) -> Answer:
    """Return a function that answers prompts with an engine."""
    number = iter(range(10**9))

    async def answer(prompts: list[list[int]]) -> int:
        async def one(ids: list[int]) -> int:
            name = f"r{next(number)}"
            params = SamplingParams(max_tokens=NUM_NEW, seed=derive_seed(name))
            request = GenerateRequest(request_id=name, session_id=name, prompt_ids=ids, sampling=params)
            completion = await engine.generate(request)
            await engine.end_session(name)
            return len(completion.token_ids)

        return sum(await asyncio.gather(*map(one, prompts)))

    return answer


def of_generate(model: PreTrainedModel, pad: int) -> Answer:
    """Return a function that answers prompts with transformers' `generate`, padded on the left."""

    async def answer(prompts: list[list[int]]) -> int:
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            options = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": True, "top_k": 0}
            model.generate(ids, attention_mask=mask, pad_token_id=pad, **options)
        return NUM_NEW * len(prompts)

    return answer


async def tokens_per_s(answer: Answer, prompts: list[list[int]], *, repeats: int = REPEATS) -> list[float]:
    """Return the tokens per second of each repeat, after one warm-up."""
    rates = []
    for repeat in range(repeats + 1):
        began = perf_counter()
        tokens = await answer(prompts)
        if repeat:
            rates.append(tokens / (perf_counter() - began))
    return rates


async def measure(model: PreTrainedModel, tokenizer: Any, folder: Path, peers: list[str]) -> dict[str, Any]:
    """Return the tokens per second of every engine, and the ratios of the embedded engine."""
    prompts = {size: questions(tokenizer, size) for size in BATCHES}
    rates: dict[str, dict[int, list[float]]] = {}

    async def add(name: str, answer: Answer) -> None:
        for size in BATCHES:
            rates.setdefault(name, {}).setdefault(size, []).extend(await tokens_per_s(answer, prompts[size]))
            print(name, size, [round(r, 1) for r in rates[name][size]], file=sys.stderr)

    async def embedded() -> None:
        engine = EmbeddedEngine(model, num_slots=max(BATCHES), max_context=CONTEXT)
        await add("embedded", of_engine(engine))
        await engine.close()

    await embedded()
    for peer in peers:
        if peer == "generate":
            await add(peer, of_generate(model, tokenizer.pad_token_id or 0))
        else:
            async with server(peer, model=folder, max_context=CONTEXT) as url:
                served = ServedModel(vocab_size=int(model.config.vocab_size), max_context=CONTEXT)
                engine = CLIENTS[peer](url, served, options=ServerOptions(kind="vllm", max_in_flight=64))
                await add(peer, of_engine(engine))
                await engine.close()
        await embedded()
    medians = {name: {size: round(median(of), 1) for size, of in sizes.items()} for name, sizes in rates.items()}
    own = medians["embedded"]
    ratios = {name: {size: round(own[size] / of[size], 2) for size in BATCHES} for name, of in medians.items() if of != own}
    return {"tokens_per_s": medians, "embedded_against": ratios}


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the engines of the command line and print one JSON line."""
    folder = arguments.model or models.smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return await measure(model, tokenizer, folder, arguments.peers)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="*", default=["generate", "vllm", "sglang"], choices=["generate", "vllm", "sglang"])
    parser.add_argument("--model", type=Path, help="folder of another checkpoint of SmolLM2")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    result = asyncio.run(run(arguments))
    print(json.dumps({"benchmark": "engines_smollm2", "threads": torch.get_num_threads(), **result}))


if __name__ == "__main__":
    main()
