"""Broadcasts of weights to the workers of all servers. The calls to servers and the process group may be in two processes.

    controller   GroupLink    calls the servers: join, begin, receive these tensors, finish
    trainer      GroupEnd     is rank 0 of a process group with the servers' workers: joins it, broadcasts a bucket
                   |
                   `--- broadcast --->  worker 1, worker 2, …          gloo between processors, nccl between GPUs

The trainer is the process with the tensors: rank 0, which gathers a bucket from all ranks, or the controller itself if it
trains alone. Tensors leave it only for the servers; the controller knows their names and shapes.

No call of a `GroupEnd` waits for a server: it works in a thread, and `is_done` tells the controller whether it has finished.
So the controller can break off a broadcast that a server will not receive, and a rank always answers its next command.

The group is separate from training's groups: no global state is set, and a server that dies ends only this group. SGLang's
workers make their end with the same torch helper, and vLLM's by our backend for gloo (`server_side/polyturn_vllm_gloo.py`):
names and stores must match. For nccl, vLLM requires its own communicator at the trainer's end (`weights/vllm.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from polyturn.core.errors import EngineError, EngineLostError, PolyturnError, one_line
from polyturn.engines.weights.stream import (
    StreamedTensors,
    TensorKind,
    Transport,
    UseThere,
    address_towards,
    streamed,
)
from polyturn.engines.weights.transfer import SETTLE_S, TransferServer, on_all
from polyturn.infra.aio import first_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_TIMEOUT = timedelta(seconds=120)
_POLL_S = 1.0
"""Longest time for which `is_done` waits."""


class WeightGroupSpec(NamedTuple):
    """A process group to make."""

    kind: type[WeightGroup]
    urls: Sequence[str]
    name: str
    """A name that is new to the servers."""
    backend: str
    size: int
    """Number of processes: the trainer's and all workers."""


