"""SglangEngine: a client of an SGLang server's native route.

    POST /generate   {"input_ids": […], "sampling_params": {…}, "rid": …}   ->   ids, logprobs, weight versions

Its logprobs are log_softmax(logits / temperature) over the full vocabulary, whatever top-p and top-k say: what training
means by a logprob. Request ids are random and of one length, because aborting one there also aborts every id that starts
with it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polyturn.core.continuation import version_runs
from polyturn.core.errors import EngineError, EngineLostError, one_line
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import Engine, EngineCapabilities
from polyturn.engines.base import EngineSetup
from polyturn.engines.dialect import HttpCall, ServerFacts, ServerLoad
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.serve_commands import sglang_command
from polyturn.engines.served import build_servers
from polyturn.engines.weight_checksums import ServerChecksums
from polyturn.engines.weight_files import WrittenWeights
from polyturn.engines.weight_group import WeightGroup
from polyturn.engines.weight_handles import SharedBucket
from polyturn.engines.weight_transport import buckets

if TYPE_CHECKING:
    from torch import Tensor

_LOAD_TIMEOUT_S = 600.0
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class SglangEngine(RemoteEngine):
    """One SGLang server."""

    name = "sglang"
    _has_sessions = True
    """Whether tensors are taken between /begin_weight_update and /end_weight_update, as newer servers want it."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Logprobs in training's meaning; seeds only where the server samples deterministically."""
        return EngineCapabilities(
            seeded=self._facts is not None and self._facts.seeded,
            logprobs=True,
            media=self._media.is_there,
            pause_modes=("abort", "in_place", "retract"),
            max_context=self._context,
            priorities=self._facts is not None and self._facts.priorities,
            routes=self._routes.are_wanted,
        )

    async def _describe(self) -> ServerFacts:
        found = await self._link.get("/server_info")
        numbers = re.findall(r"\d+", str(found.get("version") or "0.5.21"))
        self._has_sessions = tuple(map(int, numbers[:3])) >= (0, 5, 21)
        self._routes.check_given(bool(found.get("enable_return_routed_experts")), url=self.url)
        return ServerFacts(
            seeded=bool(found.get("enable_deterministic_inference")),
            priorities=bool(found.get("enable_priority_scheduling")) and not found.get("schedule_low_priority_values_first"),
            max_context=found.get("context_length"),
            num_workers=int(found.get("tp_size") or 1) * int(found.get("pp_size") or 1),
        )

    async def checksums(self) -> ServerChecksums | None:
        """Return the checksums of what each rank holds; None from a server without our plug-in: its own do not add up."""
        await self._met()
        try:
            reply = await self._post("/weights_checker", {"action": "checksum"}, timeout_s=_LOAD_TIMEOUT_S)
        except EngineLostError:
            raise
        except EngineError:
            return None
        return ServerChecksums.read([rank["checksums"] for rank in (reply or {}).get("ranks") or ()])

    async def _look(self) -> None:
        await self._link.get("/health_generate", timeout_s=self._health_s)  # asks for a token unless tokens are coming

    async def _read_load(self) -> ServerLoad | None:
        found = (await self._link.get("/v1/loads?include=core", timeout_s=self._health_s) or {}).get("loads")
        if not found:
            return None
        uses = [float(rank["token_usage"]) for rank in found]
        return ServerLoad(float(sum(rank["num_waiting_reqs"] for rank in found)), sum(uses) / len(uses))

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
        if facts is not None and facts.priorities:
            body["priority"] = round(request.priority)  # the highest goes first there
        return HttpCall("/generate", body)

    def _read(self, request: GenerateRequest, reply: Any) -> Completion:
        meta = reply["meta_info"]
        if request.media:
            self._media.check(request, meta["prompt_tokens"] == len(request.prompt_ids), url=self.url)
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
            routed_experts=self._routes.read_bytes(request, len(ids), meta.get("routed_experts")),
            info={"prefilled_tokens": len(request.prompt_ids) - int(meta.get("cached_tokens") or 0)},
        )

    async def _abort(self, wire_id: str) -> None:
        await self._post("/abort_request", {"rid": wire_id}, timeout_s=5.0)

    async def _pause(self) -> None:
        await self._post("/pause_generation", {"mode": "retract"})

    async def _load(self, folder: Path, version: int) -> None:
        body = {"model_path": str(folder), "weight_version": self.tag(version), "flush_cache": True}
        try:
            await self._told("/update_weights_from_disk", body)
        except EngineLostError:
            raise
        except EngineError as problem:
            raise EngineError(
                f"the server did not take the weights of version {version} from {folder}; if it does not see that folder, "
                f"set engine.weights to http, or to disk with an engine.weights_folder for both ({one_line(problem)})"
            ) from problem

    async def _send(self, weights: WrittenWeights, version: int) -> None:
        known = self._group is not None
        if known:  # a server that was started again since has left the group, and would die of the next broadcast
            known = (await self._link.get("/model_info")).get("weight_version") == self.tag(self.version)
        group = await self._joined_group(self._join, is_known=known)
        if self._has_sessions:
            await self._told("/begin_weight_update", {"selector": "target"})
        try:
            for bucket in buckets(weights):
                await self._send_bucket(bucket, group)
        except BaseException:
            if self._has_sessions:  # one that stays open refuses the next weights
                with contextlib.suppress(EngineError):
                    await self._told("/end_weight_update", {})
            raise
        if self._has_sessions:
            await self._told("/end_weight_update", {})
        await self._post("/flush_cache")  # with no wait: what was running stands in the queue again
        await self._rename(self.tag(version))

    async def _rename(self, tag: str) -> None:
        await self._post("/update_weight_version", {"new_version": tag, "abort_all_requests": False})

    async def _send_bucket(self, bucket: Mapping[str, Tensor], group: WeightGroup | None) -> None:
        """Broadcast a bucket; or send it, or on this machine where it lies, in the server's format, a pickle a rank."""
        body: dict[str, Any] = {"flush_cache": False}
        if group is not None:
            body |= {
                "names": list(bucket),
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
                "shapes": [list(tensor.shape) for tensor in bucket.values()],
                "group_name": group.name,
            }
            await group.broadcast(list(bucket.values()), self._told("/update_weights_from_distributed", body))
            return
        workers = 1 if self._facts is None else self._facts.num_workers
        path = "/update_weights_from_tensor"
        if self._way != "ipc":
            data = await asyncio.to_thread(_encoded, bucket)
            await self._told(path, body | {"serialized_named_tensors": [data] * workers})
            return
        shared = await asyncio.to_thread(SharedBucket, bucket)
        try:
            await self._told(path, body | {"serialized_named_tensors": [shared.pickled() for _ in range(workers)]})
        finally:
            shared.close()

    async def _join(self, group: WeightGroup) -> None:
        where = {"master_address": group.host, "master_port": group.port, "rank_offset": 1, "world_size": group.size}
        await self._told("/init_weights_update_group", {**where, "group_name": group.name, "backend": group.backend})

    async def _leave_group(self, name: str) -> None:
        await self._told("/destroy_weights_update_group", {"group_name": name})

    async def _told(self, path: str, body: Mapping[str, Any]) -> None:
        """Post what the server answers with whether it did it."""
        reply = await self._post(path, body, timeout_s=_LOAD_TIMEOUT_S)
        if not reply["success"]:
            raise EngineError(f"{self.url}{path} failed: {reply['message']}")

    async def _forget(self) -> None:
        await self._post("/flush_cache?timeout=30")  # it waits for the requests that run

    async def _resume(self) -> None:
        await self._post("/continue_generation", {})


def _encoded(bucket: Mapping[str, Tensor]) -> str:
    """Return tensors as the server reads them: pickled with their bytes, which another process can open, in base64."""
    return base64.b64encode(pickle.dumps([(name, t.cpu().clone()) for name, t in bucket.items()])).decode("ascii")


def build(setup: EngineSetup) -> Engine:
    """Make a pool of SGLang servers.

    Raises:
        ConfigError: the section `engine` asks for what they cannot do, or SGLang is not installed.
    """
    return build_servers(setup, SglangEngine, sglang_command)
