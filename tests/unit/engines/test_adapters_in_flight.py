"""Adapters that change under requests: a vLLM server keeps a request's adapter to its end, and reads it from a folder."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.engines.pool import EnginePool
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.vllm import VllmEngine
from polyturn.engines.weight_files import WeightFolder
from support.services import serving


class Scripted:
    """A server that samples the number in a request's adapter; a request of four tokens stops behind two while `holds`."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.loads: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.version = ""
        self.holds = True
        self.is_late = False
        self.arrived, self.lands, self.is_cut = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        match request.path:
            case "/server_info":
                config = {
                    "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 64},
                    "aux_output_config": {"enable_return_routed_experts": False},
                }
                return web.json_response({"vllm_config": config})
            case "/inference/v1/generate":
                return web.json_response(await self.sample(body))
            case "/v1/load_lora_adapter":
                if body["lora_name"] in self.folders:
                    return web.json_response({"error": "it is there"}, status=400)
                self.loads.append(body)
                self.folders[body["lora_name"]] = Path(body["lora_path"])
            case "/pause" if request.query["mode"] == "abort":
                self.is_cut.set()
            case "/update_weight_version":
                self.version = body["new_version"]
        return web.json_response({"world_size": 1, "version": "0.32.0", "success": True})

    async def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body["model"])
        self.arrived.set()
        if self.is_late:
            await self.lands.wait()
        is_held, self.holds = self.holds, False
        spoke = self.version
        if is_held:
            await self.is_cut.wait()
        count = 2 if is_held else body["sampling_params"]["max_tokens"]
        number = int(load_file(self.folders[body["model"]] / "adapter_model.safetensors")["w"])
        choice = {
            "token_ids": [number] * count,
            "logprobs": {"content": [{"logprob": -1.0}] * count},
            "weight_versions": [{"start": 0, "version": spoke}],
            "finish_reason": "abort" if is_held else "length",
        }
        return {"choices": [choice], "usage": {}}


@contextlib.asynccontextmanager
async def scripted_pool(folder: Path) -> AsyncIterator[tuple[Scripted, EnginePool]]:
    async with serving((server := Scripted()).handle) as url:
        engine = VllmEngine(url, ServedModel(vocab_size=16))
        pool = EnginePool([engine], files=WeightFolder(folder, root=folder, adapter={"r": 1}))
        yield server, pool
        await pool.close()


def adapter(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(float(number))}


def ask() -> GenerateRequest:
    return GenerateRequest(request_id="r", session_id="r", prompt_ids=[1, 2], sampling=SamplingParams(max_tokens=4))


async def test_running_request_goes_on_with_the_next_adapter(tmp_path: Path) -> None:
    async with scripted_pool(tmp_path) as (server, pool):
        await pool.update_weights(5, weights=adapter(5))
        asked = asyncio.create_task(pool.generate(ask()))
        await server.arrived.wait()
        await pool.update_weights(6, weights=adapter(6))
        completion = await asked
    assert completion.token_ids.tolist() == [5, 5, 6, 6]
    assert completion.policy_versions == ((0, 5), (2, 6))
    assert server.asked == [load["lora_name"] for load in server.loads], "each adapter has a name of its own"
    assert not any(load.get("load_inplace") for load in server.loads), "else each batch would read it anew"


async def test_late_request_keeps_its_adapter_and_version(tmp_path: Path) -> None:
    async with scripted_pool(tmp_path) as (server, pool):
        server.holds, server.is_late = False, True
        await pool.update_weights(5, weights=adapter(5))
        asked = asyncio.create_task(pool.generate(ask()))
        await server.arrived.wait()
        await pool.update_weights(6, weights=adapter(6))
        folders = [path for path in server.folders.values() if path.is_dir()]
        server.lands.set()
        completion = await asked
    assert len(folders) == 2
    assert completion.token_ids.tolist() == [5, 5, 5, 5]
    assert completion.policy_versions == ((0, 5),), "the server's own name of its weights is that of version 6"


@pytest.mark.parametrize("is_adapter", [True, False])
def test_latest_adapters_stay_and_whole_weights_do_not(tmp_path: Path, is_adapter: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    with WeightFolder(tmp_path, root=tmp_path, adapter={"r": 1} if is_adapter else None) as files:
        folders = [files.write(adapter(number)).folder for number in range(5)]
        assert [folder.is_dir() for folder in folders] == [False, False, is_adapter, is_adapter, True]
        assert files.last == folders[-1]