class WeightGroup:
    """The trainer's membership of one group. A thread joins and sends; a thread that waits for a dead server does not delay
    the end of the process."""

    def __init__(self, spec: WeightGroupSpec) -> None:
        """Open the store at which the servers' workers join, and start to join.

        Raises:
            EngineError: this process does not support the backend, or has no address towards the servers.
        """
        self.spec = spec
        self.device = _device(spec.backend)
        try:
            self.host = address_towards(spec.urls)
            self.port = self._open_store()
        except (OSError, RuntimeError) as problem:  # in a rank, any error but a `PolyturnError` would end the rank
            raise EngineError(
                f"the trainer's machine has no address towards the servers {', '.join(spec.urls)} ({one_line(problem)}); "
                "name them in engine.urls as that machine knows them, or set engine.weights: folder, with an "
                "engine.weights_folder that both see"
            ) from problem
        self._group: Any = None
        self._is_closed = False
        self._start(self._join)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Start to send `tensors`, after the previous work is done."""
        sent = [tensor.to(self.device).contiguous() for tensor in tensors]
        self._start(functools.partial(self._send, sent))

    def is_done(self) -> bool:
        """Return whether the work that was started last is done, after waiting for it for a moment.

        Raises:
            EngineLostError: the group could not be made, or not all tensors were sent.
        """
        if not self._ended.wait(_POLL_S):
            return False
        if self._problems:
            raise EngineLostError(f"the {self.spec.backend} group with the servers broke ({self._problems[0]})")
        return True

    def close(self) -> None:
        """Leave the group.

        Work that is not done is broken off over nccl. Over gloo it ends by its time limit, and its thread leaves the group.
        """
        self._is_closed = True
        if not self._ended.is_set() and self._group is not None:
            self._abort(self._group)
        if self._ended.is_set():
            self._leave()

    def _start(self, work: Callable[[], None]) -> None:
        self._ended, self._problems = threading.Event(), list[str]()
        thread = threading.Thread(
            target=self._run, args=(work, self._ended, self._problems), name="polyturn-weight-group", daemon=True
        )
        thread.start()

    def _run(self, work: Callable[[], None], ended: threading.Event, problems: list[str]) -> None:
        import torch

        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # per thread; a new thread starts at the first GPU
            work()
        except Exception as failed:
            problems.append(one_line(failed))  # not the error itself: its traceback would keep the connections open
        finally:
            ended.set()
        if self._is_closed:
            self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._destroy(group)

    # The library of the group.

    def _open_store(self) -> int:
        """Open the store on `host`, and return its port."""
        from torch.distributed import TCPStore

        self._store = TCPStore(self.host, 0, self.spec.size, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        return int(self._store.port)

    def _join(self) -> None:
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

        name, size = self.spec.name, self.spec.size
        group, _ = _new_process_group_helper(
            *(size, 0, [], Backend(self.spec.backend), PrefixStore(name, self._store)),
            group_name=GroupName(name),
            timeout=_TIMEOUT,
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        self._group = group

    def _send(self, tensors: Sequence[Tensor]) -> None:
        import torch
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
            work.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # before the optimizer changes the tensors

    def _abort(self, group: Any) -> None:
        group.abort()

    def _destroy(self, group: Any) -> None:
        from torch.distributed import destroy_process_group

        destroy_process_group(group)


class GroupEnd:
    """The trainer's end of a transfer, which outlives its groups: a new group replaces the former one."""

    def __init__(self) -> None:
        self._group: WeightGroup | None = None

    def open(self, spec: WeightGroupSpec) -> tuple[str, int]:
        """Start to join a new group, and return the host and port at which the servers join.

        Raises:
            EngineError: this process does not support the backend, or has no address towards the servers.
        """
        self.close()
        self._group = spec.kind(spec)
        return self._group.host, self._group.port

    def broadcast(self, names: Sequence[str], bucket: Mapping[str, Tensor]) -> bool:
        """Start to send the tensors `names` of `bucket`, in this order, and return `is_done`.

        Raises:
            EngineLostError: there is no group any more.
        """
        self._opened().broadcast([bucket[name] for name in names])
        return self.is_done()

    def is_done(self) -> bool:
        """Return whether the work that was started last is done; see `WeightGroup.is_done`."""
        return self._opened().is_done()

    def close(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _opened(self) -> WeightGroup:
        if self._group is None:
            raise EngineLostError("the group with the servers is closed")
        return self._group


def _call_end(method: str, arguments: tuple[Any, ...], tensors: Iterator[Mapping[str, Tensor]], end: GroupEnd) -> Any:
    return getattr(end, method)(*arguments, *tensors)


class GroupLink(ABC):
    """Sends weights over a group in buckets, each with a call that makes the servers receive it; implements `TransferLink`.
    Subclasses make the calls to the servers."""

    def __init__(self, transport: Transport, servers: Sequence[TransferServer]) -> None:
        self.transport = transport
        self._servers = servers
        self._group_name = f"polyturn-{uuid.uuid4().hex[:8]}"
        self._meeting: Mapping[str, Any] = {}
        """The group's size and store, as servers name them."""
        self._weights: Mapping[str, Tensor] = {}
        self._end_here = GroupEnd()
        """Used if the tensors are in this process."""
        self._use_there: UseThere = self._use_here

    @property
    def group_kind(self) -> type[WeightGroup]:
        """The trainer's end of the group."""
        return WeightGroup

    @classmethod
    async def open(cls, transport: Transport, servers: Sequence[TransferServer], weights: Mapping[str, Tensor]) -> Self:
        """Make the group of the process that has `weights` and of the servers' workers.

        Raises:
            EngineLostError: the group could not be made.
            EngineError: a server refused.
            RankLostError: a rank is gone.
        """
        offsets, size = {}, 1
        for server in servers:
            offsets[server] = size
            size += server.num_workers
        link = cls(transport, servers)
        link._find_trainer(streamed(weights))
        spec = WeightGroupSpec(link.group_kind, [server.url for server in servers], link._group_name, transport, size)
        host, port = await link._call_trainer("open", spec)
        link._meeting = {"master_address": host, "master_port": port, "world_size": size}
        try:
            await link._together("is_done", (), on_all(servers, lambda server: link._join(server, offsets[server])))
        except BaseException as problem:
            await link._clean_up(link._call_trainer("close"))
            if not isinstance(problem, EngineError):
                raise
            raise type(problem)(
                f"{problem}; if the servers cannot connect to the trainer's machine at {host}, set engine.weights: folder, "
                "with an engine.weights_folder that both see"
            ) from problem
        return link

    async def send(self, weights: Mapping[str, Tensor]) -> None:
        """Send the weights in buckets.

        Raises:
            EngineLostError: a server did not answer, or the group broke.
            EngineError: a server refused.
            RankLostError: a rank is gone.
        """
        self._weights = stream = streamed(weights)
        self._find_trainer(stream)
        try:
            await self._begin()
            try:
                for names in stream.pieces:
                    await self._give(names, stream.kinds)
            except BaseException:
                # First the own end: a server that waits for a tensor answers no call.
                await self._clean_up(self._call_trainer("close"))
                await self._clean_up(self._finish())  # an open update would refuse the next weights, or end the server
                raise
            await self._finish()
        finally:
            self._weights = {}

    async def close(self) -> None:
        """Leave the group."""
        await self._clean_up(self._call_trainer("close"))
        await self._leave()

    async def _give(self, names: Sequence[str], kinds: Mapping[str, TensorKind]) -> None:
        own = [kinds[name] for name in names]
        received = self._receive(
            {"names": list(names), "shapes": [list(kind.shape) for kind in own]},
            [str(kind.dtype).removeprefix("torch.") for kind in own],
        )
        await self._together("broadcast", names, received)

    async def _together(self, method: str, names: Sequence[str], theirs: Coroutine[Any, Any, Any]) -> None:
        """Run both ends concurrently until both are done; if one fails, do not wait for the other."""

        async def ours() -> None:
            is_done = await self._call_trainer(method, *([names] if names else []), names=names)
            while not is_done:
                is_done = await self._call_trainer("is_done")

        with first_error():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(theirs)
                tasks.create_task(ours())

    async def _call_trainer(self, method: str, *arguments: Any, names: Sequence[str] = ()) -> Any:
        """Call a method of the trainer's `GroupEnd` with the tensors `names`, if any."""
        use = functools.partial(_call_end, method, arguments)
        return await asyncio.to_thread(self._use_there, [names] if names else [], use)

    def _find_trainer(self, weights: StreamedTensors) -> None:
        """Choose the process of the trainer's end."""
        self._use_there = weights.use_there or self._use_here

    def _use_here(self, pieces: Sequence[Sequence[str]], use: Callable[..., Any]) -> Any:
        return use(({name: self._weights[name] for name in names} for names in pieces), self._end_here)

    async def _clean_up(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do `work` in limited time, and ignore its failure."""
        with contextlib.suppress(PolyturnError, TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await work

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
    async def _finish(self) -> None: ...

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
