"""The section `engine`: what samples completions, in this process or on servers, and how new weights reach it.

    engine: {kind: vllm, launch: {replicas: 2, devices: ["0", "1"]}}

Which keys go together is checked here: a server's key on the embedded engine is an error before anything starts.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from polyturn.config.models.base import Section


class LaunchConfig(Section):
    """How a server is started; the flags that training relies on are added by themselves."""

    python: str | None = None
    """The interpreter of the environment that vLLM or SGLang is installed in; null takes the one that runs polyturn."""
    args: list[str] = []
    """Further arguments of the server, for instance ["--tensor-parallel-size", "2"]."""
    env: dict[str, str] = {}
    """Further environment variables of the server."""
    replicas: int = Field(1, ge=1)
    """How many servers are started."""
    devices: list[str] = []
    """For each server the GPUs that it sees, for instance ["0,1", "2,3"]; needed on GPUs where there are several servers."""
    max_restarts: int = Field(3, ge=0)
    """How often a server is started again that died or hangs; then the run goes on without it."""
    ready_timeout_s: float = Field(600.0, gt=0)
    """Seconds until a server that was started must answer."""
    log: str | None = None
    """File for the server's output; null keeps it only until the server stops. Of several servers, number 1 and on write to
    FILE.1 and so on."""


class EngineConfig(Section):
    """What samples the completions: the embedded engine in this process, or a server."""

    kind: str = "embedded"
    """The engine in this process (embedded), servers (vllm, sglang), or another entry point of `polyturn.engines`."""
    kwargs: dict[str, Any] = {}
    """Arguments of an engine that another package offers."""
    urls: list[str] = []
    """Where servers run already; they must hold the same model and run with the flags that docs/guides/engines.md lists."""
    api_key_env: str | None = None
    """The environment variable that holds the key which those servers demand (their `--api-key`)."""
    launch: LaunchConfig | None = None
    """Start a server; null does so with the defaults where `urls` is empty. Not for the embedded engine."""
    max_in_flight: int = Field(256, ge=1)
    """Requests on a server at once; more wait here."""
    timeout_s: float = Field(600.0, gt=0)
    """A request to a server that takes longer counts as lost."""
    health_s: float = Field(20.0, gt=0)
    """A server at work that twice in a row does not say within this time that it is well counts as lost."""
    patience_s: float = Field(600.0, gt=0)
    """How long a request waits while no server is up."""
    max_tries: int = Field(8, ge=1)
    """How often one request may be lost with its server before its trajectory fails."""
    order: str = "longest_first"
    """Which waiting request is sent next, to a server: fifo, least_loaded, longest_first, or `file.py:Class` of an
    OrderPolicy."""
    order_kwargs: dict[str, Any] = {}
    """Arguments of the order's class, for instance {age: 2.0} of longest_first."""
    weights: Literal["auto", "shared_memory", "disk", "ipc", "http", "group", "gloo", "nccl"] = "auto"
    """The way of new weights to a server: a file in this machine's memory, a folder that both see, handles of memory that
    the server opens (ipc; on a GPU they stay there), tensors over HTTP, or a process group (gloo between processors, nccl
    between GPUs; group is nccl where the trainer has a GPU). auto is shared_memory, and http where a server is elsewhere."""
    weights_folder: str | None = None
    """For `weights: disk`: a folder that the servers see too, under the same path."""
    num_slots: int = Field(128, ge=1)
    """Embedded: sequences decoded at once, and conversations whose KV cache is kept."""
    prefill_chunk: int = Field(256, ge=8)
    """Embedded: the longest piece of one prompt in one forward pass."""
    deterministic: bool = False
    """Embedded: batches of one shape and prefill one by one, so that bits do not depend on who else is served; slower."""
    process: Literal["auto", "shared", "own"] = "auto"
    """Embedded: `shared` samples from the trainer's own parameters, in turns with training; `own` samples in a process of
    its own while training runs; auto is own where train.max_staleness is above 0."""
    num_threads: int | None = Field(None, ge=1)
    """Embedded, in a process of its own: threads of torch there; null takes as many as the trainer has."""
    update: Literal["in_flight", "wait", "abort_resume"] = "in_flight"
    """What new weights do to completions that are being sampled: they go on with the new ones (in_flight), the weights wait
    for their end (wait), or they are suspended and resumed as new requests (abort_resume)."""

    @model_validator(mode="after")
    def _one_place(self) -> EngineConfig:
        if self.kind != "embedded" and (self.process == "own" or self.num_threads is not None):
            raise ValueError(
                f"engine.process and engine.num_threads are for the embedded engine; a {self.kind} server has a process of "
                "its own anyway"
            )
        if self.kind == "embedded" and (self.urls or self.launch is not None):
            raise ValueError(
                "engine.urls and engine.launch are for servers; set engine.kind to vllm or sglang, or drop them"
            )
        if self.kind == "embedded" and (self.weights != "auto" or self.weights_folder is not None):
            raise ValueError("engine.weights and engine.weights_folder are for servers; the embedded engine needs no way")
        if (self.weights == "disk") != (self.weights_folder is not None):
            raise ValueError(
                f"engine.weights is {self.weights} and engine.weights_folder is {self.weights_folder}; disk needs a folder "
                "that the servers see under the same path, and no other way has one"
            )
        if self.urls and self.launch is not None:
            raise ValueError("set engine.urls (a server that runs) or engine.launch (one to start), not both")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"engine.urls has {url!r}; write it with its scheme, for example http://127.0.0.1:8000")
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError(f"engine.urls names a server twice: {self.urls}")
        if self.launch is not None and self.launch.devices and len(self.launch.devices) != self.launch.replicas:
            raise ValueError(
                f"engine.launch has {self.launch.replicas} replicas and names GPUs for {len(self.launch.devices)}; give "
                'engine.launch.devices one entry for each, such as ["0,1", "2,3"]'
            )
        return self
