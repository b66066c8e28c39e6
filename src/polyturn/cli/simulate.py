"""`polyturn simulate`: replay a workload on simulated servers and print what an order of requests makes of it."""

from __future__ import annotations

from pathlib import Path

from polyturn.testing.simulation import Simulated, draw, simulate
from polyturn.testing.workload import Workload


def run(workload: str, *, policies: list[str], replicas: int | None, png: Path | None) -> list[Simulated]:
    """Simulate `workload` under each policy, print a table, draw the timeline of the last."""
    loaded = Workload.load(workload)
    results = [simulate(loaded, policy=policy, replicas=replicas) for policy in policies]
    first = results[0]
    print(f"{first.workload}: {first.episodes} episodes, {first.turns} turns, {first.replicas} servers of {loaded.slots}")
    print(f"lower bound {first.lower_bound_s:.1f} s")
    print(f"{'policy':<14}{'makespan':>9} {'efficiency':>12}{'idle':>7}{'recomputed':>12}{'p50':>10}{'p99':>10} a turn")
    for one in results:
        print(
            f"{one.policy:<14}{one.makespan_s:>8.1f} s{one.efficiency:>12.3f}{one.idle_share:>7.1%}"
            f"{one.recomputed_tokens:>12}{one.latency_p50_s:>8.2f} s{one.latency_p99_s:>8.2f} s"
        )
    if png is not None:
        draw(results[-1], png)
        print(png)
    return results
