"""Options of the engine that samples completions, by its kind.

    engine: {num_slots: 64}                                             EmbeddedOptions
    engine: {kind: vllm, launch: {replicas: 2, devices: ["0", "1"]}}    ServerOptions
    engine: {kind: mine, kwargs: {url: ...}}                            OwnEngineOptions

A kind takes its own keys only: a server's key on the embedded engine is an error before anything starts. Separate from the
engines, because a configuration is also read without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from polyturn.core.errors import ConfigError
from polyturn.core.live import NameOrObject

_RETIRED = {
    "shared_memory": "folder",
    "disk": "folder, with engine.weights_folder",
    "http": "gloo (or nccl between GPUs), the server's own transfer",
    "group": "nccl between GPUs, or gloo",
}


def _not_retired(weights: Any) -> Any:
    """Name what took the place of a value of `engine.weights` that is gone."""
    if weights in _RETIRED:
        raise ValueError(f"{weights} is no longer a way of weights; use {_RETIRED[weights]}")
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine that samples the completions: embedded in this process, or servers."""

    update: Literal["in_flight", "wait", "abort_resume", "sleep"] = "in_flight"
    """The effect of new weights on completions in flight: these go on with the new ones (in_flight), the weights wait
    for their end (wait), or they are suspended and resumed as new requests (abort_resume). sleep is for vllm and sglang on
    the trainer's own GPUs: while it computes they hold no memory there and sample nothing, and completions that this cut
    go on with the new weights."""

    def __post_init__(self) -> None:
        if self.update == "sleep":  # servers check it themselves
            raise ConfigError(
                "engine.update is sleep, and only servers that the run starts (engine.kind vllm, sglang) give their memory "
                "back; leave it at in_flight"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedOptions(EngineOptions):
    """The engine that computes with the trainer's own parameters."""

    kind: Literal["embedded"] = "embedded"
    """The engine in this process (embedded), servers (vllm, sglang), or another entry point of `polyturn.engines`."""
    num_slots: Annotated[int, Field(ge=1, le=2**20)] = 128
    """Sequences decoded at once, and conversations whose KV cache is kept."""
    prefill_chunk: Annotated[int, Field(ge=8)] = 256
    """The longest piece of one prompt in one forward pass."""
    deterministic: bool = False
    """Batches of one shape and prefill one by one, so that bits do not depend on who else is served; slower."""
    process: Literal["auto", "shared", "own"] = "auto"
    """`shared` samples from the trainer's own parameters, in turns with training; `own` samples in a process of its own
    while training runs; auto is own where train.max_staleness is above 0."""
    num_threads: Annotated[int, Field(ge=1)] | None = None
    """In a process of its own: threads of torch there; null takes as many as the trainer has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The start of a server; the flags that training relies on are added by themselves."""

    python: str | None = None
    """The interpreter of the environment that vLLM or SGLang is installed in; null takes the one that runs polyturn."""
    args: list[str] = field(default_factory=list)
    """Further arguments of the server, for instance ["--tensor-parallel-size", "2"]."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the server."""
    replicas: Annotated[int, Field(ge=1, le=2**16)] = 1
    """Number of servers to start."""
    devices: list[str] = field(default_factory=list)
    """For each server the GPUs that it sees, for instance ["0,1", "2,3"]; needed on GPUs where there are several servers."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Number of times that a server is started again that died or hangs; then the run goes on without it."""
    ready_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds until a server that was started must answer."""
    log: str | None = None
    """File for the server's output; null keeps it only until the server stops. Of several servers, number 1 and on write to
    FILE.1 and so on."""

    def __post_init__(self) -> None:
        if self.devices and len(self.devices) != self.replicas:
            raise ConfigError(
                f"engine.launch has {self.replicas} replicas and names GPUs for {len(self.devices)}; give "
                'engine.launch.devices one entry for each, such as ["0,1", "2,3"]'
            )

    def log_of(self, number: int) -> Path | None:
        """Return the file that the output of a server goes to."""
        return None if self.log is None else Path(self.log if number == 0 else f"{self.log}.{number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedOptions(EngineOptions):
    """Options of engines with a latency of their own: servers, and engines of others."""

    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds: a request to a server that takes longer counts as lost, and a call of an engine of another package fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(AskedOptions):
    """vLLM or SGLang servers, started here or running elsewhere."""

    kind: Literal["vllm", "sglang"]
    """Which servers they are."""
    urls: list[str] = field(default_factory=list)
    """Servers that run already; they must hold the same model and run with the flags that docs/guides/engines.md lists."""
    api_key_env: str | None = None
    """The environment variable that holds the key which those servers demand (their `--api-key`)."""
    launch: LaunchOptions | None = None
    """The start of servers; null starts them with the defaults where `urls` is empty."""
    max_in_flight: Annotated[int, Field(ge=1)] = 256
    """Requests on a server at once; more wait here."""
    health_s: Annotated[float, Field(gt=0)] = 20.0
    """A server at work that twice in a row does not say within this time that it is well counts as lost."""
    patience_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that a request waits while no server is up."""
    max_tries: Annotated[int, Field(ge=1)] = 8
    """Number of times that one request may be lost with its server before its trajectory fails."""
    weights: Annotated[Literal["auto", "folder", "gloo", "nccl", "ipc", "adapter"], BeforeValidator(_not_retired)] = "auto"
    """The way of new weights to a server: a folder that it reads, or its own transfer of tensors: a broadcast to all servers
    (nccl between GPUs, gloo between processors), or handles of memory on the same GPU (ipc). auto is the folder, and a
    broadcast where a server is on another machine. adapter is a folder with the adapter of model.lora alone (vLLM), which is
    otherwise merged into the weights."""
    weights_folder: str | None = None
    """The folder of weights, on a disk that the servers see too, under the same path; null is in this machine's memory."""

    def __post_init__(self) -> None:
        if self.weights not in {"auto", "folder", "adapter"} and self.weights_folder is not None:
            raise ConfigError(
                f"engine.weights is {self.weights} and engine.weights_folder is {self.weights_folder}; a transfer of "
                "tensors has no folder, so leave one of them out"
            )
        if self.update == "sleep" and self.urls:
            raise ConfigError(
                f"engine.update is sleep and engine.urls has {self.urls[0]!r}; servers on the trainer's GPUs are started by "
                "the run, with the flags for it, so set engine.launch instead"
            )
        if self.update == "sleep" and self.weights == "adapter":
            raise ConfigError(
                "engine.update is sleep, which drops a server's weights, and engine.weights is adapter, which brings no "
                "others; leave it at auto, which sends the merged weights"
            )
        if self.update == "sleep" and self.weights == "nccl":
            raise ConfigError(
                "engine.update is sleep and engine.weights is nccl, which makes no group of two processes on one GPU; use "
                "ipc, or leave it at auto"
            )
        if self.urls and self.launch is not None:
            raise ConfigError("set engine.urls (a server that runs) or engine.launch (one to start), not both")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"engine.urls has {url!r}; write it with its scheme, for example http://127.0.0.1:8000")
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ConfigError(f"engine.urls names a server twice: {self.urls}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEngineOptions(AskedOptions):
    """An engine that another package offers."""

    GROUP: ClassVar[str] = "polyturn.engines"
    """The entry points that `kind` names one of."""

    kind: NameOrObject
    """The name of its entry point."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of that engine."""


AnyEngineOptions = EmbeddedOptions | ServerOptions | OwnEngineOptions
"""The section `engine`; its `kind` says which."""


def is_deterministic(options: AnyEngineOptions) -> bool:
    """Return whether the engine promises equal bits, whatever other requests it serves."""
    return isinstance(options, EmbeddedOptions) and options.deterministic
