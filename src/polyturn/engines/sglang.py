"""SglangEngine: a client of an SGLang server's native route.

    POST /generate   {"input_ids": […], "sampling_params": {…}, "rid": …}   ->   ids, logprobs, weight versions

Its logprobs are log_softmax(logits / temperature) over the full vocabulary, independent of top-p and top-k, as in training.
Request ids are random and of equal length, because SGLang's abort also ends every request whose id starts with the given
one.

An adapter is loaded from its folder under a name of its own, and requests name it (`lora_path`); a server that does not see
the folder gets the same files in the request. Each load has its own keys in the prefix cache, so the cache is not dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.continuation import version_runs
from polyturn.core.errors import EngineError, EngineLostError, one_line
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import Engine, EngineCapabilities, EngineLoad
from polyturn.engines.base import EngineSetup
from polyturn.engines.dialect import UNSEEN, HttpCall, Memory, ServerFacts, release
from polyturn.engines.remote import LOAD_TIMEOUT_S, RemoteEngine
from polyturn.engines.request_limits import read_ids, read_logprobs
from polyturn.engines.serve_commands import sglang_command
from polyturn.engines.served import build_servers
from polyturn.engines.weights.checksums import ServerChecksums
from polyturn.engines.weights.sglang import SglangLink, SglangMemoryLink, packed_adapter
from polyturn.engines.weights.stream import Transport, is_here
from polyturn.engines.weights.transfer import TransferServer

_FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
"""Linear layer -> the layer in which SGLang computes it together with others."""
_ADAPTED = frozenset({*_FUSED, *_FUSED.values(), "o_proj", "down_proj"})
"""The layers that SGLang adapts: the linear ones of attention and of dense feed-forward layers."""
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class SglangEngine(RemoteEngine):
    """One SGLang server."""

    name = "sglang"
    tested_version = "0.5.23"
    sleep_flag, share_flag = "--enable-memory-saver", "--mem-fraction-static"
    adapter_flags = "--enable-lora, --max-lora-rank and --lora-target-modules"
    takes_adapter_tensors = True
    _has_sessions = True
    """Whether tensors are sent between /begin_weight_update and /end_weight_update, as newer servers require."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Logprobs as in training; seeded only if the server samples deterministically."""
        return EngineCapabilities(
            seeded=self._facts is not None and self._facts.seeded,
            logprobs=True,
            media=self._media.is_there,
            max_context=self._context,
            routes=self._routes.are_wanted,
        )

    async def _describe(self) -> ServerFacts:
        info = await self._link.get("/server_info")
        self._has_sessions = release(str(info.get("version") or self.tested_version)) >= (0, 5, 21)
        self._routes.check_reported(bool(info.get("enable_return_routed_experts")), url=self.url)
        if self._model.adapter is not None:
            self._check_adapter(self._model.adapter, info)
        return ServerFacts(
            seeded=bool(info.get("enable_deterministic_inference")),
            max_context=info.get("context_length"),
            num_workers=int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1),
            version=str(info.get("version") or ""),
        )

    def _check_adapter(self, adapter: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Raise unless the server's flags, as in `info`, allow adapters with peft's settings `adapter`.

        Raises:
            EngineError: the server cannot load such adapters.
        """
        rank, layers = info.get("max_lora_rank"), info.get("lora_target_modules")  # None: as those in --lora-paths
        fits = rank is None or rank >= adapter["r"]
        adapts = layers is None or "all" in layers or _fused(adapter["target_modules"]) <= _fused(layers)
        if not info.get("enable_lora") or not fits or not adapts or int(info.get("dp_size") or 1) > 1:
            flags, _ = self.adapter_launch(adapter, device="cuda")
            raise EngineError(
                f"the SGLang server at {self.url} cannot load the adapter of model.lora (enable_lora: "
                f"{info.get('enable_lora')}, max_lora_rank: {rank}, lora_target_modules: {layers}, dp_size: "
                f"{info.get('dp_size') or 1}); start it with {' '.join(flags)} and without data parallelism, or set "
                "engine.weights to folder, gloo or nccl, which send the merged weights"
            )

    async def checksums(self) -> ServerChecksums | None:
        """Return the checksums of each rank's tensors; None from a server without the plug-in, whose checksums are not
        additive."""
        await self._met()
        try:
            reply = await super().tell("/weights_checker", {"action": "checksum"})
        except EngineLostError:
            raise
        except EngineError:
            return None
        return ServerChecksums.read([rank["checksums"] for rank in (reply or {}).get("ranks") or ()])

    async def _look(self) -> None:
        await self._link.get("/health_generate", timeout_s=self._health_s)  # generates a token if no request is running

    async def _read_load(self) -> EngineLoad | None:
        loads = (await self._link.get("/v1/loads?include=core", timeout_s=self._health_s) or {}).get("loads")
        if not loads:
            return None
        uses = [float(rank["token_usage"]) for rank in loads]
        return EngineLoad(float(sum(rank["num_waiting_reqs"] for rank in loads)), sum(uses) / len(uses))

    def _call(self, request: GenerateRequest, wire_id: str) -> HttpCall:
        sampling = request.sampling
        parameters: dict[str, Any] = {
            "max_new_tokens": self._room(request),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "stop_token_ids": [*sampling.stop_token_ids, *sampling.banned_token_ids] if sampling.stop_token_ids else [],
            "ignore_eos": not sampling.stop_token_ids,
        }
        facts = self._facts
        if sampling.seed is not None and facts is not None and facts.seeded:
            parameters["sampling_seed"] = sampling.seed & 0x7FFFFFFF
        sent = self._media.prompt(request)
        body: dict[str, Any] = {
            "rid": wire_id,
            "input_ids": sent.ids,
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if self._routes.are_wanted:
            body |= {"return_routed_experts": True, "routed_experts_start_len": request.routed_from}
        if sent.uris:
            body["image_data"] = list(sent.uris)
        if self._adapter is not None:
            body["lora_path"] = self._adapter.name
        return HttpCall("/generate", body)

    def _read(self, request: GenerateRequest, reply: Any) -> Completion:
        meta = reply["meta_info"]
        if request.media and "prompt_tokens" in meta:  # absent if the request was cut while it waited
            self._media.check(request, meta["prompt_tokens"] == len(request.prompt_ids), url=self.url)
        ids = read_ids(reply["output_ids"], vocab_size=self._model.vocab_size, max_tokens=self._room(request))
        triples = meta.get("output_token_logprobs") or []
        reason = meta["finish_reason"]
        if reason.get("matched") == "NaN happened":
            raise EngineError(f"{self.url} produced NaN for {request.request_id!r}; its weights are broken")
        runs = [(s["start"], self.version_of(s["version"])) for s in meta.get("weight_versions") or []]
        return Completion(
            token_ids=ids,
            logprobs=read_logprobs([triple[0] for triple in triples]),
            finish_reason=_FINISH[reason["type"]],
            policy_versions=version_runs(runs, current=self.version),
            routed_experts=self._routes.read_bytes(request, len(ids), meta.get("routed_experts")),
            info={"prefilled_tokens": len(request.prompt_ids) - int(meta.get("cached_tokens") or 0)},
        )

    async def _abort(self, wire_id: str) -> None:
        await self._post("/abort_request", {"rid": wire_id}, timeout_s=5.0)

    async def _pause(self) -> None:
        # A request keeps its adapter to the end, so it is cut and continued with the next adapter.
        await self._post("/pause_generation", {"mode": "retract" if self._adapter is None else "abort"})

    async def load_folder(self, folder: Path) -> None:
        """Make the server load a checkpoint.

        Raises:
            EngineError: the server cannot load it.
        """
        try:
            await self.tell("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True})
        except EngineLostError:
            raise
        except EngineError as problem:
            raise EngineError(f"{self.url} does not load {folder}; {UNSEEN} ({one_line(problem)})") from problem

    async def _load_adapter(self, name: str, folder: Path) -> None:
        if self._sees_folders or await asyncio.to_thread(is_here, self.url):
            await self.tell("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        else:
            body = await asyncio.to_thread(packed_adapter, folder, self.num_workers)
            await self.tell("/load_lora_adapter_from_tensors", {"lora_name": name, **body})

    async def _unload_adapter(self, name: str) -> None:
        await self.tell("/unload_lora_adapter", {"lora_name": name})

    @classmethod
    def adapter_launch(cls, adapter: Mapping[str, Any], *, device: str) -> tuple[list[str], dict[str, str]]:
        """Return the arguments and environment of a server for adapters with peft's settings `adapter`."""
        flags = ["--enable-lora", "--max-lora-rank", str(adapter["r"])]
        # Two at once: the adapter, and the model without it, which the health check uses.
        flags += ["--max-loras-per-batch", "2", "--lora-target-modules", *sorted(adapter["target_modules"])]
        return flags + (["--lora-backend", "torch_native"] if device == "cpu" else []), {}

    @staticmethod
    def adapter_problem(targets: Collection[str]) -> str | None:
        """Return which of `targets` SGLang cannot adapt; None if it can adapt all."""
        others = ", ".join(sorted(set(targets) - _ADAPTED))
        return f"SGLang adapts {', '.join(sorted(_ADAPTED))}, and model.lora also adapts {others}" if others else None

    @staticmethod
    async def open_link(transport: Transport, servers: Sequence[TransferServer], weights: Mapping[str, Any]) -> SglangLink:
        """Return a link for SGLang's weight updates."""
        return await (SglangMemoryLink if transport == "ipc" else SglangLink).open(transport, servers, weights)

    async def tell(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Post to the server and check its success; skip session calls for servers without sessions.

        Raises:
            EngineLostError: the server did not answer.
            EngineError: the server reported a failure.
        """
        if not self._has_sessions and path in {"/begin_weight_update", "/end_weight_update"}:
            return None
        reply = await super().tell(path, body)
        if not reply["success"]:
            raise EngineError(f"{self.url}{path} failed: {reply['message']}")
        return reply

    async def _loaded(self) -> None:
        if self._adapter is None:
            await self._post("/flush_cache")  # without a wait, because running requests are back in the queue

    async def _rename(self, tag: str) -> None:
        await self._post("/update_weight_version", {"new_version": tag, "abort_all_requests": False})

    async def _named(self) -> str:
        return str((await self._link.get("/model_info")).get("weight_version"))

    async def _forget(self) -> None:
        await self._post("/flush_cache?timeout=30")  # waits for running requests

    async def _resume(self) -> None:
        await self._post("/continue_generation", {})

    async def _sleep(self) -> None:
        await self._pause()  # returns running requests to the queue, because the server must be idle
        await self._post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, timeout_s=LOAD_TIMEOUT_S)

    async def _wake(self, memory: Memory) -> None:
        await self._post("/resume_memory_occupation", {"tags": [memory]}, timeout_s=LOAD_TIMEOUT_S)
        if memory == "kv_cache":
            await self._resume()


def _fused(layers: Collection[str]) -> set[str]:
    return {_FUSED.get(layer, layer) for layer in layers}


def build(setup: EngineSetup) -> Engine:
    """Make a pool of SGLang servers.

    Raises:
        ConfigError: SGLang does not support an option of the section `engine`, or is not installed.
    """
    return build_servers(setup, SglangEngine, sglang_command)
