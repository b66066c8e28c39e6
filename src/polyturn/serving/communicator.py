"""TrainerGroup: a process group between a trainer and a rollout server, through which weights are broadcast.

    server   POST /init_communicator/ {host, port, world_size}   ->  joins as rank 0, and holds the store that both meet at
    trainer  joins as the last rank; for each tensor: POST /update_named_param/ {name, dtype, shape}, then `send`
    server   POST /process_weights_after_loading/                ->  serves what came, as the next version

The group is gloo, over TCP; it stands apart from any other process group of either side. Nothing but tensors of known names
and shapes travels through it, never pickle. Whoever can reach the port could join it, so it belongs on a trusted network.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import ConfigError, EngineError, did_you_mean, one_line

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
            raise EngineError(f"rank {rank} met nobody at {host}:{port} ({one_line(problem)})") from problem
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


class WeightInbox:
    """The server's end: receives announced tensors in order, and hands them over once they are all there."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], load: Callable[[Mapping[str, Tensor]], Awaitable[None]]
    ) -> None:
        """Take what is known of the model, and what serves new weights."""
        self._shapes = shapes
        self._load = load
        self._group: asyncio.Task[TrainerGroup] | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._came: dict[str, Tensor] = {}

    def open(self, host: str, port: int, world_size: int) -> None:
        """Begin to wait for the trainer, in the background: it joins once this request is answered.

        Raises:
            ConfigError: the group has not two members.
        """
        if world_size != 2:
            raise ConfigError(f"world_size is {world_size}; the group has two members, this server and the trainer")
        self._group = asyncio.create_task(
            asyncio.to_thread(TrainerGroup, host, port, rank=0, world_size=world_size), name="polyturn-weight-group"
        )

    def expect(self, tensors: Sequence[Mapping[str, Any]], *, is_flat: bool) -> None:
        """Receive the announced tensors, in the background: each on its own, or all in one run of bytes.

        Raises:
            ConfigError: nobody was asked to join, or the model has no such parameter.
        """
        if self._group is None:
            raise ConfigError("there is no process group; POST /init_communicator/ first")
        for one in tensors:
            name, shape = str(one["name"]), tuple(one["shape"])
            if name not in self._shapes:
                raise ConfigError(f"the model has no parameter {name!r}.{did_you_mean(name, self._shapes)}")
            if shape != self._shapes[name]:
                raise ConfigError(f"{name} is announced with shape {shape}, and the model's is {self._shapes[name]}")
        self._receiving = asyncio.create_task(self._receive(self._receiving, list(tensors), is_flat=is_flat))

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


def flatten(weights: Mapping[str, Tensor]) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return tensors as one run of bytes, and what `/update_flattened_params/` is told about them."""
    import torch

    parts, told, start = [], [], 0
    for name, tensor in weights.items():
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        end = start + data.numel()
        told.append(
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
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8), told


def _dtype(name: str) -> torch.dtype:
    import torch

    known = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}
    short = str(name).removeprefix("torch.")
    if short not in known:
        raise ConfigError(f"weights of type {name!r} cannot be received.{did_you_mean(short, known)}")
    return known[short]
