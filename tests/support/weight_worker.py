"""A server with one worker that joins the trainer's group over gloo and keeps the tensors of an update, in vLLM's calls.

server = await WorkerServer.start(folder, fault="refuses")     a process; faults happen at the second bucket
server.weights()                                               the tensors of the last whole update
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from polyturn.core.errors import EngineError, EngineLostError


class WorkerServer:
    """The client of one such server; a `TransferServer`."""

    num_workers = 1

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.url = "http://127.0.0.1:1"
        self.process = process
        self.hung = folder / "hung"
        """A file that exists once the server hangs."""
        self._weights = folder / "weights.pt"
        self._numbers = itertools.count()
        self._turn = asyncio.Lock()

    @classmethod
    async def start(cls, folder: Path, *, fault: str = "") -> WorkerServer:
        """Start the process; `fault` is "", "dies", "refuses" or "hangs"."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, str(folder), fault),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return cls(process, folder)

    async def tell(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Make one call."""
        assert self.process.stdin is not None and self.process.stdout is not None
        async with self._turn:
            number = next(self._numbers)
            self.process.stdin.write(json.dumps({"number": number, "path": path, "body": body}).encode() + b"\n")
            reply = {"number": -1}
            while reply["number"] != number:  # answers to calls that were given up come first
                line = await self.process.stdout.readline()
                if not line:
                    raise EngineLostError("the server ended the connection")
                reply = json.loads(line)
        if reply["error"]:
            raise EngineError(reply["error"])
        return {}

    async def is_as_left(self) -> bool | None:
        return True if self.process.returncode is None else None

    async def take(self, sent: Any) -> None:
        """Load weights, as the client of a server does."""
        with sent.given_to(self):
            await sent.load(self)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the last whole update."""
        return torch.load(self._weights)

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class Worker:
    """Answers the calls, in the process."""

    def __init__(self, folder: Path, fault: str) -> None:
        folder.mkdir()
        self._folder, self._fault = folder, fault
        self._group: Any = None
        self._came: dict[str, torch.Tensor] = {}
        self._buckets = 0

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        from torch.distributed import PrefixStore, TCPStore
        from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

        self.shutdown_weight_transfer_engine()
        size, name = init_info["world_size"], init_info["group_name"]
        store = PrefixStore(name, TCPStore(init_info["master_address"], init_info["master_port"], size, is_master=False))
        group, _ = _new_process_group_helper(
            size, init_info["rank_offset"], [], Backend("gloo"), store, group_name=name, timeout=timedelta(seconds=120)
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        self._group = group

    def start_weight_update(self) -> None:
        self._came = {}

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        from torch.distributed import BroadcastOptions

        self._buckets += 1
        if self._buckets == 2:
            self._fail()
        for name, shape, dtype in zip(*(update_info[key] for key in ("names", "shapes", "dtype_names")), strict=True):
            self._came[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast([self._came[name]], BroadcastOptions()).wait()

    def finish_weight_update(self) -> None:
        torch.save(self._came, self._folder / "weights.pt")

    def shutdown_weight_transfer_engine(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            torch.distributed.destroy_process_group(group)

    def _fail(self) -> None:
        if self._fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "refuses":
            raise ValueError("no room for this bucket")
        if self._fault == "hangs":
            (self._folder / "hung").touch()
            time.sleep(3600)


def main() -> None:
    worker = Worker(Path(sys.argv[1]), sys.argv[2])
    for line in sys.stdin:
        call, error = json.loads(line), ""
        try:
            getattr(worker, call["path"].removeprefix("/"))(**call["body"])
        except (RuntimeError, ValueError) as problem:
            error = str(problem).splitlines()[0]
        sys.stdout.write(json.dumps({"number": call["number"], "error": error}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
