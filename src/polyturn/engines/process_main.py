"""The process of `ProcessEngine`: an event loop, an embedded engine, and a socket.

    python -c "from polyturn.engines.process_main import main; main()" SOCKET

It ends with its parent, however the parent dies: by a signal of the kernel where available, and by the end of the socket.
"""

from __future__ import annotations

import asyncio
import ctypes
import io
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """The first message: everything needed to make the engine."""

    memory_fd: int
    spans: Sequence[Any]
    size: int
    model: bytes
    """Pickle of the model, with names of tensors in the memory in place of the tensors."""
    device: str
    num_threads: int
    options: dict[str, Any] = field(default_factory=dict)
    """Of `EmbeddedEngine`."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors
        self._made: dict[str, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        from torch import nn

        kind, name = pid
        if name not in self._made:  # a tied parameter must be one object
            tensor = self._tensors[name]
            self._made[name] = nn.Parameter(tensor, requires_grad=False) if kind == "parameter" else tensor
        return self._made[name]


class ServedEngine:
    """The engine and its running requests."""

    def __init__(self, boot: Boot) -> None:
        import torch

        from polyturn.engines.embedded import EmbeddedEngine
        from polyturn.engines.weight_memory import WeightMemory

        torch.set_num_threads(boot.num_threads)
        self.memory = WeightMemory(boot.memory_fd, boot.spans, size=boot.size)
        model, media = _Unpickler(boot.model, self.memory.views(0)).load()
        self.is_on_cpu = boot.device == "cpu"
        if not self.is_on_cpu:
            model = model.to(boot.device)
        self.engine = EmbeddedEngine(model, media=media, **boot.options)
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def use(self, slot: int) -> None:
        """Point the engine's tensors to `slot`. No step is running, because a step never awaits."""
        import torch

        from polyturn.engines.weight_memory import tensors_of

        views = self.memory.views(slot)
        with torch.no_grad():
            for name, tensor in tensors_of(self.engine.module).items():
                if self.is_on_cpu:
                    tensor.data = views[name]
                else:
                    tensor.copy_(views[name])


def main() -> None:
    """Serve until the socket ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)  # nothing is left to save, and torch's teardown is slow


async def _serve(connection: socket.socket) -> None:
    from polyturn.core.errors import one_line
    from polyturn.engines.slots import EngineStats
    from polyturn.infra.ipc import MessageSocket

    ended = asyncio.Event()
    served: ServedEngine | None = None

    async def answer(number: int, work: Awaitable[Any]) -> None:
        assert served is not None
        try:
            value, problem = await work, None
        except Exception as error:
            value, problem = None, one_line(error)
        finally:
            served.tasks.pop(number, None)
        wire.send((number, value, problem, served.engine.stats))

    async def update(version: int, slot: int, keep_kv: bool) -> None:
        assert served is not None
        served.use(slot)
        await served.engine.update_weights(version, keep_kv=keep_kv)

    def on_message(message: tuple[Any, ...]) -> None:
        nonlocal served
        kind, number, *rest = message
        if kind == "boot":
            try:
                served = ServedEngine(*rest)
            except Exception as error:
                traceback.print_exc()
                wire.send((number, None, one_line(error), EngineStats()))
            else:
                wire.send((number, None, None, served.engine.stats))
            return
        assert served is not None
        if kind == "cancel":
            if (task := served.tasks.get(number)) is not None:
                task.cancel()
            return
        if kind == "close":
            wire.close()
            return
        engine = served.engine
        methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "generate": engine.generate,
            "abort": engine.abort,
            "end_session": engine.end_session,
            "update": update,
        }
        served.tasks[number] = asyncio.ensure_future(answer(number, methods[kind](*rest)))

    wire = MessageSocket(on_message, ended.set)
    await asyncio.get_running_loop().create_unix_connection(lambda: wire, sock=connection)
    await ended.wait()
