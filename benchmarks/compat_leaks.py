"""Instances left after 10,000 episodes with errors, time-outs and cancellations mixed in: should be 0.

The shipped tools and interactions, a tool and a partner that raise and hang, a real search server, cancellations from
outside. Also how many episodes of that kind a second takes, and what stays in memory.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import time

from support.leaks import count_leaks

NUM_EPISODES = 10_000


def main() -> None:
    """Run the episodes and print one JSON line."""
    logging.disable(logging.WARNING)
    asyncio.run(count_leaks(200, seed=1))
    gc.collect()
    before, tasks = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    report = asyncio.run(count_leaks(NUM_EPISODES, seed=0, max_concurrent=128))
    seconds = time.perf_counter() - tasks
    print(f"{report.num_episodes} episodes ended: {report.ends}; left: {report.left or 'nothing'}")
    print(
        json.dumps(
            {
                "episodes": report.num_episodes,
                "instances_left": report.num_left,
                "ends": report.ends,
                "episodes_per_s": round(report.num_episodes / seconds, 1),
                "peak_memory_growth_mib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
