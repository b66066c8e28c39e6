"""Measures our process's CPU time per turn when the engine is a server. Prints one JSON line.

    python benchmarks/engine_client_cpu.py [--repeats 7]

A bare TCP server in another process answers every request with the same bytes, in the format of a vLLM or SGLang server, so
that only our side does work. There are three figures, in CPU microseconds of this process including system calls:

    client     one `Engine.generate`, prompts of 1k to 32k ids, 64 tokens back, 32 requests in flight
    floor      the same bytes: orjson there and back, and one socket per request in flight, no HTTP library, no checks
    turn       a whole turn of a rollout (as in rollout_loop.py, histories from 1k ids) through the client; time inside the
               tokenizer is taken off

The slope is what a longer prompt adds, per 1,000 ids.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import orjson
from rollout_loop import ANSWER, GROUP_SIZE, HISTORY, TURNS, prompt_of

from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.vllm import VllmEngine
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.limits import Limits
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.testing.episodes import scripted_context, task, tiny_codec, turn_ids

SIZES = (1_000, 4_000, 16_000, 32_000)
IN_FLIGHT, REQUESTS, ANSWER_TOKENS = 32, 256, 64
CLIENTS: dict[str, type[RemoteEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}
FACTS = {"logprobs_mode": "processed_logprobs", "policy": "fcfs", "max_model_len": 40_000, "context_length": 40_000}
"""Facts that a client requests from a server before its first request."""
PATHS = {"vllm": "/inference/v1/generate", "sglang": "/generate"}
MAX_TURN_MS, MAX_SLOPE = 0.5, 1.5


def reply_of(engine: str, ids: list[int]) -> dict[str, Any]:
    """Return a server's answer, with every field that it sends."""
    logprob = [-6.986291885375977 - 0.01 * i for i in range(len(ids))]
    versions = [{"version": "default", "start": 0, "end": len(ids)}]
    if engine == "sglang":
        meta = {
            "id": "0" * 32,
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": 1000,
            "weight_version": "default",
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [[p, i, None] for p, i in zip(logprob, ids, strict=True)],
            "output_token_logprobs_length": len(ids),
            "completion_tokens": len(ids),
            "cached_tokens": 990,
            "weight_versions": versions,
            "e2e_latency": 0.5,
        }
        return {"output_ids": ids, "meta_info": meta}
    entries = [{"token_id": i, "logprob": p, "rank": 3} for p, i in zip(logprob, ids, strict=True)]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": versions,
        "logprobs": {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]},
    }
    usage = {"prompt_tokens": 1000, "total_tokens": 1064, "completion_tokens": 64, "prompt_tokens_details": None}
    return {"request_id": "generate-tokens-" + "0" * 32, "model": "m", "created": 0, "usage": usage, "choices": [choice]}


class _Answers(asyncio.Protocol):
    """A protocol that reads a request's length and sends the answer of its path."""

    def __init__(self, answers: dict[bytes, bytes]) -> None:
        self._answers, self._buffer = answers, bytearray()
        self._wanted = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= (self._wanted or 1):
            if not self._wanted:
                end = self._buffer.find(b"\r\n\r\n")
                if end < 0:
                    return
                head = bytes(self._buffer[:end]).lower()
                length = head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]
                self._wanted = end + 4 + int(length or 0)
                self._path = bytes(self._buffer).split(b" ", 2)[1]
                continue
            del self._buffer[: self._wanted]
            self._wanted = 0
            self._transport.write(self._answers[self._path])


