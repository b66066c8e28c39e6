"""Adapters that change under requests: a server keeps a request's adapter to its end, and reads it from a folder."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from polyturn.core.errors import EngineError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.engines.pool import EnginePool
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.vllm import VllmEngine
from polyturn.engines.weights.folder import WeightFolder
from support.services import serving

SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["k_proj", "q_proj"]}


class Scripted:
    """A server that samples the number in a request's adapter; a request of four tokens stops behind two while `holds`."""

    client: ClassVar[type[RemoteEngine]]
    adapter_key: ClassVar[str]
    """The key of a request's adapter."""

    def __init__(self) -> None:
        self.adapters: dict[str, int] = {}
        self.loads: list[dict[str, Any]] = []
        self.unloads: list[str] = []
        self.asked: list[str] = []
        self.version = ""
        self.holds = True
        self.is_late = False
        self.arrived, self.lands, self.is_cut = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        match request.path:
            case "/server_info":
                return web.json_response(self.info())
            case "/inference/v1/generate" | "/generate":
                return web.json_response(await self.sample(body))
            case "/v1/load_lora_adapter" | "/load_lora_adapter" | "/load_lora_adapter_from_tensors":
                if body["lora_name"] in self.adapters:
                    return web.json_response({"error": "it is there"}, status=400)
                self.loads.append(body)
                self.adapters[body["lora_name"]] = number_in(body)
            case "/unload_lora_adapter":
                self.unloads.append(body["lora_name"])
                del self.adapters[body["lora_name"]]
            case "/update_weight_version":
                self.version = body["new_version"]
        if "abort" in (request.query.get("mode"), body.get("mode")):
            self.is_cut.set()
        return web.json_response({"world_size": 1, "version": "0.32.0", "success": True})

    async def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body[self.adapter_key]
        self.asked.append(name)
        self.arrived.set()
        if self.is_late:
            await self.lands.wait()
        is_held, self.holds = self.holds, False
        spoke = self.version
        if is_held:
            await self.is_cut.wait()
        length = body["sampling_params"].get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        return self.answer([self.adapters[name]] * (2 if is_held else length), "abort" if is_held else "length", spoke)

    def info(self) -> dict[str, Any]:
        raise NotImplementedError

    def answer(self, ids: list[int], reason: str, version: str) -> dict[str, Any]:
        raise NotImplementedError


class ScriptedVllm(Scripted):
    client, adapter_key = VllmEngine, "model"
    lora: ClassVar[dict[str, Any] | None] = {"max_lora_rank": 8}
    environ: ClassVar[dict[str, Any]] = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": True}

    def info(self) -> dict[str, Any]:
        config = {
            "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 64},
            "aux_output_config": {"enable_return_routed_experts": False},
            "lora_config": self.lora,
        }
        return {"vllm_config": config, "vllm_env": self.environ}

    def answer(self, ids: list[int], reason: str, version: str) -> dict[str, Any]:
        choice = {
            "token_ids": ids,
            "logprobs": {"content": [{"logprob": -1.0}] * len(ids)},
            "weight_versions": [{"start": 0, "version": version}],
            "finish_reason": reason,
        }
        return {"choices": [choice], "usage": {}}


class ScriptedSglang(Scripted):
    client, adapter_key = SglangEngine, "lora_path"
    flags: ClassVar[dict[str, Any]] = {
        "enable_lora": True,
        "max_lora_rank": 4,
        "lora_target_modules": ["q_proj"],
        "tp_size": 2,
    }

    def info(self) -> dict[str, Any]:
        return {"version": "0.5.23", "context_length": 64, **self.flags}

    def answer(self, ids: list[int], reason: str, version: str) -> dict[str, Any]:
        meta = {
            "output_token_logprobs": [[-1.0, number, None] for number in ids],
            "weight_versions": [{"start": 0, "end": len(ids), "version": version}],
            "finish_reason": {"type": reason},
        }
        return {"output_ids": ids, "meta_info": meta}


def number_in(load: dict[str, Any]) -> int:
    """Return the number in the adapter that a server is told to load: from a folder, or from copies for two processes."""
    if "lora_path" in load:
        return int(load_file(Path(load["lora_path"], "adapter_model.safetensors"))["w"])
    first, second = (pickle.loads(base64.b64decode(data)) for data in load["serialized_named_tensors"])
    assert first == second and load["config_dict"] == SETTINGS
    return int(first["w"])


@contextlib.asynccontextmanager
async def scripted_pool(folder: Path, server: Scripted) -> AsyncIterator[EnginePool]:
    async with serving(server.handle) as url:
        engine = server.client(url, ServedModel(vocab_size=16, adapter=SETTINGS))
        pool = EnginePool([engine], files=WeightFolder(folder, root=folder, adapter=SETTINGS))
        yield pool
        await pool.close()


@pytest.fixture(params=[ScriptedVllm, ScriptedSglang])
def server(request: pytest.FixtureRequest) -> Scripted:
    scripted: Scripted = request.param()
    return scripted


def adapter(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(float(number))}


