"""WeightGroup: a process group of this process (rank 0) and the workers of all servers, for broadcasts of weights.
GroupLink: sends weights over it in buckets, each with a call that makes the servers receive it.

    trainer 0  --- broadcast --->  worker 1, worker 2, …          gloo between processors, nccl between GPUs

The group is separate from training's groups: no global state is set, and a server that dies ends only this group. SGLang's
workers make their end with the same torch helper, and vLLM's by our backend for gloo (`server_side/polyturn_vllm_gloo.py`):
names and stores must match. For nccl and ipc, vLLM requires its own code at the trainer's end (`vllm_transfer.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from polyturn.core.errors import EngineError, EngineLostError, one_line
from polyturn.engines.weight_transfer import TransferServer, on_all
from polyturn.engines.weight_transport import Transport, address_towards, buckets, untied
from polyturn.infra.aio import OneThread

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_TIMEOUT = timedelta(seconds=120)


class WeightGroup:
    """This process's end of a group."""

    def __init__(self, urls: Sequence[str], *, name: str, backend: str, size: int) -> None:
        """Open the store at which the servers' workers join; `name` must be new to them.

        Raises:
            EngineError: this process does not support the backend.
        """
        from torch.distributed import TCPStore

        self.name = name
        self.backend = backend
        self.size = size
        self.host = address_towards(urls)
        self._device = _device(backend)
        self._store = TCPStore(self.host, 0, self.size, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        self.port = self._store.port
        self._group: Any = None
        self._thread = OneThread("polyturn-weight-group")
        """A daemon thread, so that waiting for a dead server does not delay the end."""

    async def join(self, theirs: Awaitable[Any]) -> None:
        """Make the group; `theirs` is the call that makes the servers join.

        Raises:
            EngineLostError: the group could not be made.
            EngineError: raised by a server.
        """
        await self._together(self._join, theirs)

    async def broadcast(self, tensors: Sequence[Tensor], theirs: Awaitable[Any]) -> None:
        """Send `tensors`; `theirs` is the call that makes the servers receive them.

        Raises:
            EngineLostError: not all tensors arrived.
            EngineError: raised by a server.
        """
        await self._together(lambda: self._broadcast(tensors), theirs)

    async def _together(self, ours: Any, theirs: Awaitable[Any]) -> None:
        """Run both ends concurrently; if `theirs` fails, do not wait for `ours`, which ends by its time limit."""
        own = self._thread.submit(ours)
        other = asyncio.ensure_future(theirs)
        await asyncio.wait({own, other}, return_when=asyncio.FIRST_EXCEPTION)
        if other.done() and (problem := other.exception()) is not None:
            own.cancel()
            raise problem
        try:
            await own
        except (RuntimeError, ValueError) as failed:
            other.cancel()
            raise EngineLostError(f"the {self.backend} group with the servers broke ({one_line(failed)})") from failed
        await other

    def _join(self) -> None:
        import torch
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        store = PrefixStore(self.name, self._store)
        self._group, _ = _new_process_group_helper(
            self.size, 0, [], Backend(self.backend), store, group_name=GroupName(self.name), timeout=_TIMEOUT
        )
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(self.size)}

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        import torch
        from torch.distributed import BroadcastOptions

        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # per thread; a new thread starts at the first GPU
        options = BroadcastOptions()
        options.rootRank = 0
        sent = [tensor.to(self._device).contiguous() for tensor in tensors]
        for work in [self._group.broadcast([tensor], options) for tensor in sent]:
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # before the optimizer changes the tensors

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            from torch.distributed import destroy_process_group

            group, self._group = self._group, None
            destroy_process_group(group)


class GroupLink(ABC):
    """The trainer's end of a transfer by broadcasts; implements `TransferLink`. Subclasses make the calls to the servers."""

    def __init__(self, servers: Sequence[TransferServer], group: WeightGroup) -> None:
        self._servers = servers
        self._group = group

    @classmethod
    async def open(cls, transport: Transport, servers: Sequence[TransferServer]) -> Self:
        """Make the group with the servers' workers.

        Raises:
            EngineLostError: the group could not be made.
            EngineError: a server refused.
        """
        offsets, offset = {}, 1
        for server in servers:
            offsets[server] = offset
            offset += server.num_workers
        name = f"polyturn-{uuid.uuid4().hex[:8]}"
        link = cls(servers, WeightGroup([server.url for server in servers], name=name, backend=transport, size=offset))
        await link._group.join(on_all(servers, lambda server: link._join(server, offsets[server])))
        return link

    async def send(self, weights: Mapping[str, Tensor]) -> None:
        """Send the weights in buckets.

        Raises:
            EngineLostError: a server did not answer, or the group broke.
            EngineError: a server refused.
        """
        await self._begin()
        try:
            pieces = iter(buckets(untied(weights)))
            while (bucket := await asyncio.to_thread(next, pieces, None)) is not None:
                await self._give(bucket)
        except BaseException:
            with contextlib.suppress(EngineError):  # an open update would refuse the next weights, or end the server
                await self._end()
            raise
        await self._end()

    async def close(self) -> None:
        """Leave the group."""
        self._group.close()
        await self._leave()

    async def _give(self, bucket: Mapping[str, Tensor]) -> None:
        kinds = {
            "names": list(bucket),
            "shapes": [list(tensor.shape) for tensor in bucket.values()],
        }
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()]
        await self._group.broadcast(list(bucket.values()), self._receive(kinds, dtypes))

    async def _all(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        await on_all(self._servers, lambda server: server.tell(path, body or {}))

    # The calls of a kind of server.

    @abstractmethod
    async def _join(self, server: TransferServer, rank_offset: int) -> Any: ...

    @abstractmethod
    async def _begin(self) -> None: ...

    @abstractmethod
    async def _receive(self, kinds: dict[str, Any], dtypes: list[str]) -> None: ...

    @abstractmethod
    async def _end(self) -> None: ...

    @abstractmethod
    async def _leave(self) -> None: ...


def _device(backend: str) -> torch.device:
    """Return the device of tensors at this process's end of a group.

    Raises:
        EngineError: this process has no GPU, or a torch without nccl.
    """
    import torch
    from torch.distributed import is_nccl_available

    if backend != "nccl":
        return torch.device("cpu")
    if not torch.cuda.is_available() or not is_nccl_available():
        raise EngineError("a group over nccl needs a GPU and a torch built with nccl here; set engine.weights to gloo")
    return torch.device("cuda", torch.cuda.current_device())
