"""TrainerGroup: a process group between a trainer and a rollout server, through which weights are broadcast.

    server   POST /init_communicator/ {host, port, world_size}   ->  joins as rank 0, and holds the store that both meet at
    trainer  joins as the last rank; for each tensor: POST /update_named_param/ {name, dtype, shape}, then `send`
    server   POST /process_weights_after_loading/                ->  serves what came, as the next version

The group is gloo, over TCP; it stands apart from any other process group of either side. Nothing but tensors of known names
and shapes travels through it, never pickle. Any client of the port could join it, so it belongs on a trusted network.
"""

from __future__ import annotations

import asyncio
import datetime
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import ConfigError, EngineError, did_you_mean, one_line

MAX_WAITING = 4
"""Groups that wait for their trainer at one moment."""

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TrainerGroup:
    """One side of the group; making it waits for the other."""

    def __init__(self, host: str, port: int, *, rank: int, world_size: int, timeout_s: float = 120.0) -> None:
        """Meet the others at `host:port`, where rank 0 listens.

        Raises:
            EngineError: they do not come in time.
        """
        import torch.distributed as dist

        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            store = dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=timeout)
            self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world_size, timeout)
        except RuntimeError as problem:
            raise EngineError(f"rank {rank} met no other rank at {host}:{port} ({one_line(problem)})") from problem
        self._store = store
        self._root = world_size - 1

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Send `tensor` if this is the last rank, the trainer's; else fill it. Blocks until it is through.

        Raises:
            EngineError: the other side is gone.
        """
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = self._root
        try:
            self._group.broadcast([tensor], options).wait()
        except RuntimeError as problem:
            raise EngineError(f"the process group with the trainer broke ({one_line(problem)})") from problem
        return tensor


class WeightReceiver:
    """The server's end: receives announced tensors in order, and hands them over once they are all there."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        load: Callable[[Mapping[str, Tensor]], Awaitable[None]],
        *,
        is_loopback: bool = False,
    ) -> None:
        """Take what is known of the model, and what serves new weights.

        Args:
            shapes: Of the model's parameters, by name.
            load: Serves tensors.
            is_loopback: Listen for the trainer on this machine's own address only, whatever a request says.
        """
        self._shapes = shapes
        self._load = load
        self._is_loopback = is_loopback
        self._waiting: set[asyncio.Task[TrainerGroup]] = set()
        self._group: asyncio.Task[TrainerGroup] | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._came: dict[str, Tensor] = {}

    def open(self, host: Any, port: Any, world_size: Any) -> None:
        """Begin to wait for the trainer, in the background: it joins once this request is answered.

        Raises:
            ConfigError: the group has not two members, or this machine would listen where the server does not.
        """
        if world_size != 2:
            raise ConfigError(f"world_size is {world_size!r:.50}; the group has two members, this server and the trainer")
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            raise ConfigError(f"port is {port!r:.50}; it is a number from 1 to 65535")
        if not isinstance(host, str) or not host:
            raise ConfigError(f"host is {host!r:.50}; it is an address of this machine")
        if len(self._waiting) >= MAX_WAITING:
            raise ConfigError(f"{len(self._waiting)} groups wait for their trainer already; let it join one of them")
        self._group = asyncio.create_task(
            asyncio.to_thread(TrainerGroup, "127.0.0.1" if self._is_loopback else host, port, rank=0, world_size=world_size),
            name="polyturn-weight-group",
        )
        self._waiting.add(self._group)
        self._group.add_done_callback(self._waiting.discard)

    def expect(self, tensors: Any, *, is_flat: bool) -> None:
        """Receive the announced tensors, in the background: each on its own, or all in one run of bytes.

        Raises:
            ConfigError: no rank was asked to join, or the model has no such parameter.
        """
        if self._group is None:
            raise ConfigError("there is no process group; POST /init_communicator/ first")
        if not isinstance(tensors, list) or not all(isinstance(one, dict) for one in tensors):
            raise ConfigError(f"the announced tensors are {tensors!r:.100}; give a list of objects")
        wanted = ("name", "shape", "dtype", *(("start_idx", "end_idx") if is_flat else ()))
        for one in tensors:
            lacking = [key for key in wanted if key not in one]
            if lacking or not isinstance(one["shape"], list):
                raise ConfigError(
                    f"a tensor is announced as {one!r:.200}; it needs {', '.join(wanted)}, the shape as a list"
                )
            name, shape = str(one["name"]), tuple(one["shape"])
            if name not in self._shapes:
                raise ConfigError(f"the model has no parameter {name!r}.{did_you_mean(name, self._shapes)}")
            if shape != self._shapes[name]:
                raise ConfigError(f"{name} is announced with shape {shape!r:.100}, and the model's is {self._shapes[name]}")
            size = math.prod(shape) * _dtype(one["dtype"]).itemsize
            if is_flat and not _is_run(one["start_idx"], one["end_idx"], size=size, most=self._num_bytes()):
                raise ConfigError(
                    f"{name} has {size} bytes and is announced at {one['start_idx']!r:.40} to {one['end_idx']!r:.40}"
                )
        self._receiving = asyncio.create_task(self._receive(self._receiving, list(tensors), is_flat=is_flat))

    def _num_bytes(self) -> int:
        """Return more bytes than all parameters have, of whatever type."""
        return 8 * sum(math.prod(shape) for shape in self._shapes.values())

    async def settle(self) -> int:
        """Wait for what was announced, serve it, and return how many tensors came.

        Raises:
            EngineError: the trainer never joined, or is gone.
        """
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            await receiving
        came, self._came = self._came, {}
        if came:
            await self._load(came)
        return len(came)

    def close(self) -> None:
        """Leave the group."""
        self._group = None

    async def _receive(self, before: asyncio.Task[None] | None, tensors: list[Mapping[str, Any]], *, is_flat: bool) -> None:
        import torch

        assert self._group is not None
        group = await self._group
        if before is not None:
            await before
        if not is_flat:
            for one in tensors:
                blank = torch.empty(tuple(one["shape"]), dtype=_dtype(one["dtype"]))
                self._came[str(one["name"])] = await asyncio.to_thread(group.broadcast, blank)
            return
        size = max((int(one["end_idx"]) for one in tensors), default=0)
        data = await asyncio.to_thread(group.broadcast, torch.empty(size, dtype=torch.uint8))
        for one in tensors:
            part = data[int(one["start_idx"]) : int(one["end_idx"])].clone()
            self._came[str(one["name"])] = part.view(_dtype(one["dtype"])).reshape(tuple(one["shape"]))


def _is_run(start: Any, end: Any, *, size: int, most: int) -> bool:
    """Return whether these are the first and the last byte, less one, of so many bytes."""
    are_numbers = all(isinstance(n, int) and not isinstance(n, bool) for n in (start, end))
    return are_numbers and 0 <= start <= end <= most and end - start == size


def flatten(weights: Mapping[str, Tensor]) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return tensors as one run of bytes, and what `/update_flattened_params/` is told about them."""
    import torch

    parts, spans, start = [], [], 0
    for name, tensor in weights.items():
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        end = start + data.numel()
        spans.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype),
                "start_idx": start,
                "end_idx": end,
                "numel": tensor.numel(),
            }
        )
        parts.append(data)
        start = end
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8), spans


def _dtype(name: str) -> torch.dtype:
    import torch

    known = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}
    short = str(name).removeprefix("torch.")
    if short not in known:
        raise ConfigError(f"weights of type {name!r} cannot be received.{did_you_mean(short, known)}")
    return known[short]
