"""Compares turns per second with episodes in this process, in one worker, and in two. Prints one JSON line.

    python benchmarks/rollout_workers.py [--repeats 3] [--tool-ms 2] [--servers 0]

The scripted engine of `rollout_loop.py` runs in this process, like a run's engine; tools, encoding, parsing and rewards run
in the workers (`cluster.workers.count`). Each turn calls a tool that computes in Python for `--tool-ms`. The three settings
alternate. The important figures are their ratio and this process's CPU seconds per turn, whose inverse is the limit for any
number of workers.

With `--servers N`, N HTTP servers answer as vLLM does. Two workers send their requests once directly, and once through this
process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import cloudpickle
from rollout_loop import CALL, GROUP_SIZE, GROUPS, HISTORY, TURNS, context_of, prompt_of

from polyturn.cluster.journal import WorkerJournal
from polyturn.cluster.worker_pool import WorkerPool
from polyturn.cluster.worker_process import ProcessWorker
from polyturn.core.protocols import Engine
from polyturn.engines.following import FollowingPool
from polyturn.engines.pool import EnginePool
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.vllm import VllmEngine
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.testing.episodes import task, tiny_codec, turn_ids
from polyturn.tools.gsm8k import Gsm8kTool

CONCURRENT = 64
SERVE = """
import sys
from aiohttp import web

model = {"logprobs_mode": "processed_logprobs", "max_model_len": 1 << 20}
facts = {
    "vllm_config": {"model_config": model, "aux_output_config": {"enable_return_routed_experts": False}},
    "world_size": 1,
    "version": sys.argv[1],
}

async def generate(request):
    await request.read()
    return web.Response(text=sys.argv[2], content_type="application/json")

async def others(request):
    return web.json_response(facts)

async def serve():
    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_route("*", "/{path:.*}", others)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

import asyncio
asyncio.run(serve())
"""


class SlowTool(Gsm8kTool):
    """A tool that computes before it answers."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Compute for some milliseconds, like a parser or a simulator."""
        until = time.thread_time() + self.config["ms"] / 1000
        while time.thread_time() < until:
            sum(range(100))
        return await super().execute(instance_id, parameters, **kwargs)


def context(tool_ms: float) -> RolloutContext:
    """Return the context of episodes with the tool."""
    return context_of(CALL, tools=[SlowTool({"ms": tool_ms})])


def build(tool_ms: float, num_servers: int, journal: WorkerJournal, engine: Engine | None) -> RolloutPool:
    """Build a worker's pool, in its process; without `engine` it sends requests to servers."""
    rollout_context = context(tool_ms)
    rollout_context.engine = engine or FollowingPool(clients([""] * num_servers))
    return RolloutPool(rollout_context, max_concurrent=CONCURRENT)


def clients(urls: Sequence[str]) -> list[VllmEngine]:
    """Return clients of servers."""
    return [VllmEngine(url, ServedModel(vocab_size=len(tiny_codec().tokenizer))) for url in urls]


@contextlib.contextmanager
def servers(count: int) -> Iterator[list[str]]:
    """Start servers that always answer with the tool call, and yield their addresses."""
    ids = [int(token) for token in turn_ids(CALL)]
    spans, logprobs = [{"start": 0, "version": "default"}], {"content": [{"logprob": -1.0}] * len(ids)}
    choice = {"token_ids": ids, "logprobs": logprobs, "weight_versions": spans, "finish_reason": "stop"}
    reply = json.dumps({"choices": [choice], "usage": None})
    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(count):
            command = [sys.executable, "-c", SERVE, VllmEngine.tested_version, reply]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            urls.append(f"http://127.0.0.1:{int(process.stdout.readline())}")
        yield urls


async def turns(pool: RolloutPool) -> int:
    """Run all groups once and return their number of turns."""
    specs = [
        GroupSpec(id=f"g{i}", task=task(prompt_of(HISTORY, seed=i), id=f"t{i}"), size=GROUP_SIZE) for i in range(GROUPS)
    ]
    trajectories = [t for group in await pool.run(specs) for t in group.trajectories]
    assert all(len(t.turns) == TURNS and t.error is None for t in trajectories)
    return sum(len(t.turns) for t in trajectories)


async def measure(repeats: int, tool_ms: float, urls: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return, for each setting, the median turns per second and CPU milliseconds per turn of this process."""
    # The functions of this file are pickled by value, because workers cannot import it.
    here, builder = context(tool_ms), cloudpickle.dumps(partial(build, tool_ms, len(urls)))
    engines = EnginePool(clients(urls)) if urls else None
    here.engine = engines or here.engine
    pools: dict[str, RolloutPool] = {"here": RolloutPool(here, max_concurrent=CONCURRENT)}
    through_here = {f"workers: {count}": (count, here.engine) for count in (1, 2)}
    settings = {**through_here, "workers: 2, directly": (2, None)} if urls else through_here
    for name, (count, engine) in settings.items():
        workers = [ProcessWorker(f"worker {n} of {name}", builder, engine) for n in range(count)]
        pools[name] = WorkerPool(
            workers, here, max_concurrent=CONCURRENT, max_failed_share=1, engines=None if engine else engines
        )
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in pools}
    for repeat in range(repeats + 1):  # the first starts the workers
        for name, pool in pools.items():
            wall, cpu = time.perf_counter(), time.process_time()
            count = await turns(pool)
            if repeat:
                figures[name].append((count / (time.perf_counter() - wall), 1000 * (time.process_time() - cpu) / count))
    for pool in pools.values():
        if isinstance(pool, WorkerPool):
            await pool.close()
    middle: Callable[[list[tuple[float, float]], int], float] = lambda values, i: median(v[i] for v in values)  # noqa: E731
    return {name: (middle(values, 0), middle(values, 1)) for name, values in figures.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tool-ms", type=float, default=2.0)
    parser.add_argument("--servers", type=int, default=0)
    args = parser.parse_args()
    with servers(args.servers) as urls:
        figures = asyncio.run(measure(args.repeats, args.tool_ms, urls))
    here = figures["here"][0]
    result = {
        "benchmark": "rollout_workers",
        "tool_ms": args.tool_ms,
        "servers": args.servers,
        "turns_per_s": {name: round(rate) for name, (rate, _) in figures.items()},
        "times_one_process": {name: round(rate / here, 2) for name, (rate, _) in figures.items()},
        "leader_cpu_ms_per_turn": {name: round(cpu, 3) for name, (_, cpu) in figures.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
