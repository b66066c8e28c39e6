"""VllmEngine: a client of a vLLM server's token-in, token-out route.

    POST /inference/v1/generate   {"token_ids": […], "sampling_params": {…}}   ->   ids, logprobs, weight versions

The server must run with `--enable-scale-out` (the route), `--logprobs-mode processed_logprobs` (logprobs after the
temperature) and `VLLM_SERVER_DEV_MODE=1` (pause and weight routes). Its processed logprobs are also after top-p and top-k,
which is not what training means by a logprob, so a run that samples with those is refused when it is built.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from polyturn.core.continuation import version_runs
from polyturn.core.errors import ConfigError, EngineError, one_line
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import Engine, EngineCapabilities
from polyturn.engines.base import EngineSetup
from polyturn.engines.dialect import HttpCall, ServerFacts, ServerLoad
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.serve_commands import vllm_command
from polyturn.engines.served import build_servers
from polyturn.engines.weight_checksums import ServerChecksums
from polyturn.engines.weight_files import WrittenWeights
from polyturn.engines.weight_handles import SharedBucket
from polyturn.engines.weight_transport import buckets

if TYPE_CHECKING:
    from torch import Tensor

_LOAD_TIMEOUT_S = 600.0
_LOAD = ("num_requests_waiting", "kv_cache_usage_perc")
"""Its metrics' names of the fields of a `ServerLoad`."""
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class VllmEngine(RemoteEngine):
    """One vLLM server."""

    name = "vllm"
    routes_env: ClassVar[Mapping[str, str]] = {"VLLM_USE_V2_MODEL_RUNNER": "1"}

    @property
    def capabilities(self) -> EngineCapabilities:
        """Seeded; logprobs in training's meaning as long as neither top-p nor top-k is set."""
        return EngineCapabilities(
            seeded=True,
            logprobs=True,
            media=self._media.is_there,
            pause_modes=("abort", "wait", "keep"),
            max_context=self._context,
            priorities=self._facts is not None and self._facts.priorities,
            routes=self._routes.are_wanted,
        )

    async def _describe(self) -> ServerFacts:
        try:
            found = await self._post("/collective_rpc", {"method": "polyturn_describe"})
        except EngineError as problem:
            raise EngineError(
                f"the server at {self.url} cannot be used for training; start it with VLLM_SERVER_DEV_MODE=1 and the flags "
                f"in docs/guides/engines.md ({one_line(problem)})"
            ) from problem
        facts = found["results"][0]
        if facts["logprobs_mode"] != "processed_logprobs":
            raise EngineError(
                f"the vLLM server at {self.url} runs with --logprobs-mode {facts['logprobs_mode']}; training needs "
                "processed_logprobs, those after the temperature"
            )
        self._routes.check_given(bool(facts.get("routes")), url=self.url)
        return ServerFacts(
            seeded=True,
            priorities=facts["policy"] == "priority",
            max_context=facts["max_model_len"],
            num_workers=len(found["results"]),
            checksums=bool(facts.get("checksums")),
        )

    async def checksums(self) -> ServerChecksums | None:
        """Return the checksums of what each worker holds; None from a server with an older copy of our worker."""
        await self._met()
        if self._facts is None or not self._facts.checksums:
            return None
        return ServerChecksums.read((await self._rpc("polyturn_checksums"))["results"])

    async def _look(self) -> None:
        await self._link.get("/is_sleeping", timeout_s=self._health_s)  # answered by the engine between two steps

    async def _read_load(self) -> ServerLoad | None:
        text = await self._link.get_text("/metrics", timeout_s=self._health_s)
        found = [re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.M) for name in _LOAD]
        if not all(found):
            return None
        queues, uses = ([float(value) for value in values] for values in found)  # one of each engine behind the front
        return ServerLoad(sum(queues), sum(uses) / len(uses))

    def _call(self, request: GenerateRequest, wire_id: str) -> HttpCall:
        sampling = request.sampling
        parameters: dict[str, Any] = {
            "max_tokens": self._room(request),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "logprobs": 0,
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
        if self._facts is not None and self._facts.priorities:
            body["priority"] = -round(request.priority)  # the lowest goes first there
        return HttpCall("/inference/v1/generate", body)

    def _read(self, request: GenerateRequest, reply: Any) -> Completion:
        if request.media:
            self._media.check(request, reply["prompt_token_ids"] == request.prompt_ids.tolist(), url=self.url)
        choice = reply["choices"][0]
        ids = np.asarray(choice["token_ids"] or [], np.int32)
        content = (choice["logprobs"] or {}).get("content") or []
        spans = choice["weight_versions"] or []
        usage = reply["usage"] or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Completion(
            token_ids=ids,
            logprobs=np.asarray([entry["logprob"] for entry in content], np.float32),
            finish_reason=_FINISH[choice["finish_reason"]],
            policy_versions=version_runs([(s["start"], self.version_of(s["version"])) for s in spans], current=self.version),
            routed_experts=self._routes.read_npy(request, len(ids), choice.get("routed_experts")),
            info={"prefilled_tokens": len(request.prompt_ids) - cached},
        )

    async def _abort(self, wire_id: str) -> None:
        await self._post("/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{wire_id}"]}, timeout_s=5.0)

    async def _pause(self) -> None:
        await self._post("/pause?mode=keep")

    async def _load(self, folder: Path, version: int) -> None:
        rpc = {"method": "polyturn_load_weights", "kwargs": {"folder": str(folder)}, "timeout": _LOAD_TIMEOUT_S}
        said = await self._post("/collective_rpc", rpc, timeout_s=_LOAD_TIMEOUT_S)
        if "no folder" in said["results"]:
            raise EngineError(
                f"the server at {self.url} does not see {folder}; let it share this machine's memory, or set engine.weights "
                "to http, or to disk with an engine.weights_folder that both see"
            )
        await self._renamed(version)

    async def _send(self, weights: WrittenWeights, version: int) -> None:
        group = self._group
        known = group is not None and "True" in (await self._rpc("polyturn_has_group", name=group.name))["results"]
        group = await self._joined_group(
            lambda new: self._rpc(
                "polyturn_join", host=new.host, port=new.port, size=new.size, name=new.name, backend=new.backend
            ),
            is_known=known,
        )
        for bucket in buckets(weights):
            if self._way == "ipc":
                await self._hand_over(bucket)
            elif group is None:
                data = await asyncio.to_thread(_encoded, bucket)
                await self._rpc("polyturn_hold", data=data)
            else:
                shapes = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in bucket.items()]
                theirs = self._rpc("polyturn_receive", name=group.name, tensors=shapes)
                await group.broadcast(list(bucket.values()), theirs)
        await self._rpc("polyturn_load_held")
        await self._renamed(version)

    async def _hand_over(self, bucket: Mapping[str, Tensor]) -> None:
        """Let the workers open the memory that `bucket` lies in; what they are told is plain values, no pickle."""
        shared = await asyncio.to_thread(SharedBucket, bucket)
        try:
            workers = 1 if self._facts is None else self._facts.num_workers
            await self._rpc("polyturn_open", handles=[shared.handle() for _ in range(workers)], places=shared.places)
        finally:
            shared.close()

    async def _leave_group(self, name: str) -> None:
        await self._rpc("polyturn_leave", name=name)

    async def _rpc(self, method: str, **arguments: Any) -> Any:
        rpc = {"method": method, "kwargs": arguments, "timeout": _LOAD_TIMEOUT_S}
        return await self._post("/collective_rpc", rpc, timeout_s=_LOAD_TIMEOUT_S)

    async def _renamed(self, version: int) -> None:
        await self._forget()
        await self._rename(self.tag(version))

    async def _rename(self, tag: str) -> None:
        await self._post("/update_weight_version", {"new_version": tag})

    async def _forget(self) -> None:
        if not (await self._post("/reset_prefix_cache?reset_running_requests=true"))["success"]:
            raise EngineError(f"{self.url} keeps the prefixes that it computed before")

    async def _resume(self) -> None:
        await self._post("/resume")


def _encoded(bucket: Mapping[str, Tensor]) -> str:
    """Return tensors as text: safetensors, in base64."""
    from safetensors.torch import save

    return base64.b64encode(save({name: t.cpu() for name, t in bucket.items()})).decode("ascii")


def build(setup: EngineSetup) -> Engine:
    """Make a pool of vLLM servers.

    Raises:
        ConfigError: the section `engine` asks for what they cannot do, or vLLM is not installed.
    """
    sampling = setup.sampling
    if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0):
        raise ConfigError(
            f"rollout.sampling has top_p {sampling.top_p} and top_k {sampling.top_k}, and vLLM's logprobs are then those "
            "after the cut, which training must not use; leave both off, or use engine.kind: sglang or embedded"
        )
    return build_servers(setup, VllmEngine, vllm_command)