def folders_in(root: Path) -> list[Path]:
    return list(root.glob("*/0*"))


def ask() -> GenerateRequest:
    return GenerateRequest(request_id="r", session_id="r", prompt_ids=[1, 2], sampling=SamplingParams(max_tokens=4))


async def test_running_request_goes_on_with_the_next_adapter(tmp_path: Path, server: Scripted) -> None:
    async with scripted_pool(tmp_path, server) as pool:
        await pool.update_weights(5, weights=adapter(5))
        asked = asyncio.create_task(pool.generate(ask()))
        await server.arrived.wait()
        await pool.update_weights(6, weights=adapter(6))
        completion = await asked
    assert completion.token_ids.tolist() == [5, 5, 6, 6]
    assert completion.policy_versions == ((0, 5), (2, 6))
    assert server.asked == [load["lora_name"] for load in server.loads], "each adapter has a name of its own"
    assert not any(load.get("load_inplace") for load in server.loads), "else each batch would read it anew"


async def test_late_request_keeps_its_adapter_and_version(tmp_path: Path, server: Scripted) -> None:
    async with scripted_pool(tmp_path, server) as pool:
        server.holds, server.is_late = False, True
        await pool.update_weights(4, weights=adapter(4))
        await pool.update_weights(5, weights=adapter(5))
        asked = asyncio.create_task(pool.generate(ask()))
        await server.arrived.wait()
        await pool.update_weights(6, weights=adapter(6))
        num_folders = len(folders_in(tmp_path))
        server.lands.set()
        completion = await asked
    assert num_folders == 3, "of the latest, and of two that late requests may name"
    assert completion.token_ids.tolist() == [5, 5, 5, 5]
    assert completion.policy_versions == ((0, 5),), "the server's own name of its weights is that of version 6"


async def test_sglang_unloads_adapters_that_are_no_longer_named(tmp_path: Path) -> None:
    async with scripted_pool(tmp_path, server := ScriptedSglang()) as pool:
        for number in range(5):
            await pool.update_weights(number, weights=adapter(number))
    names = [load["lora_name"] for load in server.loads]
    assert server.unloads == names[:3] and list(server.adapters) == names[3:]


async def test_sglang_gets_tensors_where_it_sees_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyturn.engines.sglang.is_here", lambda url: False)
    async with scripted_pool(tmp_path, server := ScriptedSglang()) as pool:
        server.holds = False
        await pool.update_weights(5, weights=adapter(5))
        completion = await pool.generate(ask())
    assert completion.token_ids.tolist() == [5, 5, 5, 5]
    assert [sorted(load) for load in server.loads] == [["config_dict", "lora_name", "serialized_named_tensors"]]


@pytest.mark.parametrize(
    "flags",
    [
        {"enable_lora": None},
        {"max_lora_rank": 2},
        {"lora_target_modules": ["o_proj"]},
        {"dp_size": 2},
    ],
    ids=json.dumps,
)
async def test_running_sglang_server_that_cannot_adapt_is_refused(tmp_path: Path, flags: dict[str, Any]) -> None:
    server = ScriptedSglang()
    server.flags = server.flags | flags  # type: ignore[misc]
    async with scripted_pool(tmp_path, server) as pool:
        ((name, value),) = flags.items()
        wanted = r"--enable-lora --max-lora-rank 4 .*--lora-target-modules k_proj q_proj"
        with pytest.raises(EngineError, match=rf"{name}: {value}".replace("[", r"\[").replace("]", r"\]") + f".*{wanted}"):
            await pool.update_weights(1, weights=adapter(1))
    assert not server.loads


@pytest.mark.parametrize(
    ("lora", "may_load", "shown"),
    [
        (None, True, "max_lora_rank: None"),
        ({"max_lora_rank": 1}, True, "max_lora_rank: 1,"),
        ({"max_lora_rank": 8}, False, "VLLM_ALLOW_RUNTIME_LORA_UPDATING: False"),
    ],
)
async def test_running_vllm_server_that_cannot_adapt_is_refused(
    tmp_path: Path, lora: dict[str, Any] | None, may_load: bool, shown: str
) -> None:
    server = ScriptedVllm()
    server.lora = lora  # type: ignore[misc]
    server.environ = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": may_load}  # type: ignore[misc]
    async with scripted_pool(tmp_path, server) as pool:
        flags = "--enable-lora --max-loras 1 --max-lora-rank 8 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        with pytest.raises(EngineError, match=f"{shown}.*{flags}"):
            await pool.generate(ask())
    assert not server.loads


@pytest.mark.parametrize("is_adapter", [True, False])
def test_latest_adapters_stay_and_whole_weights_do_not(tmp_path: Path, is_adapter: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    with WeightFolder(tmp_path, root=tmp_path, adapter={"r": 1} if is_adapter else None) as files:
        folders = [files.write(adapter(number)).folder for number in range(5)]
        assert [folder.is_dir() for folder in folders] == [False, False, is_adapter, is_adapter, True]
        assert files.last == folders[-1]
