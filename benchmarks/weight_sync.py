"""Measures a weight sync to two real CPU servers, by each transport, beside a plain broadcast of the same bytes.

    python benchmarks/weight_sync.py [--engine vllm] [--model FOLDER] [--repeats 5] [--transports gloo folder]

The model is SmolLM2-135M in float32, one server on each of two cores. A sync is `EnginePool.update_weights`: pause, send,
load, drop the prefix cache, resume. The plain broadcast sends the same tensors over gloo to two processes that ignore
them. `peak_above_model` is the memory that a server's largest process had during a sync above its size before, as a share of
the model; `two_buckets` is the target. Prints one JSON line with medians. Target: a sync at most 2 times the broadcast.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import psutil
import torch
from _real_servers import CLIENTS, server
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore
from transformers import AutoModelForCausalLM

from polyturn import models
from polyturn.engines.options import ServerOptions
from polyturn.engines.pool import EnginePool
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.weights.folder import WeightFolder
from polyturn.engines.weights.stream import BUCKET_BYTES, streamed
from polyturn.engines.weights.transfer import WeightTransfer

CORES, CONTEXT = (0, 1), 256


def receive(port: int, rank: int, shapes: Sequence[tuple[int, ...]], rounds: int) -> None:
    """Receive tensors of `shapes` `rounds` times, in a process of its own."""
    torch.set_num_threads(1)
    group = ProcessGroupGloo(PrefixStore("plain", TCPStore("127.0.0.1", port, 3, is_master=False)), rank, 3)
    for _ in range(rounds):
        broadcast(group, [torch.empty(shape) for shape in shapes])


def broadcast(group: ProcessGroupGloo, tensors: Sequence[Tensor]) -> None:
    """Send or receive all tensors, started together."""
    options = BroadcastOptions()
    options.rootRank = 0
    for work in [group.broadcast([tensor], options) for tensor in tensors]:
        work.wait()


def plain(weights: Sequence[Tensor], repeats: int) -> list[float]:
    """Return the seconds of plain broadcasts to two processes."""
    store = TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
    shapes = [tuple(tensor.shape) for tensor in weights]
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=receive, args=(store.port, rank, shapes, repeats + 1)) for rank in (1, 2)]
    for worker in workers:
        worker.start()
    group = ProcessGroupGloo(PrefixStore("plain", store), 0, 3)
    times = []
    for _ in range(repeats + 1):
        began = perf_counter()
        broadcast(group, weights)
        times.append(perf_counter() - began)
    for worker in workers:
        worker.join()
    return times[1:]


class Peaks:
    """The largest resident memory of this process's descendants since `reset`, each process by itself."""

    def reset(self) -> None:
        """Forget earlier peaks."""
        self._before = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError, psutil.Error):
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # sets VmHWM to the present size
                self._before[process.pid] = process.memory_info().rss

    def above(self) -> int:
        """Return the largest number of bytes that a process had above its size at `reset`."""
        return max((_peak(pid) - before for pid, before in self._before.items()), default=0)


def _peak(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)


@contextlib.asynccontextmanager
async def pool_of(kind: str, folder: Path, transport: str) -> AsyncIterator[EnginePool]:
    """Start two servers and yield their pool."""
    flag = ("--weight-transfer-config.backend", "gloo") if (kind, transport) == ("vllm", "gloo") else ()
    async with contextlib.AsyncExitStack() as stack:
        starting = [server(kind, cores={core}, args=flag, model=folder, max_context=CONTEXT) for core in CORES]
        urls = [await stack.enter_async_context(one) for one in starting]
        client, options = CLIENTS[kind], ServerOptions(kind=kind)
        model = ServedModel(vocab_size=49152, max_context=CONTEXT, folder=folder)
        transfer = WeightTransfer("gloo", client.open_link) if transport == "gloo" else None
        pool = EnginePool(
            [client(url, model, options=options, transfer=transfer) for url in urls],
            files=transfer or WeightFolder(folder),
            patience_s=60.0,
        )
        try:
            yield pool
        finally:
            await pool.close()


async def synced(kind: str, folder: Path, transport: str, weights: dict[str, Tensor], repeats: int) -> dict[str, Any]:
    """Return seconds and peaks of syncs over one transport."""
    times, above, peaks = [], [], Peaks()
    async with pool_of(kind, folder, transport) as pool:
        for version in range(repeats + 1):
            peaks.reset()
            began = perf_counter()
            await pool.update_weights(version, weights=weights)
            times.append(perf_counter() - began)
            above.append(peaks.above())
    print(kind, transport, [round(t, 2) for t in times], [round(b / 2**20) for b in above], file=sys.stderr)
    return {"seconds": median(times[1:]), "above": median(above[1:])}


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the line."""
    folder = options.model or models.smollm2()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = streamed(model.state_dict())
    size = sum(kind.nbytes for kind in weights.kinds.values())
    line: dict[str, Any] = {"benchmark": "weight_sync", "engine": options.engine, "bytes": size}
    rounds = [median(plain(list(weights.values()), options.repeats))]
    for transport in options.transports:
        line[transport] = await synced(options.engine, folder, transport, dict(weights), options.repeats)
        rounds.append(median(plain(list(weights.values()), options.repeats)))
    base = median(rounds)
    for transport in options.transports:
        sync = line[transport]
        line[transport] = {
            "seconds": round(sync["seconds"], 2),
            "times_broadcast": round(sync["seconds"] / base, 2),
            "peak_above_model": round(sync["above"] / size, 2),
        }
    broadcasts = [round(seconds, 3) for seconds in rounds]
    return {**line, "broadcasts_s": broadcasts, "two_buckets": round(2 * BUCKET_BYTES / size, 2)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(CLIENTS), default="vllm")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--transports", nargs="+", choices=["gloo", "folder"], default=["gloo", "folder"])
    options = parser.parse_args()
    line = asyncio.run(measured(options))
    print(json.dumps({**line, "threads": torch.get_num_threads(), "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
