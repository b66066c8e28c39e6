"""SglangEngine: a client of an SGLang server's native route.

    POST /generate   {"input_ids": […], "sampling_params": {…}, "rid": …}   ->   ids, logprobs, weight versions

Its logprobs are log_softmax(logits / temperature) over the full vocabulary, whatever top-p and top-k say: what training
means by a logprob. Request ids are random and of one length, because aborting one there also aborts every id that starts
with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from polyturn.core.errors import EngineError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import EngineCapabilities
from polyturn.engines.completion_parts import version_runs
from polyturn.engines.remote import Call, RemoteEngine, ServerFacts

_LOAD_TIMEOUT_S = 600.0
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class SglangEngine(RemoteEngine):
    """One SGLang server."""

    name = "sglang"

    def __init__(self, url: str, *, seeded: bool = False, **options: Any) -> None:
        """See `RemoteEngine`; `seeded`: it runs with --enable-deterministic-inference, as far as is known."""
        super().__init__(url, **options)
        self._seeded = seeded

    @property
    def capabilities(self) -> EngineCapabilities:
        """Logprobs in training's meaning; seeds only where the server samples deterministically."""
        return EngineCapabilities(
            seeded=self._seeded if self._facts is None else self._facts.seeded,
            logprobs=True,
            pause_modes=("abort", "in_place", "retract"),
            max_context=self._context,
            priorities=self._facts is not None and self._facts.priorities,
        )

    async def _describe(self) -> ServerFacts:
        found = await self._link.get("/server_info")
        return ServerFacts(
            seeded=bool(found.get("enable_deterministic_inference")),
            priorities=bool(found.get("enable_priority_scheduling")) and not found.get("schedule_low_priority_values_first"),
            max_context=found.get("context_length"),
        )

    async def _look(self) -> None:
        await self._link.get("/health_generate", timeout_s=self._health_s)  # asks for a token unless tokens are coming

    def _call(self, request: GenerateRequest, wire_id: str) -> Call:
        sampling = request.sampling
        parameters: dict[str, Any] = {
            "max_new_tokens": self._room(request),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": not sampling.stop_token_ids,
        }
        facts = self._facts
        if sampling.seed is not None and (self._seeded if facts is None else facts.seeded):
            parameters["sampling_seed"] = sampling.seed & 0x7FFFFFFF
        body = {
            "rid": wire_id,
            "input_ids": request.prompt_ids,
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if facts is not None and facts.priorities:
            body["priority"] = round(request.priority)  # the highest goes first there
        return Call("/generate", body)

    def _read(self, request: GenerateRequest, reply: Any) -> Completion:
        meta = reply["meta_info"]
        ids = np.asarray(reply["output_ids"], np.int32)
        triples = meta.get("output_token_logprobs") or []
        reason = meta["finish_reason"]
        if reason.get("matched") == "NaN happened":
            raise EngineError(f"{self.url} met a NaN while it answered {request.request_id!r}; its weights are broken")
        runs = [(s["start"], self.version_of(s["version"])) for s in meta.get("weight_versions") or []]
        return Completion(
            token_ids=ids,
            logprobs=np.asarray([triple[0] for triple in triples], np.float32),
            finish_reason=_FINISH[reason["type"]],
            policy_versions=version_runs(runs, current=self.version),
            info={"prefilled_tokens": len(request.prompt_ids) - int(meta.get("cached_tokens") or 0)},
        )

    async def _abort(self, wire_id: str) -> None:
        await self._post("/abort_request", {"rid": wire_id}, timeout_s=5.0)

    async def _pause(self) -> None:
        await self._post("/pause_generation", {"mode": "retract"})

    async def _load(self, folder: Path, version: int) -> None:
        body = {"model_path": str(folder), "weight_version": self.tag(version), "flush_cache": True}
        reply = await self._post("/update_weights_from_disk", body, timeout_s=_LOAD_TIMEOUT_S)
        if not reply["success"]:
            raise EngineError(f"{self.url} did not take the weights of version {version}: {reply['message']}")

    async def _forget(self) -> None:
        await self._post("/flush_cache?timeout=30")  # it waits for the requests that run

    async def _resume(self) -> None:
        await self._post("/continue_generation", {})
