"""ServerDialect: the requests and replies of one kind of server; the client's logic is in `remote`.

_call -> _read                                                       a request, and its answer
_pause -> load_folder | open_link -> _loaded, _rename -> _resume     new weights
_sleep -> _wake weights -> load… -> _rename -> _wake kv_cache        the same behind an update on the same GPU
_describe, _look                                                     what the server can do, and whether it is at work
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from polyturn.core.errors import ConfigError, EngineError
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.protocols import EngineLoad
from polyturn.engines.weight_transfer import TransferLink, TransferServer
from polyturn.engines.weight_transport import Way

UNSEEN = (
    "if it does not see that folder, let it share this machine's memory, or set engine.weights_folder to one that both see, "
    "or engine.weights to gloo or nccl"
)
"""The way out where a server cannot load a folder."""


Memory = Literal["weights", "kv_cache"]
"""A part of a server's memory, in the servers' words."""


class HttpCall(NamedTuple):
    """A request as one server wants it."""

    path: str
    body: dict[str, Any]


class ServerFacts(NamedTuple):
    """Facts that a server reports about itself."""

    seeded: bool
    max_context: int | None
    num_workers: int = 1
    """Processes that hold weights, each with its share of the model."""
    version: str = ""
    """The version of its software."""


class ServerDialect(ABC):
    """One kind of server, in its own words."""

    name = "remote"
    """The kind of server, in messages."""
    tested_version: ClassVar[str] = "0"
    """The oldest version that training was tried with."""
    transfer_package: ClassVar[str | None] = None
    """The package that the trainer needs beside it to send these servers tensors."""
    routes_env: ClassVar[Mapping[str, str]] = {}
    """The environment in which a server can say which experts tokens went to, when it is started for that."""
    sleep_flag: ClassVar[str] = ""
    """The flag of a server that can give its memory back; "" where this kind cannot."""
    share_flag: ClassVar[str] = ""
    """The flag with the share of a GPU that a server may take."""

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

    async def _read_load(self) -> EngineLoad | None:
        """Return the server's load; None if it does not report it. Only what is quick, beside `_look`."""
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
    async def load_folder(self, folder: Path) -> None:
        """Let the server load the checkpoint in `folder`."""

    async def load_adapter(self, folder: Path) -> None:
        """Let the server load the adapter in `folder`; requests from then on name it in place of the one before."""
        raise EngineError(f"the {self.name} server takes no adapter alone; set engine.weights to folder")

    @staticmethod
    def adapter_launch(rank: int) -> tuple[list[str], dict[str, str]]:
        """Return arguments and environment of a server that takes adapters of `rank`.

        Raises:
            ConfigError: servers of this kind do not change an adapter while requests for it run.
        """
        raise ConfigError(
            "engine.weights is adapter, and servers of this engine.kind do not change an adapter while requests for it run; "
            "use engine.kind vllm, or leave engine.weights out, and the adapter arrives merged into the weights"
        )

    @staticmethod
    async def open_link(transport: Way, servers: Sequence[TransferServer]) -> TransferLink:
        """Return the trainer's end of a transfer of tensors to servers of this kind."""
        raise EngineError(
            f"weights go to these servers through a folder, and engine.weights is {transport}; leave it at folder"
        )

    @abstractmethod
    async def _loaded(self) -> None:
        """Let the server, which is held, drop what it computed with the weights before."""

    @abstractmethod
    async def _rename(self, tag: str) -> None:
        """Let the server call the weights that it has `tag`."""

    @abstractmethod
    async def _named(self) -> str:
        """Return the server's own name of its weights."""

    @abstractmethod
    async def _forget(self) -> None:
        """Let the server drop the prefixes that it has computed."""

    @abstractmethod
    async def _resume(self) -> None:
        """Let the server's requests go on."""

    async def _sleep(self) -> None:
        """Hold the server's requests, cut or queued, and let it give back the memory of its weights and KV cache."""
        raise EngineError(f"{self.name} servers keep their memory; leave engine.update at in_flight")

    async def _wake(self, memory: Memory) -> None:
        """Let the server take a part of its memory again; the KV cache comes last, and requests go on."""
        raise EngineError(f"{self.name} servers keep their memory; leave engine.update at in_flight")
