"""ProcessEngine: the embedded engine in a separate process, which continues sampling during training.

    trainer's process                                   engine's process
    parameters --copy--> slot 1   (memory of both)      samples from slot 0
    update(5, slot 1)  --------- socket --------->      between two decoding steps: samples from slot 1

The other process runs an `EmbeddedEngine`. A thread would not do, because it would rarely run while the trainer executes
Python code. The shared memory has two further copies of the weights. The engine's process ends with this one: by a signal of
the kernel where available, and by the end of the socket.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pickle
import socket
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from polyturn.core.errors import ConfigError, EngineError, EngineLostError, one_line
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.protocols import EngineCapabilities, EngineLoad
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.request_limits import RequestLimits
from polyturn.engines.slots import EngineStats
from polyturn.engines.weight_memory import WeightMemory, listed_names, tensors_of
from polyturn.infra.ipc import Peer
from polyturn.infra.process import ManagedProcess
from polyturn.tokens.multimodal import MediaProcessor

logger = logging.getLogger(__name__)

_MAIN = "from polyturn.engines.process import main; main()"
_CLOSED = "the embedded engine was closed while the request ran"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """Everything that the process needs to make the engine."""

    memory: WeightMemory
    model: bytes
    """Pickle of the model and its media processor, with names of tensors in the memory in place of the tensors."""
    device: str
    num_threads: int
    options: dict[str, Any]
    """Arguments of `EmbeddedEngine`."""


class ProcessEngine:
    """An `EmbeddedEngine` in another process; `core.protocols.Engine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_context: int | None = None,
        media: MediaProcessor | None = None,
        routes: bool = False,
        num_threads: int | None = None,
        **options: Any,
    ) -> None:
        """Sample from the trainer's model; the first call starts the process.

        Args:
            model: A causal language model. `update_weights` copies its current parameters.
            max_context: As in `EmbeddedEngine`.
            media: As in `EmbeddedEngine`.
            routes: As in `EmbeddedEngine`.
            num_threads: Number of torch threads in the process; None takes the number of this process.
            options: Further arguments of `EmbeddedEngine`.

        Raises:
            ConfigError: the model has layers other than full attention, or it cannot be sent to another process.
        """
        self._accepts = RequestLimits.of(model, max_context=max_context, takes_media=media is not None, routes=routes)
        self._model = model
        self._media = media
        self._num_threads = num_threads or torch.get_num_threads()
        self._num_slots: int = options.get("num_slots", 64)
        self._options = {"max_context": self._accepts.max_context, "routes": routes, **options}
        self.version = 0
        self.stats = EngineStats()
        """Stats of the process, from its latest answer."""
        self._structure = _pickled(model, media)
        self._listed_names = listed_names(model)
        self._memory: WeightMemory | None = None
        self._live_slot = 0
        self._process: ManagedProcess | None = None
        self._peer: Peer | None = None
        self._starting = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._live: set[str] = set()
        self._has_answered = False
        self._is_closed = False

    # core.protocols.Engine.

    @property
    def capabilities(self) -> EngineCapabilities:
        """The capabilities of the embedded engine."""
        return self._accepts.capabilities

    @property
    def busy_s(self) -> float:
        """Seconds spent generating so far, from the latest answer."""
        return self.stats.busy_s

    @property
    def load(self) -> EngineLoad:
        """The number of requests beyond the engine's slots. The use of its cache is unknown to this process and reported as
        0."""
        return EngineLoad(max(0, len(self._live) - self._num_slots), 0.0)

    def read_metrics(self) -> Mapping[str, float]:
        """Return no metrics: there are no restarts, because the run ends with the process."""
        return {}

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return None if self._process is None else self._process.pid

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion, like `EmbeddedEngine.generate`.

        Raises:
            EngineLostError: the process ended; the message has the last lines of its output.
            EngineError: the request cannot work, or the engine is closed.
        """
        self._accepts.check(request, live=self._live, is_closed=self._is_closed)
        self._live.add(request.request_id)
        try:
            completion: Completion = await self._call("generate", request)
            return completion
        finally:
            self._live.remove(request.request_id)

    async def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns the tokens so far, with ABORT. Unknown ids are fine."""
        if request_id in self._live:
            await self._call("abort", request_id)

    async def end_session(self, session_id: str) -> None:
        """Release the session's slot. Unknown ids are fine."""
        if self._peer is not None:
            self._peer.notify("end_session", session_id)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None, keep_kv: bool = False) -> None:
        """Serve `version` from the next decoding step on; sampling continues while the weights are copied.

        Args:
            version: The new policy version.
            weights: name -> tensor; None takes the current parameters of the trainer's model.
            keep_kv: As in `EmbeddedEngine`.

        Raises:
            EngineError: `weights` names a parameter that the model does not have, or the process ended.
        """
        await self._started()
        async with self._updating:
            memory, slot = self._memory, 1 - self._live_slot
            assert memory is not None
            if weights is None:
                tensors = tensors_of(self._model)
            else:  # under their names in the memory: the first name of a tied tensor
                tensors = {self._listed_names.get(name, name): tensor for name, tensor in weights.items()}
            await asyncio.to_thread(memory.write, slot, tensors)
            await self._call("update_weights", version, slot, keep_kv)
            self._live_slot, self.version = slot, version

    async def close(self) -> None:
        """End the process, and fail its running requests."""
        self._is_closed = True
        if self._peer is not None:
            self._peer.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.end)
            self._process.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    # The process.

    async def _call(self, method: str, *arguments: object) -> Any:
        peer = await self._started()
        value, self.stats = await peer.call(method, *arguments)
        self._has_answered = True
        return value

    async def _started(self) -> Peer:
        """Wait for the connection; waiting callers continue in order, a request before its abort.

        Raises:
            EngineError: the engine is closed.
        """
        async with self._starting:
            if self._is_closed:
                raise EngineError(_CLOSED)
            if self._peer is None:
                self._peer = await self._start()
            return self._peer

    async def _start(self) -> Peer:
        """Start the process. Calls that are sent before it has made its engine wait in the socket."""
        memory = self._memory = WeightMemory.of(self._model)
        memory.write(0, tensors_of(self._model))
        boot = Boot(
            memory=memory,
            model=self._structure,
            device=str(next(self._model.parameters()).device),
            num_threads=self._num_threads,
            options=self._options,
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, tempfile.TemporaryFile() as file:
            pickle.dump(boot, file)
            file.seek(0)
            command = [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno()), str(file.fileno())]
            self._process = ManagedProcess(command, pass_fds=(theirs.fileno(), file.fileno(), memory.fd))
        peer = Peer({}, on_end=self._end)
        await peer.connect(ours)
        logger.info("the embedded engine runs in a separate process (%d)", self._process.pid)
        return peer

    def _end(self) -> EngineError:
        """Return the error of all waiting and later calls, with the last lines of the process's output."""
        if self._is_closed or self._process is None:
            return EngineError(_CLOSED)
        self._process.wait(1.0)
        status = self._process.returncode
        end = "hung up" if status is None else f"ended with status {status}"
        meaning = " (killed; the machine may be out of memory)" if status == -9 else ""
        when = "" if self._has_answered else " before its first answer"
        tail = self._process.tail() or "(it wrote nothing)"
        return EngineLostError(f"the process of the embedded engine {end}{meaning}{when}; its last lines:\n{tail}")


class _ModelPickler(pickle.Pickler):
    """Pickles a model with names in place of its tensors."""

    def __init__(self, file: io.BytesIO, model: PreTrainedModel) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = {id(tensor): name for name, tensor in tensors_of(model).items()}

    def persistent_id(self, obj: Any) -> tuple[str, bool] | None:
        name = self._names.get(id(obj)) if isinstance(obj, Tensor) else None
        return None if name is None else (name, isinstance(obj, nn.Parameter))


class _ModelUnpickler(pickle.Unpickler):
    """Puts tensors in place of their names."""

    def __init__(self, data: bytes, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = dict(tensors)

    def persistent_load(self, pid: tuple[str, bool]) -> Tensor:
        name, is_parameter = pid
        if is_parameter and not isinstance(self._tensors[name], nn.Parameter):  # a tied parameter must be one object
            self._tensors[name] = nn.Parameter(self._tensors[name], requires_grad=False)
        return self._tensors[name]


def _pickled(model: PreTrainedModel, media: MediaProcessor | None) -> bytes:
    file = io.BytesIO()
    try:
        _ModelPickler(file, model).dump((model, media))
    except Exception as problem:  # a class's pickling may raise anything
        raise ConfigError(
            f"the model cannot be sent to a separate process ({one_line(problem)}); set engine.process: shared"
        ) from problem
    return file.getvalue()


def main() -> None:
    """Make an engine in this process, and serve it until the socket ends."""
    with open(int(sys.argv[2]), "rb") as file:
        boot: Boot = pickle.load(file)
    asyncio.run(_serve(boot, socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)  # nothing is left to save, and torch's teardown is slow


async def _serve(boot: Boot, connection: socket.socket) -> None:
    torch.set_num_threads(boot.num_threads)
    model, media = _ModelUnpickler(boot.model, boot.memory.views(0)).load()
    engine = EmbeddedEngine(model.to(boot.device), media=media, **boot.options)
    ended = asyncio.Event()

    async def update_weights(version: int, slot: int, keep_kv: bool) -> None:
        views = boot.memory.views(slot)
        with torch.no_grad():  # no step is running, because a step never awaits
            for name, tensor in tensors_of(engine.module).items():
                if boot.device == "cpu":
                    tensor.data = views[name]
                else:
                    tensor.copy_(views[name])
        await engine.update_weights(version, keep_kv=keep_kv)

    def answering(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def answer(*arguments: Any) -> tuple[Any, EngineStats]:
            try:
                return await method(*arguments), engine.stats
            except EngineError:
                raise
            except Exception as problem:
                traceback.print_exc()
                raise EngineError(one_line(problem)) from problem

        return answer

    def end() -> EngineError:
        ended.set()
        return EngineError("the trainer's process is gone")

    methods: dict[str, Callable[..., Awaitable[Any]]] = {
        "generate": engine.generate,
        "abort": engine.abort,
        "end_session": engine.end_session,
        "update_weights": update_weights,
    }
    peer = Peer({name: answering(method) for name, method in methods.items()}, on_end=end)
    await peer.connect(connection)
    await ended.wait()
