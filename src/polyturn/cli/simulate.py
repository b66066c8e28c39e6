"""`polyturn simulate`: replay a workload on simulated servers and print what an order of requests makes of it.

polyturn simulate swe_like --policy fifo --policy longest_first
polyturn simulate --fit http://gpu:8000 --engine vllm --out speed.yaml      measures a server that runs
polyturn simulate swe_like --speed speed.yaml                               the same workload at its speed
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean
from polyturn.engines import calibrate as fitting
from polyturn.engines.options import ServerOptions
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.simulated import Speed
from polyturn.engines.vllm import VllmEngine
from polyturn.infra.loop import run_loop
from polyturn.testing.simulation import Simulated, draw, simulate
from polyturn.testing.workload import Workload

CLIENTS: dict[str, type[RemoteEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}


def run(
    workload: str, *, policies: list[str], replicas: int | None, png: Path | None, speed: Path | None = None
) -> list[Simulated]:
    """Simulate `workload` under each policy, print a table, draw the timeline of the last."""
    loaded = Workload.load(workload)
    if speed is not None:
        loaded = dataclasses.replace(loaded, measured=fitting.load(speed))
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
        png.parent.mkdir(parents=True, exist_ok=True)
        draw(results[-1], png)
        print(png)
    return results


def fit(url: str, *, engine: str, out: Path | None, slots: int, vocab_size: int, prompt_tokens: int) -> Speed:
    """Measure a server that runs, print what was found, write it to `out`.

    Raises:
        UnknownNameError: there is no such engine.
        ConfigError: the options do not fit together.
    """
    if engine not in CLIENTS:
        raise UnknownNameError(f"a server of {engine!r} cannot be measured.{did_you_mean(engine, CLIENTS)}")
    if slots < 1 or vocab_size < 2:
        raise ConfigError(f"slots is {slots} and vocab is {vocab_size}; at least 1 and 2 are needed")
    batches = sorted({2**power for power in range(slots.bit_length())} | {slots})

    async def measure() -> Speed:
        client = CLIENTS[engine](
            url, ServedModel(vocab_size=vocab_size), options=ServerOptions(kind="vllm", max_in_flight=slots)
        )
        try:
            return await fitting.fit(client, vocab_size=vocab_size, batches=batches, prompt_tokens=prompt_tokens)
        finally:
            await client.close()

    speed = run_loop(measure())
    print(f"{'requests at once':<18}{'a step':>10}{'tokens/s':>12}")
    for batch, seconds in speed.table:
        print(f"{batch:<18}{1e3 * seconds:>7.2f} ms{batch / max(seconds, 1e-9):>12.0f}")
    print(f"a token of context {1e9 * speed.context_token_s:.1f} ns a step")
    print(f"a prompt token {1e6 * speed.prefill_token_s:.1f} us, a request {1e3 * speed.request_s:.2f} ms")
    print("prefixes of earlier turns are " + ("kept" if speed.prefix_cache else "computed again every turn"))
    if out is not None:
        fitting.save(speed, out)
        print(out)
    return speed