def http(body: bytes) -> bytes:
    """Return an HTTP answer."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def serve(pipe: Connection, answers: dict[bytes, bytes], cores: set[int]) -> None:
    """Print the port, and serve until killed."""
    os.sched_setaffinity(0, cores)

    async def run() -> None:
        listening = await asyncio.get_running_loop().create_server(lambda: _Answers(answers), "127.0.0.1", 0)
        pipe.send(listening.sockets[0].getsockname()[1])
        await listening.serve_forever()

    asyncio.run(run())


async def cpu_us(one: Callable[[int], Awaitable[None]]) -> float:
    """Return CPU microseconds per call of `one`, `IN_FLIGHT` at a time."""
    began = time.process_time()

    async def several(first: int) -> None:
        for number in range(first, REQUESTS, IN_FLIGHT):
            await one(number)

    async with asyncio.TaskGroup() as group:
        for first in range(IN_FLIGHT):
            group.create_task(several(first))
    return 1e6 * (time.process_time() - began) / REQUESTS


async def measure_client(engine: str, port: int, repeats: int) -> dict[str, Any]:
    """Return the figures client and floor, in microseconds by prompt size, and the slopes."""
    loop = asyncio.get_running_loop()
    client = CLIENTS[engine](f"http://127.0.0.1:{port}", ServedModel(vocab_size=152_000))
    prompts = {size: np.random.default_rng(size).integers(0, 150_000, size, np.int32) for size in SIZES}
    for ids in prompts.values():
        ids.setflags(write=False)  # as in an episode, whose ids are not copied
    size = SIZES[0]

    async def ask(number: int) -> None:
        request = GenerateRequest(
            request_id=f"r{number}",
            session_id=f"s{number}",
            prompt_ids=prompts[size],
            sampling=SamplingParams(max_tokens=ANSWER_TOKENS, seed=1, stop_token_ids=(3,)),
        )
        await client.generate(request)

    sockets = [await asyncio.open_connection("127.0.0.1", port, limit=1 << 20) for _ in range(IN_FLIGHT)]

    async def bare(number: int) -> None:
        reader, writer = sockets[number % IN_FLIGHT]
        data = orjson.dumps({"token_ids": prompts[size], "max_tokens": 64}, option=orjson.OPT_SERIALIZE_NUMPY)
        writer.write(b"POST %s HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (PATHS[engine].encode(), len(data)) + data)
        head = await reader.readuntil(b"\r\n\r\n")
        orjson.loads(await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0])))

    times_us: dict[str, dict[int, list[float]]] = {name: {size: [] for size in SIZES} for name in ("client", "floor")}
    for repeat in range(repeats + 1):
        for size in SIZES:
            for name, one in (("client", ask), ("floor", bare)):
                us = await cpu_us(one)
                if repeat:
                    times_us[name][size].append(us)
    await client.close()
    for _, writer in sockets:
        writer.close()
    del loop
    medians = {name: {str(n): round(median(values), 1) for n, values in by.items()} for name, by in times_us.items()}
    # Slopes are between runs that are close in time, so that a temporarily slow machine does not distort them.
    thousands = (SIZES[-1] - SIZES[0]) / 1000
    slopes = {
        name: [(b - a) / thousands for a, b in zip(by[SIZES[0]], by[SIZES[-1]], strict=True)]
        for name, by in times_us.items()
    }
    ratio = median(slopes["client"]) / median(slopes["floor"])
    return {**{f"{k}_us": v for k, v in medians.items()}, "slope_ratio": round(ratio, 2)} | {
        f"{name}_slope_us": round(median(values), 2) for name, values in slopes.items()
    }


class _Timed:
    """A tokenizer that measures its time."""

    def __init__(self, of: Any) -> None:
        self._of = of
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._of, name)
        if not callable(method):
            return method

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def measure_turn(engine: str, port: int, repeats: int) -> dict[str, float]:
    """Return the CPU microseconds of a rollout's turn through the client, with and without the tokenizer's time."""
    context = scripted_context(
        [], limits=Limits(max_turns=TURNS), sanity_every=0, interactions={"gsm8k": Gsm8kInteraction({})}
    )
    tokenizers: list[Any] = [_Timed(context.codec._backend), _Timed(context.codec._plain)]
    context.codec._backend, context.codec._plain = tokenizers
    tasks = [task(prompt_of(HISTORY, seed=i), id=f"t{i}", ground_truth="7", interaction="gsm8k") for i in range(8)]

    async def run() -> int:
        context.engine = CLIENTS[engine](f"http://127.0.0.1:{port}", ServedModel(vocab_size=context.codec.vocab_size))
        pool = RolloutPool(context, max_concurrent=64)
        groups = await pool.run(GroupSpec(id=f"g{i}", task=t, size=GROUP_SIZE) for i, t in enumerate(tasks))
        await context.engine.close()
        turns = [len(t.turns) for g in groups for t in g.trajectories]
        assert set(turns) == {TURNS}, groups[0].trajectories[0].error
        return sum(turns)

    whole, own = [], []
    for repeat in range(repeats + 1):
        for one in tokenizers:
            one.seconds = 0.0
        began = time.process_time()
        turns = asyncio.run(run())
        seconds = time.process_time() - began
        if repeat:
            whole.append(1e6 * seconds / turns)
            own.append(1e6 * (seconds - sum(one.seconds for one in tokenizers)) / turns)
    return {"turn_with_tokenizer_us": round(median(whole), 1), "turn_us": round(median(own), 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    result: dict[str, Any] = {"benchmark": "engine_client_cpu", "in_flight": IN_FLIGHT, "answer_tokens": ANSWER_TOKENS}
    for engine in CLIENTS:
        rng = np.random.default_rng(0)
        filler = rng.integers(0, 150_000, ANSWER_TOKENS).tolist()
        for what, ids in (("client", filler), ("turn", turn_ids(ANSWER))):
            bodies = {
                PATHS[engine]: reply_of(engine, [int(i) for i in ids]),
                "/collective_rpc": {"results": [FACTS]},
                "/server_info": FACTS,
                "/health_generate": {},
                "/is_sleeping": {},
            }
            answers = {path.encode(): http(orjson.dumps(body)) for path, body in bodies.items()}
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(
                target=serve, args=(theirs, answers, {cores[-1]}), daemon=True
            )
            process.start()
            port = ours.recv()
            if what == "client":
                result[engine] = asyncio.run(measure_client(engine, port, args.repeats))
            else:
                result[engine] |= measure_turn(engine, port, args.repeats)
            process.kill()
    print(json.dumps(result | {"target_turn_ms": MAX_TURN_MS, "target_slope_ratio": MAX_SLOPE}))


if __name__ == "__main__":
    tiny_codec()
    main()
