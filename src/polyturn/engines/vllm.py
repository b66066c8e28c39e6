"""VllmEngine: a client of a vLLM server's token-in, token-out route.

    POST /inference/v1/generate   {"token_ids": […], "sampling_params": {…}}   ->   ids, logprobs, weight versions

The server must run with `--enable-scale-out` (the route), `--logprobs-mode processed_logprobs` (logprobs after the
temperature) and `VLLM_SERVER_DEV_MODE=1` (pause and weight routes). Its processed logprobs are normalised after top-p and
top-k, so a run with these needs `keep_support`: the server then also returns the `MAX_SUPPORT` likeliest tokens, in which
removed tokens have no probability.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from polyturn.core.continuation import version_runs
from polyturn.core.errors import ConfigError, EngineError, EngineLostError, one_line
from polyturn.core.generation import MAX_SUPPORT, Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.core.protocols import Engine, EngineCapabilities, EngineLoad
from polyturn.engines.base import EngineSetup
from polyturn.engines.dialect import UNSEEN, HttpCall, Memory, ServerFacts
from polyturn.engines.remote import LOAD_TIMEOUT_S, RemoteEngine
from polyturn.engines.request_limits import read_ids, read_logprobs, read_support
from polyturn.engines.serve_commands import vllm_command
from polyturn.engines.served import build_servers
from polyturn.engines.weights.checksums import ServerChecksums
from polyturn.engines.weights.stream import Transport
from polyturn.engines.weights.transfer import TransferLink, TransferServer
from polyturn.engines.weights.vllm import VllmLink, VllmMemoryLink

_LOAD = ("num_requests_waiting", "kv_cache_usage_perc")
"""vLLM's metrics for the fields of an `EngineLoad`."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks for which vLLM can reserve memory."""
_MAY_LOAD = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""vLLM's variable with which a running server loads adapters."""
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature if a lower one is requested (`_MAX_TEMP` in its `sampling_params.py`), so its logprobs
would not be those of the requested temperature."""


class VllmEngine(RemoteEngine):
    """One vLLM server."""

    name = "vllm"
    tested_version = "0.32.0"
    transfer_package = "vllm"
    routes_env: ClassVar[Mapping[str, str]] = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    sleep_flag, share_flag = "--enable-sleep-mode", "--gpu-memory-utilization"
    adapter_flags = f"--enable-lora, --max-lora-rank and {_MAY_LOAD}=1"

    @property
    def capabilities(self) -> EngineCapabilities:
        """Seeded; logprobs as in training if neither top-p nor top-k is set."""
        return EngineCapabilities(
            seeded=True,
            logprobs=True,
            media=self._media.is_there,
            max_context=self._context,
            routes=self._routes.are_wanted,
            support=True,
            min_temperature=_MIN_TEMPERATURE,
        )

    async def _describe(self) -> ServerFacts:
        try:
            info = await self._link.get("/server_info?config_format=json", timeout_s=LOAD_TIMEOUT_S)
            workers = (await self._link.get("/get_world_size"))["world_size"]
            version = (await self._link.get("/version"))["version"]
        except EngineError as problem:
            if self._follows and isinstance(problem, EngineLostError):
                raise  # the controller has used the server, and restarts it
            raise EngineError(
                f"the server at {self.url} cannot be used for training; start it with VLLM_SERVER_DEV_MODE=1 and the flags "
                f"in docs/guides/engines.md ({one_line(problem)})"
            ) from problem
        config = info["vllm_config"]
        model = config["model_config"]
        if model["logprobs_mode"] != "processed_logprobs":
            raise EngineError(
                f"the vLLM server at {self.url} runs with --logprobs-mode {model['logprobs_mode']}; training needs "
                "processed_logprobs, which include the temperature"
            )
        backend = (config.get("weight_transfer_config") or {}).get("backend")
        if self._transfer is not None and backend != self._transfer.transport:
            raise EngineError(
                f"engine.weights resolves to {self._transfer.transport}, and the vLLM server at {self.url} runs with "
                f"{f'--weight-transfer-config.backend {backend}' if backend else 'no weight transfer'}; start it with "
                f"--weight-transfer-config.backend {self._transfer.transport}, or set engine.weights: folder"
            )
        self._routes.check_reported(bool(config["aux_output_config"]["enable_return_routed_experts"]), url=self.url)
        if self._model.adapter is not None:
            self._check_adapter(self._model.adapter, config.get("lora_config") or {}, info.get("vllm_env") or {})
        return ServerFacts(
            seeded=True,
            max_context=model["max_model_len"],
            num_workers=int(workers),
            version=version,
        )

    def _check_adapter(self, adapter: Mapping[str, Any], lora: Mapping[str, Any], environ: Mapping[str, Any]) -> None:
        """Raise unless a server with these settings of LoRA and of its environment can load adapters like `adapter`.

        Raises:
            EngineError: the server cannot load such adapters.
        """
        rank, may_load = lora.get("max_lora_rank"), environ.get(_MAY_LOAD)  # None: LoRA is off; not reported
        if rank is None or rank < adapter["r"] or may_load is False:
            flags, _ = self.adapter_launch(adapter, device="cuda")
            raise EngineError(
                f"the vLLM server at {self.url} cannot load the adapter of model.lora (max_lora_rank: {rank}, {_MAY_LOAD}: "
                f"{may_load}); start it with {' '.join(flags)} and {_MAY_LOAD}=1, or set engine.weights to folder, gloo or "
                "nccl, which send the merged weights"
            )

    async def checksums(self) -> ServerChecksums | None:
        """Return the checksums of each worker's tensors; None from a server without the plug-in, whose checksums are not
        additive."""
        await self._met()
        try:
            checksums = (await self.tell("/weight_checker", {"action": "checksum"}))["checksums"]
        except EngineLostError:
            raise
        except EngineError:
            return None
        workers: dict[str, dict[str, str]] = {}
        for name, text in checksums.items():  # dp0:pp0:pcp0:tp1:model.norm.weight
            worker, _, tensor = name.rpartition(":")
            workers.setdefault(worker, {})[tensor] = text
        return ServerChecksums.read(list(workers.values()))

    async def _look(self) -> None:
        await self._link.get("/is_sleeping", timeout_s=self._health_s)  # the engine answers it between two steps

    async def _read_load(self) -> EngineLoad | None:
        text = await self._link.get_text("/metrics", timeout_s=self._health_s)
        loads = [re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.M) for name in _LOAD]
        if not all(loads):
            return None
        queues, uses = ([float(value) for value in values] for values in loads)  # one per engine behind the HTTP front
        return EngineLoad(sum(queues), sum(uses) / len(uses))

    def _check(self, request: GenerateRequest, *, live: Container[str] = ()) -> None:
        super()._check(request, live=live)
        if 0 < request.sampling.temperature < _MIN_TEMPERATURE:
            raise EngineError(
                f"request {request.request_id!r} has the temperature {request.sampling.temperature:g}, and vLLM would "
                f"sample at {_MIN_TEMPERATURE:g} instead; request 0 for greedy decoding or at least {_MIN_TEMPERATURE:g}"
            )

    def _call(self, request: GenerateRequest, wire_id: str) -> HttpCall:
        sampling = request.sampling
        parameters: dict[str, Any] = {
            "max_tokens": self._room(request),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": _top_k(sampling),
            "logprobs": MAX_SUPPORT if _keeps_support(sampling) else 0,
            "stop_token_ids": [*sampling.stop_token_ids, *sampling.banned_token_ids],
            "ignore_eos": True,
            "detokenize": False,
        }
        if self._routes.are_wanted:
            parameters["routed_experts_prompt_start"] = request.routed_from
        if sampling.seed is not None:
            parameters["seed"] = sampling.seed
        sent = self._media.prompt(request)
        body: dict[str, Any] = {"request_id": wire_id, "token_ids": sent.ids, "sampling_params": parameters}
        if sent.uris:
            images = zip(sent.uris, sent.keys, strict=True)
            body["content_parts"] = [{"type": "image_url", "url": uri, "uuid": key} for uri, key in images]
            body["return_token_ids"] = True
        if self._adapter is not None:
            body["model"] = self._adapter.name
        return HttpCall("/inference/v1/generate", body)

    def _read(self, request: GenerateRequest, reply: Any) -> Completion:
        if request.media:
            self._media.check(request, reply["prompt_token_ids"] == request.prompt_ids.tolist(), url=self.url)
        choice = reply["choices"][0]
        ids = read_ids(choice["token_ids"], vocab_size=self._model.vocab_size, max_tokens=self._room(request))
        content = (choice["logprobs"] or {}).get("content") or []
        spans = choice["weight_versions"] or []
        usage = reply["usage"] or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Completion(
            token_ids=ids,
            logprobs=read_logprobs([entry["logprob"] for entry in content]),
            support=read_support(content) if _keeps_support(request.sampling) else None,
            finish_reason=_FINISH[choice["finish_reason"]],
            policy_versions=version_runs([(s["start"], self.version_of(s["version"])) for s in spans], current=self.version),
            routed_experts=self._routes.read_npy(request, len(ids), choice.get("routed_experts")),
            info={"prefilled_tokens": len(request.prompt_ids) - cached},
        )

    async def _abort(self, wire_id: str) -> None:
        await self._post("/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{wire_id}"]}, timeout_s=5.0)

    async def _pause(self) -> None:
        # A request keeps its adapter to the end, so it is cut and continued with the next adapter.
        await self._post(f"/pause?mode={'keep' if self._adapter is None else 'abort'}")

    async def load_folder(self, folder: Path) -> None:
        """Make the server load a checkpoint.

        Raises:
            EngineError: the server cannot load it.
        """
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": LOAD_TIMEOUT_S}
        try:
            answers = await self.tell("/collective_rpc", rpc)
        except EngineLostError:
            raise
        except EngineError as problem:
            raise EngineError(f"{self.url} does not load {folder}; {UNSEEN} ({one_line(problem)})") from problem
        if "no folder" in answers["results"]:
            raise EngineError(f"{self.url} does not load {folder}; {UNSEEN}")

    async def _load_adapter(self, name: str, folder: Path) -> None:
        # Not `load_inplace`, with which the server reads an adapter from its folder again for every batch. Earlier adapters
        # need not be unloaded: the server keeps only a few.
        await self.tell("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    @classmethod
    def adapter_launch(cls, adapter: Mapping[str, Any], *, device: str) -> tuple[list[str], dict[str, str]]:
        """Return the arguments and environment of a server for adapters with peft's settings `adapter`."""
        largest = next((known for known in _RANKS if known >= adapter["r"]), adapter["r"])
        flags = ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(largest)]
        return flags, {_MAY_LOAD: "1"}

    @staticmethod
    async def open_link(transport: Transport, servers: Sequence[TransferServer], weights: Mapping[str, Any]) -> TransferLink:
        """Return a link for vLLM's weight transfer."""
        return await (VllmMemoryLink.open(servers) if transport == "ipc" else VllmLink.open(transport, servers, weights))

    async def _loaded(self) -> None:
        await self._forget()

    async def _named(self) -> str:
        return str((await self._link.get("/weight_info"))["weight_version"])

    async def _rename(self, tag: str) -> None:
        await self._post("/update_weight_version", {"new_version": tag})

    async def _forget(self) -> None:
        if not (await self._post("/reset_prefix_cache?reset_running_requests=true"))["success"]:
            raise EngineError(f"{self.url} does not drop its prefix cache")

    async def _resume(self) -> None:
        await self._post("/resume")

    async def _sleep(self) -> None:
        await self._post("/sleep?level=2&mode=abort", timeout_s=LOAD_TIMEOUT_S)  # level 2 keeps no copy of the weights

    async def _wake(self, memory: Memory) -> None:
        woken = await self._post(f"/wake_up?tags={memory}", timeout_s=LOAD_TIMEOUT_S)
        if memory == "kv_cache" and woken["status"] != "awake":
            raise EngineError(f"{self.url} was woken and reports {woken['status']}")


def build(setup: EngineSetup) -> Engine:
    """Make a pool of vLLM servers.

    Raises:
        ConfigError: vLLM does not support an option of the section `engine`, or is not installed.
    """
    sampling = setup.sampling
    if sampling.is_cut and not sampling.keep_support:
        raise ConfigError(
            f"rollout.sampling has top_p {sampling.top_p} and top_k {sampling.top_k}, and vLLM's logprobs are "
            "normalised over the tokens that these keep; add keep_support: true, so that training does the same, or "
            "remove both, or use engine.kind: sglang or embedded"
        )
    return build_servers(setup, VllmEngine, vllm_command)


def _keeps_support(sampling: SamplingParams) -> bool:
    return sampling.keep_support and sampling.is_cut


def _top_k(sampling: SamplingParams) -> int:
    """Return top-k for vLLM: 0 means no limit, and a recorded support has at most `MAX_SUPPORT` tokens."""
    if not _keeps_support(sampling):
        return max(sampling.top_k, 0)
    return min(sampling.top_k, MAX_SUPPORT) if sampling.top_k > 0 else MAX_SUPPORT
