"""How near the pool's order comes to the optimum, and what many live episodes cost: both on simulated servers.

    python benchmarks/engine_order.py [--episodes 10000]

Prints a table (every shipped workload, every policy), then one JSON line, with what 10,000 live episodes of 2k tokens
cost in one process: memory and turns per second, of wall clock and of this process's CPU time. The table is the same on
every machine; the rest is this one's.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from polyturn.testing.simulation import ORACLE, simulate
from polyturn.testing.workload import Workload, shipped

POLICIES = ("fifo", "least_loaded", "longest_first", ORACLE)


def order() -> dict[str, float]:
    """Print efficiency per workload and policy as a Markdown table; return the means."""
    print("| workload | bound (s) | fifo | least_loaded | longest_first | oracle | of oracle | against fifo |")
    print("|---|---|---|---|---|---|---|---|")
    gains, shares = [], []
    for name in shipped():
        results = {policy: simulate(Workload.load(name), policy=policy) for policy in POLICIES}
        mine, fifo, known = (results[p].makespan_s for p in ("longest_first", "fifo", ORACLE))
        gains.append(fifo / mine)
        shares.append(known / mine)
        cells = " | ".join(f"{results[p].efficiency:.3f}" for p in POLICIES)
        print(f"| {name} | {results['fifo'].lower_bound_s:.0f} | {cells} | {known / mine:.3f} | {fifo / mine:.3f} |")
    return {"mean_gain_over_fifo": round(sum(gains) / len(gains), 3), "least_share_of_oracle": round(min(shares), 3)}


def live(episodes: int) -> dict[str, float]:
    """Return memory and turns per second of `episodes` that are all live at once."""
    workload = Workload(
        name="live",
        tasks=episodes // 8,
        group=8,
        replicas=8,
        slots=256,
        kv_tokens=10_000_000,
        prompt_tokens=800,
        turns=7,
        turn_tokens=120,
        task_sigma=0.3,
        turn_sigma=0.3,
        tool_s=20.0,
        observation_tokens=40,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, began_cpu = time.perf_counter(), time.process_time()
    result = simulate(workload)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    tokens = 800 + sum(sum(p.lengths) + 40 * len(p.waits) for p in workload.plans().values()) / len(workload.plans())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "episodes": result.episodes,
        "turns": result.turns,
        "mean_tokens_per_episode": round(tokens),
        "seconds": round(seconds, 1),
        "turns_per_s": round(result.turns / seconds),
        "turns_per_cpu_s": round(result.turns / cpu_s),
        "memory_gb": round(peak / 2**20, 2),
        "memory_before_gb": round(before / 2**20, 2),
        "virtual_s": round(result.makespan_s),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    print(json.dumps({"benchmark": "engine_order", **order(), **live(parser.parse_args().episodes)}))
