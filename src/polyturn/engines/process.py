"""ProcessEngine: the embedded engine in a separate process, which continues sampling during training.

    trainer's process                                   engine's process
    parameters --copy--> slot 1   (memory of both)      samples from slot 0
    "version 5 is in slot 1"  ----- socket ------>      between two decoding steps: samples from slot 1

The other process runs an `EmbeddedEngine`. A thread would not do, because decoding would starve behind the trainer's Python.
The shared memory has two further copies of the weights.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import pickle
import socket
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from polyturn.core.errors import ConfigError, EngineError, EngineLostError, one_line
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.protocols import EngineCapabilities, EngineLoad
from polyturn.engines.process_main import Boot
from polyturn.engines.request_limits import RequestLimits
from polyturn.engines.slots import EngineStats
from polyturn.engines.weight_memory import WeightMemory, listed_names, tensors_of
from polyturn.infra.ipc import MessageSocket
from polyturn.infra.process import ManagedProcess
from polyturn.tokens.multimodal import MediaProcessor

logger = logging.getLogger(__name__)

_MAIN = "from polyturn.engines.process_main import main; main()"
_END_S = 10.0
"""Seconds to wait for the process to end before killing it."""
_CLOSED = "the embedded engine was closed while the request ran"


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
        self._wire: MessageSocket | None = None
        self._starting = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._live: dict[str, GenerateRequest] = {}
        self._lost: str | None = None
        self._is_up = False
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
        """The number of requests beyond the engine's slots; the use of its cache is unknown to this process."""
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
        self._live[request.request_id] = request
        try:
            completion: Completion = await self._ask("generate", request)
            return completion
        finally:
            del self._live[request.request_id]

    async def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns the tokens so far, with ABORT. Unknown ids are fine."""
        if request_id in self._live:
            await self._ask("abort", request_id)

    async def end_session(self, session_id: str) -> None:
        """Release the session's slot. Unknown ids are fine."""
        if self._wire is not None and self._lost is None:
            self._wire.send(("end_session", next(self._numbers), session_id))

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
            await self._ask("update", version, slot, keep_kv)
            self._live_slot, self.version = slot, version

    async def close(self) -> None:
        """End the process, and fail its running requests."""
        self._is_closed = True
        if self._wire is not None:
            self._wire.send(("close", next(self._numbers)))
            self._wire.close()
        self._fail_all(EngineError(_CLOSED))
        if self._process is not None:
            # a process that is still starting has nothing to end, and would read the message only after its imports
            await asyncio.to_thread(self._process.end, grace_s=_END_S if self._is_up else 0.0, asks=False)
            self._process.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    # The process.

    async def _started(self) -> None:
        """Wait for the process; waiting callers continue in order, a request before its abort."""
        async with self._starting:
            self._check_open()
            if self._wire is None:
                await self._start()

    async def _start(self) -> None:
        """Start the process."""
        memory = self._memory = WeightMemory.of(self._model)
        memory.write(0, tensors_of(self._model))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            command = [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno())]
            self._process = ManagedProcess(command, pass_fds=(theirs.fileno(), memory.fd))
        loop = asyncio.get_running_loop()
        _, wire = await loop.create_unix_connection(lambda: MessageSocket(self._on_message, self._on_end), sock=ours)
        boot = Boot(
            memory_fd=memory.fd,
            spans=memory.spans,
            size=memory.size,
            model=self._structure,
            device=str(next(self._model.parameters()).device),
            num_threads=self._num_threads,
            options=self._options,
        )
        self._wire = wire
        try:
            await self._send("boot", boot)
        except EngineError as problem:
            self._lost = self._lost or f"the process of the embedded engine did not start: {problem}"
            raise
        self._is_up = True
        logger.info("the embedded engine runs in a separate process (%d)", self._process.pid)

    async def _ask(self, kind: str, *rest: object) -> Any:
        await self._started()
        return await self._send(kind, *rest)

    async def _send(self, kind: str, *rest: object) -> Any:
        """Send a message and wait for its answer; a cancelled caller withdraws the message."""
        self._check_open()
        if self._lost is not None:
            raise EngineLostError(self._lost)
        assert self._wire is not None
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._wire.send((kind, number, *rest))
        try:
            return await future
        except asyncio.CancelledError:
            self._wire.send(("cancel", number))
            raise
        finally:
            self._asked.pop(number, None)

    def _on_message(self, message: tuple[int, Any, str | None, EngineStats]) -> None:
        number, value, problem, self.stats = message
        future = self._asked.get(number)
        if future is None or future.done():
            return
        if problem is None:
            future.set_result(value)
        else:
            future.set_exception(EngineError(problem))

    def _on_end(self) -> None:
        """Fail all waiting calls with the last lines of the process's output."""
        if self._is_closed or self._process is None:
            return
        self._process.wait(1.0)
        status = self._process.returncode
        meaning = " (killed; the machine may be out of memory)" if status == -9 else ""
        self._lost = (
            f"the process of the embedded engine {'hung up' if status is None else f'ended with status {status}'}"
            f"{meaning}; its last lines:\n{self._process.tail() or '(it wrote nothing)'}"
        )
        self._fail_all(EngineLostError(self._lost))

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError(_CLOSED)

    def _fail_all(self, error: EngineError) -> None:
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)


class _ModelPickler(pickle.Pickler):
    """Pickles a model with names in place of its tensors."""

    def __init__(self, file: io.BytesIO, model: PreTrainedModel) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = {id(t): ("parameter", name) for name, t in model.named_parameters()}
        self._names |= {id(t): ("buffer", name) for name, t in model.named_buffers()}

    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        return self._names.get(id(obj)) if isinstance(obj, torch.Tensor) else None


def _pickled(model: PreTrainedModel, media: MediaProcessor | None) -> bytes:
    file = io.BytesIO()
    try:
        _ModelPickler(file, model).dump((model, media))
    except Exception as problem:  # a class's pickling may raise anything
        raise ConfigError(
            f"the model cannot be sent to a separate process ({one_line(problem)}); set engine.process: shared"
        ) from problem
    return file.getvalue()
