"""Options of the engine that samples completions, by its kind.

    engine: {num_slots: 64}                                             EmbeddedOptions
    engine: {kind: vllm, launch: {replicas: 2, devices: ["0", "1"]}}    ServerOptions
    engine: {kind: mine, kwargs: {url: ...}}                            OwnEngineOptions

Each kind accepts only its keys: a server's key on the embedded engine is an error. This module does not import torch,
because configurations are also read without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from polyturn.core.errors import ConfigError
from polyturn.infra.live import NameOrObject


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine that samples completions: embedded in this process, or servers."""

    update: Literal["in_flight", "wait", "abort_resume", "sleep"] = "in_flight"
    """The effect of new weights on running completions. in_flight: completions continue with the new weights. wait: the
    weights wait until completions end, and new requests wait for the weights. abort_resume: completions are suspended and
    resumed as new requests. sleep: for vllm and sglang on the trainer's GPUs; during an update they free their memory and
    sample nothing, and cut completions resume with the new weights."""

    def __post_init__(self) -> None:
        if self.update == "sleep":  # the options of servers check it themselves
            raise ConfigError(
                "engine.update is sleep, and only servers that the run starts (engine.kind vllm, sglang) can release "
                "their memory; leave it at in_flight"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedOptions(EngineOptions):
    """The engine that uses the trainer's parameters."""

    kind: Literal["embedded"] = "embedded"
    """The engine in this process (embedded), servers (vllm, sglang), or another entry point of `polyturn.engines`."""
    num_slots: Annotated[int, Field(ge=1, le=2**20)] = 128
    """Largest number of sequences decoded at once, and of conversations whose KV cache is kept."""
    prefill_chunk: Annotated[int, Field(ge=8)] = 256
    """Largest number of tokens of one prompt in one forward pass."""
    deterministic: bool = False
    """Use batches of constant shape and prefill prompts one by one, so that bits do not depend on other requests; slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The start of a server; the flags that training needs are added automatically."""

    python: str | None = None
    """Python interpreter of the environment with vLLM or SGLang; null takes polyturn's own interpreter."""
    args: list[str] = field(default_factory=list)
    """Further arguments of the server, for instance ["--tensor-parallel-size", "2"]."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the server."""
    replicas: Annotated[int, Field(ge=1, le=2**16)] = 1
    """Number of servers to start."""
    devices: list[str] = field(default_factory=list)
    """The GPUs of each server, for instance ["0,1", "2,3"]; required for several servers on GPUs."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Number of restarts of a server that dies or hangs; after that the run continues without the server."""
    ready_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds within which a started server must answer."""
    log: str | None = None
    """File for the server's output; null keeps the output only until the server stops. With several servers, those after the
    first write to FILE.1 and so on."""

    def __post_init__(self) -> None:
        if self.devices and len(self.devices) != self.replicas:
            raise ConfigError(
                f"engine.launch has {self.replicas} replicas and devices for {len(self.devices)}; give "
                'engine.launch.devices one entry for each, such as ["0,1", "2,3"]'
            )

    def log_of(self, number: int) -> Path | None:
        """Return the file for the output of a server."""
        return None if self.log is None else Path(self.log if number == 0 else f"{self.log}.{number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedOptions(EngineOptions):
    """Options of engines that may be slow: servers, and engines of other packages."""

    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a request to a server counts as lost, and a call of another package's engine fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(AskedOptions):
    """vLLM or SGLang servers, started by the run or already running."""

    kind: Literal["vllm", "sglang"]
    """The kind of servers."""
    urls: list[str] = field(default_factory=list)
    """Addresses of running servers; they must serve the same model, with the flags listed in docs/guides/engines.md."""
    api_key_env: str | None = None
    """Environment variable with the API key that the servers of `urls` require (their `--api-key`)."""
    launch: LaunchOptions | None = None
    """How to start servers; null starts them with the defaults if `urls` is empty."""
    max_in_flight: Annotated[int, Field(ge=1)] = 256
    """Largest number of requests on a server at once; further requests wait in the run."""
    health_s: Annotated[float, Field(gt=0)] = 20.0
    """Seconds for a health check of a busy server; two failed checks in a row count as a loss."""
    patience_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that a request waits while no server is up."""
    max_tries: Annotated[int, Field(ge=1)] = 8
    """Number of tries of a request whose server is lost before its trajectory fails."""
    weights: Literal["auto", "folder", "gloo", "nccl", "ipc", "adapter"] = "auto"
    """The transport of new weights. folder: the server reads a folder. nccl, gloo: the server's broadcast of tensors,
    between GPUs (nccl) or CPUs (gloo). ipc: handles of memory on the same GPU. auto: folder, or a broadcast if a server is
    on another machine. adapter: only the adapter of model.lora, in a folder, or over HTTP to an SGLang server on another
    machine. With model.lora and SGLang, auto is adapter if the server can serve it. Otherwise the adapter is merged."""
    weights_folder: str | None = None
    """Folder for weights on a disk that the servers see under the same path; null uses this machine's memory."""

    def __post_init__(self) -> None:
        if self.weights not in {"auto", "folder", "adapter"} and self.weights_folder is not None:
            raise ConfigError(
                f"engine.weights is {self.weights} and engine.weights_folder is {self.weights_folder}; a transfer of "
                "tensors uses no folder, so remove one of them"
            )
        if self.update == "sleep" and self.urls:
            raise ConfigError(
                f"engine.update is sleep and engine.urls has {self.urls[0]!r}; the run itself must start servers on "
                "the trainer's GPUs, with special flags, so set engine.launch instead"
            )
        if self.update == "sleep" and self.weights == "adapter":
            raise ConfigError(
                "engine.update is sleep, which drops a server's weights, and engine.weights is adapter, which sends "
                "only the adapter; set engine.weights to auto, which sends the merged weights"
            )
        if self.update == "sleep" and self.weights == "nccl":
            raise ConfigError(
                "engine.update is sleep and engine.weights is nccl, which does not support two processes on one GPU; "
                "use ipc or auto"
            )
        if self.urls and self.launch is not None:
            raise ConfigError("set engine.urls (running servers) or engine.launch (servers to start), not both")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"engine.urls has {url!r}; write it with its scheme, for example http://127.0.0.1:8000")
            if not _is_address(url):
                raise ConfigError(f"engine.urls has {url!r}, which has no valid host or port; correct it")
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ConfigError(f"engine.urls names a server twice: {self.urls}")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.port != 0 and bool((parts.hostname or "").encode("idna"))
    except ValueError:  # the port is not a number up to 65535, or a part of the host is empty or too long
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEngineOptions(AskedOptions):
    """An engine of another package."""

    GROUP: ClassVar[str] = "polyturn.engines"
    """The group of entry points for `kind`."""

    kind: NameOrObject
    """The name of its entry point."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the engine."""


AnyEngineOptions = EmbeddedOptions | ServerOptions | OwnEngineOptions
"""The section `engine`, by its `kind`."""


def is_deterministic(options: AnyEngineOptions) -> bool:
    """Return whether the engine's bits do not depend on other requests."""
    return isinstance(options, EmbeddedOptions) and options.deterministic
