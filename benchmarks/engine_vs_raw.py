"""Compares a multi-turn rollout through polyturn with a bare client that replays it. Prints one JSON line.

    python benchmarks/engine_vs_raw.py [--engine vllm] [--repeats 5] [--unpinned]

32 episodes with fixed lengths run at once. One run through polyturn records every request. The bare client then sends the
same bodies with the same HTTP library and flags, in the order of each episode's turns: the next request follows when the
answer has arrived and the tool's wait is over. Decoding is greedy, so that the recorded prompts have the sampled tokens and
both sides find the same prefixes in the server's cache, which is emptied before each run. The server runs on one core, the
client on another (--unpinned: both on all). Runs alternate; the figure is the median ratio of tokens per second of pairs.
Target: 0.95.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import aiohttp
import orjson
from _real_servers import client, server
from _replay import Workload, replay

from polyturn.core.generation import Completion, GenerateRequest
from polyturn.engines.base import EngineWrapper
from polyturn.engines.remote import RemoteEngine

ROLLOUT = Workload(
    tasks=8,
    group=4,
    slots=32,
    prompt_tokens=100,
    turns=4,
    turn_tokens=64,
    task_sigma=0.3,
    turn_sigma=0.3,
    tool_s=0.1,
    tool_sigma=0.3,
    observation_tokens=30,
    seed=3,
)
TARGET = 0.95


class Recorder(EngineWrapper):
    """A client that records its requests and decodes greedily; implements `core.protocols.Engine`."""

    engine: RemoteEngine

    def __init__(self, engine: RemoteEngine) -> None:
        super().__init__(engine)
        self.sent: dict[str, list[tuple[str, bytes]]] = {}

    async def generate(self, request: GenerateRequest) -> Completion:
        sampling = dataclasses.replace(request.sampling, temperature=0.0, seed=None)
        request = dataclasses.replace(request, sampling=sampling)
        call = self.engine._call(request, "WIRE-ID")
        data = orjson.dumps(call.body, option=orjson.OPT_SERIALIZE_NUMPY)
        self.sent.setdefault(request.session_id, []).append((call.path, data))
        return await self.engine.generate(request)


async def through_polyturn(engine: str, url: str) -> tuple[float, dict[str, list[tuple[str, bytes]]]]:
    """Return the seconds of the rollout, and its requests."""
    recorder = Recorder(client(engine, url))
    try:
        await recorder.update_weights(0)  # the current version, so this only empties the cache
        seconds = await replay(ROLLOUT, [recorder])
    finally:
        await recorder.close()
    return seconds, recorder.sent


async def raw(engine: str, url: str, sent: Mapping[str, list[tuple[str, bytes]]], number: int) -> float:
    """Return the seconds of the same requests with a bare client."""
    emptier = client(engine, url)
    await emptier.update_weights(0)
    await emptier.close()
    plans = ROLLOUT.plans()
    wires = [(f"{number:08x}{i:016x}".encode(), name) for i, name in enumerate(sent)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30)) as session:

        async def episode(wire: bytes, name: str) -> None:
            for turn, (path, data) in enumerate(sent[name]):
                body = data.replace(b"WIRE-ID", wire + b"%08x" % turn)
                async with session.post(url + path, data=body, headers={"content-type": "application/json"}) as reply:
                    orjson.loads(await reply.read())
                    assert reply.status == 200, reply.status
                if turn < len(plans[name].waits):
                    await asyncio.sleep(plans[name].waits[turn])

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for wire, name in wires:
                group.create_task(episode(wire, name))
        return time.perf_counter() - began


async def measure(engine: str, repeats: int, *, is_pinned: bool) -> dict[str, Any]:
    """Return the tokens per second of both sides, and the ratio."""
    cores = sorted(os.sched_getaffinity(0))
    if is_pinned:
        os.sched_setaffinity(0, {cores[-1]})
    tokens = sum(sum(plan.lengths) for plan in ROLLOUT.plans().values())
    ours: list[float] = []
    bare: list[float] = []
    async with server(engine, cores={cores[0]} if is_pinned else cores) as url:
        for repeat in range(repeats + 1):
            seconds, sent = await through_polyturn(engine, url)
            other = await raw(engine, url, sent, repeat)
            if repeat:  # the first pair warms up
                ours.append(tokens / seconds)
                bare.append(tokens / other)
    return {
        "benchmark": "engine_vs_raw",
        "engine": engine,
        "pinned": is_pinned,
        "tokens": tokens,
        "polyturn_tokens_per_s": [round(rate) for rate in ours],
        "raw_tokens_per_s": [round(rate) for rate in bare],
        "ratio": round(median(a / b for a, b in zip(ours, bare, strict=True)), 3),
        "target": TARGET,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--unpinned", action="store_true")
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measure(args.engine, args.repeats, is_pinned=not args.unpinned))))
