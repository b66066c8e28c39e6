"""How well does the simulator, fitted to a real server, predict how long a rollout takes there? Prints one JSON line.

    python benchmarks/simulator_prediction.py [--engine vllm] [--repeats 5] [--policy longest_first]

The server is measured (`polyturn simulate --fit` does the same), then workload A runs on it: real pool, real episodes,
real time. The ratio of A's real to its simulated makespan corrects the simulator once (`scale`: longer contexts, our own
process). Then workload B, with other lengths, more turns and other waits, is predicted and run. Runs of A and B alternate;
makespans are medians. The target is an error of 15 % at most; where the real runs of B spread by more than 10 % (largest
less smallest, over the median) the machine was too busy to tell, and the result says "inconclusive".
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
from statistics import median
from typing import Any

from _real_servers import VOCAB, client, server
from _replay import replay

from polyturn.engines.calibrate import fit
from polyturn.testing.simulation import simulate
from polyturn.testing.workload import Workload

A = Workload(
    name="A",
    tasks=8,
    group=4,
    replicas=1,
    slots=16,
    kv_tokens=100_000,
    prompt_tokens=60,
    turns=3,
    turn_tokens=80,
    task_sigma=0.4,
    turn_sigma=0.4,
    tool_s=0.3,
    observation_tokens=20,
    seed=1,
)
B = Workload(
    name="B",
    tasks=12,
    group=4,
    replicas=1,
    slots=16,
    kv_tokens=100_000,
    prompt_tokens=120,
    turns=5,
    turn_tokens=50,
    task_sigma=0.7,
    turn_sigma=0.5,
    tool_s=0.8,
    tool_sigma=0.5,
    observation_tokens=40,
    seed=2,
)
TARGET, MAX_SPREAD = 0.15, 0.10


async def measure(engine: str, policy: str, repeats: int) -> dict[str, Any]:
    """Return what was measured and predicted."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    real: dict[str, list[float]] = {"A": [], "B": []}
    async with server(engine, cores={cores[0]}) as url:

        async def once(workload: Workload) -> float:
            asked = client(engine, url)
            try:
                return (await replay(workload, [asked], policy=policy)).makespan_s
            finally:
                await asked.close()

        fitting = client(engine, url)
        speed = await fit(fitting, vocab_size=VOCAB, batches=(1, 2, 4, 8, 12, 16), prompt_tokens=200)
        await fitting.close()
        await once(A)  # warms up
        for _ in range(repeats):
            for workload in (A, B):
                real[workload.name].append(await once(workload))
    return {"speed": dataclasses.asdict(speed), "real": real}


def main() -> None:
    """Measure, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policy", default="longest_first")
    args = parser.parse_args()
    found = asyncio.run(measure(args.engine, args.policy, args.repeats))
    from polyturn.engines.simulated import Speed

    speed, real = Speed(**found["speed"]), found["real"]
    simulated = {w.name: simulate(dataclasses.replace(w, measured=speed), policy=args.policy).makespan_s for w in (A, B)}
    scale = median(real["A"]) / simulated["A"]
    predicted = scale * simulated["B"]
    spread = (max(real["B"]) - min(real["B"])) / median(real["B"])
    error = predicted / median(real["B"]) - 1
    verdict = "inconclusive" if spread > MAX_SPREAD else "met" if abs(error) <= TARGET else "missed"
    result = {
        "benchmark": "simulator_prediction",
        "engine": args.engine,
        "tau_ms": {str(b): round(1e3 * s, 2) for b, s in speed.table},
        "context_token_ns": round(1e9 * speed.context_token_s, 1),
        "prefill_token_us": round(1e6 * speed.prefill_token_s, 2),
        "request_ms": round(1e3 * speed.request_s, 2),
        "prefix_cache": speed.prefix_cache,
        "cache_block": speed.cache_block,
        "real_a_s": [round(s, 2) for s in real["A"]],
        "real_b_s": [round(s, 2) for s in real["B"]],
        "simulated_a_s": round(simulated["A"], 2),
        "simulated_b_s": round(simulated["B"], 2),
        "scale": round(scale, 3),
        "predicted_b_s": round(predicted, 2),
        "error": round(error, 3),
        "error_without_scale": round(simulated["B"] / median(real["B"]) - 1, 3),
        "spread_b": round(spread, 3),
        "verdict": verdict,
        "target": TARGET,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
