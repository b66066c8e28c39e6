"""Servers on the trainer's own GPUs: the order of calls around an update, requests, and lost servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from polyturn.core.errors import EngineError, EngineLostError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.core.protocols import EngineCapabilities
from polyturn.engines.base import BaseEngine
from polyturn.engines.pool import EnginePool
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.vllm import VllmEngine
from polyturn.engines.weights.folder import WrittenWeights
from support.refusals import refuses_later
from support.services import serving
from support.virtual_time import run_virtual

KINDS: dict[str, type[RemoteEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}
SLEEP = {
    "vllm": ["/sleep?level=2&mode=abort"],
    "sglang": ["/pause_generation retract", "/release_memory_occupation kv_cache,weights"],
}
WAKE = {
    "vllm": ["/wake_up?tags=weights", "/collective_rpc", "/update_weight_version", "/wake_up?tags=kv_cache"],
    "sglang": [
        "/resume_memory_occupation weights",
        "/update_weights_from_disk",
        "/update_weight_version",
        "/resume_memory_occupation kv_cache",
        "/continue_generation",
    ],
}
ASKED = {"vllm": "/inference/v1/generate", "sglang": "/generate"}


class Scripted:
    """A server that speaks as vLLM and SGLang do, records its commands, and answers requests when it is awake."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.refuses = ""
        self.version = ""
        self.is_awake = asyncio.Event()
        self.is_awake.set()
        self.is_cut = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        path = request.path
        if path == "/server_info":
            config = {
                "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 64},
                "aux_output_config": {"enable_return_routed_experts": False},
                "scheduler_config": {"policy": "fcfs"},
            }
            return web.json_response({"vllm_config": config, "version": "0.5.21"})
        if path in ("/get_world_size", "/version"):
            return web.json_response({"world_size": 1, "version": "0.32.0"})
        if path in ASKED.values():
            return web.json_response(await self.sample(path, body))
        self.told.append(" ".join([request.path_qs, *([body["mode"]] if "mode" in body else []), *self.tags(body)]))
        if path == self.refuses:
            return web.json_response({"error": "no"}, status=400)
        if path in ("/sleep", "/release_memory_occupation"):
            self.is_awake.clear()
            self.is_cut.set()
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path in ("/wake_up", "/resume_memory_occupation") and "kv_cache" in self.told[-1]:
            self.is_awake.set()
        return web.json_response({"status": "awake", "success": True, "message": "", "results": [None]})

    @staticmethod
    def tags(body: dict[str, Any]) -> list[str]:
        return [",".join(body["tags"])] if "tags" in body else []

    async def sample(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a request for four tokens: two before it is cut by vLLM's sleep, or all once SGLang is awake."""
        self.told.append(f"{path} {len(body.get('token_ids') or body['input_ids'])} tokens")
        is_first = not self.is_cut.is_set()
        if is_first:
            await self.is_cut.wait()
        if path == ASKED["sglang"]:
            await self.is_awake.wait()
            triples = [[-1.0, 7, None]] * 4
            spans = [{"version": self.version, "start": 0, "end": 4}]
            reason = {"type": "length"}
            meta = {"output_token_logprobs": triples, "finish_reason": reason, "prompt_tokens": 2, "weight_versions": spans}
            return {"output_ids": [7] * 4, "meta_info": meta}
        ids = [7, 7]
        choice = {
            "token_ids": ids,
            "logprobs": {"content": [{"logprob": -1.0}] * 2},
            "weight_versions": [{"start": 0, "version": self.version}],
            "finish_reason": "abort" if is_first else "length",
        }
        return {"choices": [choice], "usage": {}}


@contextlib.asynccontextmanager
async def scripted(kind: str, folder: Path) -> AsyncIterator[tuple[Scripted, RemoteEngine]]:
    async with serving((server := Scripted()).handle) as url:
        engine = KINDS[kind](url, ServedModel(vocab_size=16, folder=folder))
        yield server, engine
        await engine.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def ask(name: str = "r") -> GenerateRequest:
    return GenerateRequest(request_id=name, session_id=name, prompt_ids=[1, 2], sampling=SamplingParams(max_tokens=4))


@pytest.mark.parametrize("kind", KINDS)
async def test_server_sleeps_before_an_update_and_wakes_in_order(kind: str, folder: Path) -> None:
    async with scripted(kind, folder) as (server, engine):
        asked = asyncio.create_task(engine.generate(ask()))
        while not server.told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await engine.sleep()
        held = asyncio.create_task(engine.generate(ask("held")))
        await asyncio.sleep(0.1)
        first = [f"{ASKED[kind]} 2 tokens"]
        assert server.told == first + SLEEP[kind], "nothing is asked of a server that sleeps"
        assert not asked.done() and not held.done()
        await engine.update_weights(1, weights=WrittenWeights(folder))
        said = await asyncio.gather(asked, held)
        assert server.told[: len(first + SLEEP[kind] + WAKE[kind])] == first + SLEEP[kind] + WAKE[kind]
        again = server.told[len(first + SLEEP[kind] + WAKE[kind]) :]
        # A request that vLLM cut continues after its two tokens; SGLang puts it back into its own queue.
        assert sorted(again) == sorted([f"{ASKED[kind]} 2 tokens", *([f"{ASKED[kind]} 4 tokens"] if kind == "vllm" else [])])
        assert len(said[0].token_ids) == 4 and said[0].policy_versions[-1][1] == 1
        server.told.clear()
        await engine.update_weights(2, weights=WrittenWeights(folder))
        assert not any("wake_up" in call or "memory" in call for call in server.told), "it was awake"


async def test_request_of_another_process_goes_on_behind_a_cut(folder: Path) -> None:
    """A rollout worker may see that its request was cut before it hears of the update."""
    async with scripted("vllm", folder) as (server, engine):
        worker = VllmEngine("", ServedModel(vocab_size=16))
        worker.follow(engine.view, is_open=True)
        asked = asyncio.create_task(worker.generate(ask()))
        while not server.told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await engine.sleep()
        completion = await asked
        await worker.close()
    assert len(completion.token_ids) == 4 and completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", KINDS)
async def test_failed_load_wakes_the_server_with_unfinished_weights(kind: str, folder: Path) -> None:
    async with scripted(kind, folder) as (server, engine):
        await engine.sleep()
        server.refuses = WAKE[kind][1]
        await refuses_later(lambda: engine.update_weights(1, weights=WrittenWeights(folder)), EngineError, "does not load")
        assert server.version.endswith("unfinished") and server.is_awake.is_set()


class Supervised:
    """A supervisor of a running server, until it is stopped."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.server = self
        self.num_restarts = self.num_stops = 0

    async def start(self) -> Supervised:
        return self

    async def stop(self) -> None:
        self.num_stops += 1


async def test_own_silent_server_is_stopped_and_a_foreign_one_fails(folder: Path) -> None:
    async with scripted("vllm", folder) as (_, engine):
        url, model = engine.url, ServedModel(vocab_size=16, folder=folder)
        supervisor = Supervised(url)
        mine, theirs = VllmEngine("", model, supervisor=supervisor), VllmEngine(url, model)  # type: ignore[arg-type]
        for one in (mine, theirs):
            await one._met()
    await mine.sleep()
    assert supervisor.num_stops == 1, "it might hold the memory that the trainer is about to use"
    with pytest.raises(EngineLostError):
        await theirs.sleep()
    await asyncio.gather(mine.close(), theirs.close())


class Restarting(BaseEngine):
    """A server that is lost with its first request, starts in ten seconds, and says when it sleeps and starts."""

    capabilities = EngineCapabilities(logprobs=True)
    num_restarts = 0

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log
        self.is_lost = False

    async def generate(self, request: GenerateRequest) -> Completion:
        if request.request_id == "deadly":
            self.is_lost = True
        if self.is_lost:
            raise EngineLostError("it died")
        return Completion(token_ids=[1], logprobs=[-1.0], finish_reason=FinishReason.STOP, policy_versions=((0, 1),))

    async def abort(self, request_id: str) -> None:
        raise NotImplementedError

    async def sleep(self) -> None:
        self.log.append("sleep")

    async def update_weights(self, version: int, *, weights: Any = None) -> None:
        self.log.append(f"weights {version}")
        if self.is_lost:
            raise EngineLostError("it is dead")

    async def revive(self) -> None:
        self.log.append("start")
        await asyncio.sleep(10)
        self.log.append("started")
        self.is_lost = False


def test_lost_server_is_started_when_its_pool_wakes() -> None:
    log: list[str] = []

    async def main() -> None:
        pool = EnginePool([Restarting([]), lost := Restarting(log)], max_tries=1)
        await pool.update_weights(1)
        lost.is_lost = True
        pool.exclude(pool.replicas[1], EngineError("it died"))
        await asyncio.sleep(5)  # it starts
        assert log == ["weights 1", "start"]
        await pool.sleep()
        await asyncio.sleep(60)  # the update
        assert log == ["weights 1", "start", "sleep"], "its start was broken off, and no other began"
        await pool.update_weights(1)
        await asyncio.sleep(60)
        assert log[3:6] == ["weights 1", "start", "started"]
        await pool.sleep()
        await pool.update_weights(2)
        assert all(replica.is_live for replica in pool.replicas), "this pool keeps no weights, so it got the next ones"
        await pool.close()

    run_virtual(main())
