"""The base class of an engine of one's own, and the parts of a run that it is built with.

    # pyproject.toml:   [project.entry-points."polyturn.engines"]
    #                   mine = "my_package.engine:build"                        then `engine.kind: mine`

    def build(setup: EngineSetup, *, url: str) -> Engine:                       engine: {kind: mine, kwargs: {url: ...}}
        return MyEngine(url, max_context=setup.max_context)

The engines of our own are made in the same way, by the `build` of `embedded.py`, `vllm.py` and `sglang.py`.
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
from polyturn.core.plugins import Registry
from polyturn.core.protocols import Engine, EngineCapabilities, EngineLoad, LoadedEngine
from polyturn.core.routing import RouteShape
from polyturn.engines.launcher import StartServer
from polyturn.engines.weight_files import WeightStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from polyturn.tokens.multimodal import MediaProcessor


class ModelFolder(NamedTuple):
    """A model on disk, as a server loads it."""

    path: Path
    is_temporary: bool
    """Whether it was written for the engine, which deletes it when it closes."""


class ServerPlaces(Protocol):
    """The place for servers that are not to run on this machine."""

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
        """The folder that a server is to load, as named by the launcher."""
        ...

    @property
    def config(self) -> ModelFolder:
        """A folder of this machine that holds the model's config."""
        ...

    def starter(self, number: int) -> StartServer:
        """Return the launcher of server `number`."""
        ...

    def store(self, adapter: Mapping[str, Any] | None) -> WeightStore:
        """Return the channel that brings new weights to the servers' machines; `adapter` as of `EngineSetup`."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """The parts of a run that an engine is built with."""

    options: Any
    """The section `engine` of the configuration, as its `kind` has it; see `options.py`."""
    model: PreTrainedModel
    """The model whose weights are sampled from: the trainer's own, or a frozen one."""
    media: MediaProcessor | None
    """Turns pictures into what the model sees; None for a model of text."""
    max_context: int
    """The longest prompt plus completion, in tokens."""
    sampling: SamplingParams
    """The sampling of most completions of the run."""
    trains_meanwhile: bool
    """Whether training and sampling run side by side."""
    base: Path
    """The folder of the configuration, where relative paths start."""
    model_folder: Callable[[], ModelFolder]
    """Return a folder that a server can load the model from; it is written at the first call where there is none."""
    routes: RouteShape | None = None
    """The router sizes of the model, where completions are to say which experts tokens went to; None where they need not."""
    needs_routes: bool = False
    """Whether a server that does not say so is refused."""
    adapter: Mapping[str, Any] | None = None
    """peft's settings of the adapter that is trained, where servers are sent it alone, and the model folder lacks it."""
    places: ServerPlaces | None = None
    """The place where servers are started; None is this machine."""
    obstacles: list[str] | None = None
    """Of a dry run: collects why the run would not start on this machine. None refuses such a run."""


engines: Registry[Callable[..., Engine]] = Registry("engines")
"""Name -> (setup, **kwargs) -> engine."""


class BusyClock:
    """Counts the seconds in which at least one request was being answered."""

    def __init__(self) -> None:
        self._num_live = 0
        self._since = self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds so far, those of requests that still run included."""
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
    """The mean over time of a number that changes at moments, such as how many requests wait."""

    def __init__(self) -> None:
        self._value = self._area = 0.0
        self._began = self._since = time.perf_counter()

    @property
    def value(self) -> float:
        """The number at this moment."""
        return self._value

    def set(self, value: float) -> None:
        """Say what the number is from now on."""
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
    """An engine without sessions, metrics or weights of its own; `core.protocols.Engine`.

    A subclass writes `capabilities`, `generate` and `abort`, counts its requests with `busy.running()`, and overrides what
    else it offers.
    """

    def __init__(self) -> None:
        self.busy = BusyClock()

    @property
    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """Capabilities of this engine."""

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was being answered."""
        return self.busy.seconds

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a running request now; its `generate` returns what there is. Unknown ids are fine."""

    async def end_session(self, session_id: str) -> None:
        """Keep nothing for an episode, so that there is nothing to forget."""
        return

    @abstractmethod
    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Serve policy version `version` from now on."""

    def read_metrics(self) -> Mapping[str, float]:
        """Return no metrics."""
        return {}

    async def close(self) -> None:
        """Hold nothing that would have to be freed."""
        return


class EngineWrapper:
    """An engine in front of another one, which is asked in everything that a subclass does not do itself."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def capabilities(self) -> EngineCapabilities:
        """Capabilities of the engine."""
        return self.engine.capabilities

    @property
    def busy_s(self) -> float:
        """Seconds that the engine spent generating so far."""
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
    """Return the capabilities that all engines share; none for no engines."""
    if not each:
        return EngineCapabilities()
    contexts = [one.max_context for one in each if one.max_context is not None]
    return EngineCapabilities(
        seeded=all(one.seeded for one in each),
        logprobs=all(one.logprobs for one in each),
        media=all(one.media for one in each),
        pause_modes=tuple(mode for mode in each[0].pause_modes if all(mode in one.pause_modes for one in each)),
        max_context=min(contexts, default=None),
        shares_weights=all(one.shares_weights for one in each),
        routes=all(one.routes for one in each),
        support=all(one.support for one in each),
        shares_loop=any(one.shares_loop for one in each),
    )
