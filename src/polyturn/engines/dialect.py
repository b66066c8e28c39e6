"""ServerDialect: the requests and replies of one kind of server; the client's logic is in `remote`.

_call -> _read      a request, and its answer          _pause -> _load | _send -> _resume      new weights
_describe, _look    what the server can do, and whether it is at work
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from polyturn.core.errors import EngineError
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.engines.weight_files import WrittenWeights


class HttpCall(NamedTuple):
    """A request as one server wants it."""

    path: str
    body: dict[str, Any]


class ServerFacts(NamedTuple):
    """Facts that a server reports about itself."""

    seeded: bool
    priorities: bool
    max_context: int | None
    num_workers: int = 1
    """Processes that hold weights, each with its share of the model."""
    checksums: bool = False
    """vLLM: whether its workers know how to say what they hold."""


class ServerLoad(NamedTuple):
    """The load of a server at one moment."""

    queue: float
    """Requests that it took and has not begun."""
    kv_use: float
    """Share of its KV cache that is in use."""


class ServerDialect(ABC):
    """One kind of server, in its own words."""

    name = "remote"
    """The kind of server, in messages."""
    routes_env: ClassVar[Mapping[str, str]] = {}
    """The environment in which a server can say which experts tokens went to, when it is started for that."""

    @abstractmethod
    async def _describe(self) -> ServerFacts:
        """Ask the server what it can do.

        Raises:
            EngineError: it runs in a way that training cannot use.
        """

    @abstractmethod
    async def _look(self) -> None:
        """Return if the server's engine, not only its front, is at work; raise if it says that it is not.

        Not asked while weights change, and only what is quick.
        """

    async def _read_load(self) -> ServerLoad | None:
        """Return how busy the server is; None where it does not say. Only what is quick, beside `_look`."""
        return None

    @abstractmethod
    def _call(self, request: GenerateRequest, wire_id: str) -> HttpCall:
        """Return `request` in the server's words."""

    @abstractmethod
    def _read(self, request: GenerateRequest, reply: Any) -> Completion:
        """Return the server's answer as a completion."""

    @abstractmethod
    async def _abort(self, wire_id: str) -> None:
        """Ask the server to end a request."""

    @abstractmethod
    async def _pause(self) -> None:
        """Hold the server's requests so that its weights can change."""

    @abstractmethod
    async def _load(self, folder: Path, version: int) -> None:
        """Let the server load the checkpoint in `folder`, drop what it computed before, and call itself `version`."""

    async def _send(self, weights: WrittenWeights, version: int) -> None:
        """Do as `_load`, with the tensors themselves, over HTTP or a process group."""
        raise EngineError(f"weights go to {self.name} through a folder; leave engine.weights at shared_memory or disk")

    async def _rename(self, tag: str) -> None:
        """Let the server call the weights that it has `tag`."""
        return

    async def _leave_group(self, name: str) -> None:
        """Let the server leave a process group."""
        return

    @abstractmethod
    async def _forget(self) -> None:
        """Let the server drop the prefixes that it has computed."""

    @abstractmethod
    async def _resume(self) -> None:
        """Let the server's requests go on."""
