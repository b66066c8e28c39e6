"""How near the pool's order comes to the optimum, and what many live episodes cost: both on simulated servers.

    python benchmarks/engine_order.py [--episodes 10000] [--rounds 1] [--only order|live]

Prints two tables (every shipped workload, every policy; then the same with 16 slots a server, where episodes wait more),
then one JSON line, with what 10,000 live episodes of 2k tokens cost in one process: memory and turns per second, of wall
clock and of this process's CPU time. The tables are the same on every machine; the rest is this one's. "At most" is what an
order that reached the bound would gain over fifo.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import time
from pathlib import Path
from statistics import mean
from typing import Any

from polyturn.testing.simulation import ORACLE, simulate
from polyturn.testing.workload import Workload, shipped

POLICIES = ("fifo", "least_loaded", "longest_first", ORACLE)


def order(slots: int | None = None) -> dict[str, float]:
    """Print efficiency per workload and policy as a Markdown table; return the means.

    Args:
        slots: Of each server, instead of the workload's own: fewer make episodes wait more.
    """
    print(f"slots of a server: {slots or 'as in the workload'}\n")
    print("| workload | bound (s) | fifo | least_loaded | longest_first | oracle | of oracle | against fifo | at most |")
    print("|---|---|---|---|---|---|---|---|---|")
    gains, shares, known_gains, most = [], [], [], []
    for name in shipped():
        workload = Workload.load(name)
        workload = dataclasses.replace(workload, slots=slots or workload.slots)
        results = {policy: simulate(workload, policy=policy) for policy in POLICIES}
        mine, fifo, known = (results[p].makespan_s for p in ("longest_first", "fifo", ORACLE))
        gains.append(fifo / mine)
        known_gains.append(fifo / known)
        shares.append(known / mine)
        most.append(1 / results["fifo"].efficiency)
        cells = " | ".join(f"{results[p].efficiency:.3f}" for p in POLICIES)
        print(
            f"| {name} | {results['fifo'].lower_bound_s:.0f} | {cells} | {known / mine:.3f} | {fifo / mine:.3f} | "
            f"{most[-1]:.3f} |"
        )
    print()
    return {
        "mean_gain_over_fifo": round(mean(gains), 3),
        "mean_gain_of_oracle": round(mean(known_gains), 3),
        "mean_gain_at_the_bound": round(mean(most), 3),
        "least_share_of_oracle": round(min(shares), 3),
    }


def resident_gb() -> float:
    """Return the memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**30


def live(episodes: int, rounds: int = 1) -> dict[str, Any]:
    """Return memory and turns per second of `episodes` that are all live at once, as often as `rounds` says."""
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
    held: list[float] = []
    ends: list[float] = []

    def on_round(number: int) -> None:
        held.append(round(resident_gb(), 3))
        ends.append(time.perf_counter())

    result = simulate(workload, rounds=rounds, on_round=on_round)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    tokens = 800 + sum(sum(p.lengths) + 40 * len(p.waits) for p in workload.plans().values()) / len(workload.plans())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "episodes": result.episodes,
        "turns": result.turns * rounds,
        "mean_tokens_per_episode": round(tokens),
        "seconds": round(seconds, 1),
        "turns_per_s": round(result.turns * rounds / seconds),
        "turns_per_cpu_s": round(result.turns * rounds / cpu_s),
        "memory_gb": round(peak / 2**20, 2),
        "memory_before_gb": round(before / 2**20, 2),
        "memory_after_each_round_gb": held,
        "seconds_of_each_round": [round(b - a, 1) for a, b in zip([began, *ends], ends, strict=False)],
        "virtual_s": round(result.makespan_s),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=1, help="15 rounds of 10,000 episodes are a million turns")
    parser.add_argument("--only", choices=["order", "live"], help="leave the other half out")
    args = parser.parse_args()
    found: dict[str, Any] = {"benchmark": "engine_order"}
    if args.only != "live":
        found |= order()
        found |= {f"few_slots_{name}": value for name, value in order(slots=16).items()}
    if args.only != "order":
        found |= live(args.episodes, args.rounds)
    print(json.dumps(found))
