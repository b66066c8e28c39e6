"""ServerDialect: the requests and replies of one kind of server, for the client in `remote.py`.

_call -> _read                                                       a request, and its answer
_pause -> load_folder | open_link -> _loaded, _rename -> _resume     new weights
_sleep -> _wake weights -> load… -> _rename -> _wake kv_cache        the same after an update on the same GPU
_describe, _look                                                     the server's abilities, and its health
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from polyturn.core.errors import ConfigError, EngineError
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.protocols import EngineLoad
from polyturn.engines.weights.stream import Transport
from polyturn.engines.weights.transfer import TransferLink, TransferServer

UNSEEN = (
    "if the server cannot read that folder, let it share this machine's memory and run as the trainer's user, set "
    "engine.weights_folder to a folder that both can read, or set engine.weights to gloo or nccl"
)
"""Advice if a server cannot load a folder."""


Memory = Literal["weights", "kv_cache"]
"""A part of a server's memory, named as by servers."""


class HttpCall(NamedTuple):
    """A request in a server's format."""

    path: str
    body: dict[str, Any]


class ServerFacts(NamedTuple):
    """Facts that a server reports about itself."""

    seeded: bool
    max_context: int | None
    num_workers: int = 1
    """Number of processes with weights, each with a share of the model."""
    version: str = ""
    """Version of the server's software."""


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version's release: "0.32.0.dev1+cpu" -> (0, 32, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


class ServerDialect(ABC):
    """Translates requests and replies for one kind of server."""

    name = "remote"
    """Name of the kind of server in messages."""
    tested_version: ClassVar[str] = "0"
    """The version that training is tested with. A dry run refuses an older one."""
    transfer_package: ClassVar[str | None] = None
    """Package that the trainer needs to send tensors to these servers over nccl or ipc; None if none."""
    routes_env: ClassVar[Mapping[str, str]] = {}
    """Environment variables that a server needs to report the experts of tokens."""
    sleep_flag: ClassVar[str] = ""
    """Flag of a server that can release its memory; "" if this kind cannot."""
    share_flag: ClassVar[str] = ""
    """Flag for the share of a GPU that a server may use."""
    adapter_flags: ClassVar[str] = ""
    """The settings that a running server needs to load adapters, for messages."""
    takes_adapter_tensors: ClassVar[bool] = False
    """Whether an adapter can be sent to a server that does not see this machine's folders."""

    @abstractmethod
    async def _describe(self) -> ServerFacts:
        """Return facts about the server.

        Raises:
            EngineError: the server's settings do not allow training.
        """

    @abstractmethod
    async def _look(self) -> None:
        """Check that the server's engine, not only its HTTP front, is healthy; raise otherwise.

        Must be quick; never called while weights change.
        """

    async def _read_load(self) -> EngineLoad | None:
        """Return the server's load; None if it does not report any. Must be quick; called with `_look`."""
        return None

    @abstractmethod
    def _call(self, request: GenerateRequest, wire_id: str) -> HttpCall:
        """Return `request` in the server's format."""

    @abstractmethod
    def _read(self, request: GenerateRequest, reply: Any) -> Completion:
        """Return the server's answer as a completion."""

    @abstractmethod
    async def _abort(self, wire_id: str) -> None:
        """Make the server end a request."""

    @abstractmethod
    async def _pause(self) -> None:
        """Pause the server's requests, so that its weights can change."""

    @abstractmethod
    async def load_folder(self, folder: Path) -> None:
        """Make the server load the checkpoint in `folder`."""

    async def _load_adapter(self, name: str, folder: Path) -> None:
        """Make the server load the adapter in `folder` as `name`, beside the previous adapter."""
        raise EngineError(f"the {self.name} server cannot load an adapter; set engine.weights to folder")

    async def _unload_adapter(self, name: str) -> None:
        """Make the server drop an adapter that requests no longer name, unless it keeps only a few anyway."""
        return

    @classmethod
    def adapter_launch(cls, adapter: Mapping[str, Any], *, device: str) -> tuple[list[str], dict[str, str]]:
        """Return the arguments and environment of a server on `device` for adapters with peft's settings `adapter`."""
        raise ConfigError(f"{cls.name} servers cannot load an adapter; set engine.weights to folder")

    @staticmethod
    def adapter_problem(targets: Collection[str]) -> str | None:
        """Return why servers of this kind cannot serve an adapter of the modules with the names `targets`; None if they
        can, or if only the server knows."""
        return None

    @staticmethod
    async def open_link(transport: Transport, servers: Sequence[TransferServer], weights: Mapping[str, Any]) -> TransferLink:
        """Return a link that sends `weights`, and later ones of the same trainer, to servers of this kind."""
        raise EngineError(f"these servers load weights from a folder, and engine.weights is {transport}; set it to folder")

    @abstractmethod
    async def _loaded(self) -> None:
        """Make the paused server drop the results computed with the previous weights."""

    @abstractmethod
    async def _rename(self, tag: str) -> None:
        """Name the server's current weights `tag`."""

    @abstractmethod
    async def _named(self) -> str:
        """Return the server's name of its weights."""

    @abstractmethod
    async def _forget(self) -> None:
        """Make the server drop its prefix cache."""

    @abstractmethod
    async def _resume(self) -> None:
        """Resume the server's requests."""

    async def _sleep(self) -> None:
        """Pause the server, cutting or queueing its requests, and release the memory of its weights and KV cache."""
        raise EngineError(f"{self.name} servers cannot release their memory; leave engine.update at in_flight")

    async def _wake(self, memory: Memory) -> None:
        """Make the server allocate a part of its memory again. The KV cache comes last; the server then resumes requests."""
        raise EngineError(f"{self.name} servers cannot release their memory; leave engine.update at in_flight")
