"""The base class for engines of other packages, and the parts of a run that an engine is built with.

    # pyproject.toml:   [project.entry-points."polyturn.engines"]
    #                   mine = "my_package.engine:build"                        then `engine.kind: mine`

    def build(setup: EngineSetup, *, url: str) -> Engine:                       engine: {kind: mine, kwargs: {url: ...}}
        return MyEngine(url, max_context=setup.max_context)

The built-in engines are made in the same way, by `build` in `embedded.py`, `vllm.py` and `sglang.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from polyturn.core.protocols import Engine, EngineCapabilities, EngineLoad, LoadedEngine
from polyturn.core.routing import RouteShape
from polyturn.engines.launcher import StartServer
from polyturn.engines.weights.folder import WeightStore
from polyturn.infra.plugins import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from polyturn.tokens.multimodal import MediaProcessor


class ModelFolder(NamedTuple):
    """A model on disk that a server can load."""

    path: Path
    is_temporary: bool
    """Whether it was written for the engine, which deletes it on close."""


class ServerPlaces(Protocol):
    """Starts servers that may be on other machines, for example through a cluster."""

    @property
    def count(self) -> int:
        """Number of servers."""
        ...

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of each server."""
        ...

    @property
    def model(self) -> Path:
        """The model folder for servers, as named by the launcher."""
        ...

    @property
    def config(self) -> ModelFolder:
        """A folder on this machine with the model's config."""
        ...

    def starter(self, number: int) -> StartServer:
        """Return the launcher of server `number`."""
        ...

    def store(self, adapter: Mapping[str, Any] | None) -> WeightStore:
        """Return the store that sends new weights to the servers' machines; `adapter` as in `EngineSetup`."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """The parts of a run that an engine is built with."""

    options: Any
    """The section `engine` of the configuration; see `options.py`."""
    model: PreTrainedModel
    """The model to sample from: the trainer's, or a frozen one."""
    media: MediaProcessor | None
    """The processor for images, videos and sounds; None for a text model."""
    max_context: int
    """Largest length of prompt plus completion, in tokens."""
    sampling: SamplingParams
    """The sampling parameters of most completions of the run."""
    base: Path
    """The folder of the configuration, to which relative paths refer."""
    model_folder: Callable[[], ModelFolder]
    """Returns a folder from which a server can load the model; the first call writes one if there is none."""
    routes: RouteShape | None = None
    """The router sizes of the model, if completions must report the experts of tokens; None if not."""
    needs_routes: bool = False
    """Whether a server that does not report experts is an error."""
    adapter: Mapping[str, Any] | None = None
    """peft's settings of the trained adapter, if servers are sent only the adapter; the model folder then lacks it."""
    places: ServerPlaces | None = None
    """Starts servers elsewhere; None starts them on this machine."""
    trains_on_gpu: bool | None = None
    """Whether the ranks of a cluster have GPUs; None trains on this machine."""
    follows: int = 0
    """In a rollout worker, the number of the controller's servers, to which the worker sends requests (`following.py`); 0 in
    the controller."""
    obstacles: list[str] | None = None
    """In a dry run, collects the reasons why the run would not start on this machine. None raises instead."""


engines: Registry[Callable[..., Engine]] = Registry("engines")
"""Name -> (setup, **kwargs) -> engine."""


class BusyClock:
    """Counts the seconds during which at least one request is running."""

    def __init__(self) -> None:
        self._num_live = 0
        self._since = self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Seconds so far, including those of running requests."""
        return self._seconds + (time.perf_counter() - self._since if self._num_live else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of one request."""
        if not self._num_live:
            self._since = time.perf_counter()
        self._num_live += 1
        try:
            yield
        finally:
            self._num_live -= 1
            if not self._num_live:
                self._seconds += time.perf_counter() - self._since


class MeanOverTime:
    """The mean over time of a number, such as the number of waiting requests."""

    def __init__(self) -> None:
        self._value = self._area = 0.0
        self._began = self._since = time.perf_counter()

    @property
    def value(self) -> float:
        """The current number."""
        return self._value

    def set(self, value: float) -> None:
        """Set the number from now on."""
        now = time.perf_counter()
        self._area += self._value * (now - self._since)
        self._value, self._since = value, now

    def read(self) -> float:
        """Return the mean since the last call."""
        self.set(self._value)
        mean = self._area / max(self._since - self._began, 1e-9)
        self._area, self._began = 0.0, self._since
        return mean


class BaseEngine(ABC):
    """An engine without sessions and metrics; implements `core.protocols.Engine`.

    A subclass implements `capabilities`, `generate`, `abort` and `update_weights`, counts its requests with
    `busy.running()`, and overrides other methods as needed.
    """

    def __init__(self) -> None:
        self.busy = BusyClock()

    @property
    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """Capabilities of this engine."""

    @property
    def busy_s(self) -> float:
        """Seconds during which at least one request was running."""
        return self.busy.seconds

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a running request now; its `generate` returns the tokens so far. Unknown ids are fine."""

    async def end_session(self, session_id: str) -> None:
        """Do nothing, because this engine keeps no sessions."""
        return

    @abstractmethod
    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Serve policy version `version` from now on."""

    def read_metrics(self) -> Mapping[str, float]:
        """Return no metrics."""
        return {}

    async def close(self) -> None:
        """Do nothing, because this engine holds no resources."""
        return


class EngineWrapper:
    """An engine around another one; every method that a subclass does not override is delegated."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def capabilities(self) -> EngineCapabilities:
        """Capabilities of the engine."""
        return self.engine.capabilities

    @property
    def busy_s(self) -> float:
        """Seconds that the engine has spent generating so far."""
        return self.engine.busy_s

    async def generate(self, request: GenerateRequest) -> Completion:
        """Let the engine sample one completion."""
        return await self.engine.generate(request)

    async def abort(self, request_id: str) -> None:
        """Let the engine end a request."""
        await self.engine.abort(request_id)

    async def end_session(self, session_id: str) -> None:
        """Let the engine forget an episode."""
        await self.engine.end_session(session_id)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Let the engine serve `version`."""
        await self.engine.update_weights(version, weights=weights)

    @property
    def load(self) -> EngineLoad | None:
        """The engine's load."""
        return self.engine.load if isinstance(self.engine, LoadedEngine) else None

    def read_metrics(self) -> Mapping[str, float]:
        """Return the engine's metrics."""
        return self.engine.read_metrics()

    async def close(self) -> None:
        """Close the engine."""
        await self.engine.close()


def common_capabilities(each: Sequence[EngineCapabilities]) -> EngineCapabilities:
    """Return the capabilities that all engines share; without engines, none."""
    if not each:
        return EngineCapabilities()
    contexts = [one.max_context for one in each if one.max_context is not None]
    return EngineCapabilities(
        seeded=all(one.seeded for one in each),
        logprobs=all(one.logprobs for one in each),
        media=all(one.media for one in each),
        max_context=min(contexts, default=None),
        shares_weights=all(one.shares_weights for one in each),
        routes=all(one.routes for one in each),
        support=all(one.support for one in each),
        shares_loop=any(one.shares_loop for one in each),
        min_temperature=max(one.min_temperature for one in each),
    )
