"""Routes as vLLM 0.32 and SGLang 0.5.23 write them, read by their clients; no server is needed."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from polyturn.core.errors import ConfigError, EngineError
from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from polyturn.core.routing import RouteShape
from polyturn.engines import serve_commands
from polyturn.engines.base import ModelFolder
from polyturn.engines.options import LaunchOptions, ServerOptions
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.served import _launches
from polyturn.engines.served_routes import FLAG, ServedRoutes
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.vllm import VllmEngine
from support.refusals import refuses, refuses_later
from support.services import serving

# The first of three layers is dense: servers give it rows of zeros.
SHAPE = RouteShape(num_layers=2, top_k=2, num_experts=8, layers=(1, 2), num_hidden_layers=3)


def every_layer(count: int) -> Any:
    """Return the routes [count, 3, 2] that a server captured for so many tokens."""
    routes = np.random.default_rng(0).integers(0, 8, (count, 3, 2))
    routes[:, 0] = 0
    return routes


def npy(array: Any) -> str:
    """As vLLM's `numpy2base64` writes it: np.save, then base64."""
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode("ascii")


def ask(routed_from: int) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", session_id="r", prompt_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=4), routed_from=routed_from
    )


def vllm_reply(routes: str | None) -> dict[str, Any]:
    choice = {
        "index": 0,
        "token_ids": [7, 8],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
        "finish_reason": "length",
        "weight_versions": [{"version": "default", "start": 0, "end": 2}],
        "routed_experts": routes,
    }
    return {"choices": [choice], "usage": {"prompt_tokens": 3}}


def sglang_reply(routes: str | None) -> dict[str, Any]:
    meta = {
        "prompt_tokens": 3,
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
        "weight_versions": [{"version": "default", "start": 0, "end": 2}],
    }
    return {"output_ids": [7, 8], "meta_info": meta if routes is None else meta | {"routed_experts": routes}}


FACTS = {
    "/server_info": {
        "vllm_config": {
            "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 64},
            "aux_output_config": {"enable_return_routed_experts": True},
        },
        "enable_return_routed_experts": True,
    },
    "/get_world_size": {"world_size": 1},
    "/version": {"version": "1"},
}
"""What servers of both kinds say of themselves."""


async def sample(
    client: Any, reply: Any, *, routes: RouteShape | None = SHAPE, routed_from: int = 0
) -> tuple[Completion, dict[str, Any]]:
    """Return the completion that a client reads from a reply, and the body of its request."""
    bodies = []

    async def handle(request: web.Request) -> web.Response:
        if request.method == "POST":
            bodies.append(await request.json())
        return web.json_response(FACTS.get(request.path, reply))

    async with serving(handle) as url:
        engine = client(url, ServedModel(vocab_size=16, routes=routes))
        assert engine.capabilities.routes == (routes is not None)
        try:
            return await engine.generate(ask(routed_from)), bodies[0]
        finally:
            await engine.close()


@pytest.mark.parametrize("routed_from", [0, 2, 3])
@pytest.mark.parametrize("starts_where_asked", [True, False])
async def test_routes_of_both_servers_are_read(routed_from: int, starts_where_asked: bool) -> None:
    captured = every_layer(4)  # 3 tokens of the prompt and all but the last of 2 that were sampled
    sent = captured[routed_from:] if starts_where_asked else captured
    as_bytes = base64.b64encode(sent.astype(np.int32).tobytes()).decode()
    vllm, to_vllm = await sample(VllmEngine, vllm_reply(npy(sent.astype(np.uint8))), routed_from=routed_from)
    sglang, to_sglang = await sample(SglangEngine, sglang_reply(as_bytes), routed_from=routed_from)
    for completion in (vllm, sglang):
        assert completion.routed_experts is not None and completion.routed_experts.dtype == np.uint8
        assert np.array_equal(completion.routed_experts, captured[routed_from:, 1:])
    assert to_vllm["sampling_params"]["routed_experts_prompt_start"] == routed_from
    assert (to_sglang["return_routed_experts"], to_sglang["routed_experts_start_len"]) == (True, routed_from)


async def test_answer_without_routes_has_none() -> None:
    for client, reply in ((VllmEngine, vllm_reply(None)), (SglangEngine, sglang_reply(None))):
        completion, request = await sample(client, reply, routes=None)
        assert completion.routed_experts is None and "routed_experts" not in str(request)
    for routes in (None, npy(every_layer(2))):  # fewer than were asked for
        assert (await sample(VllmEngine, vllm_reply(routes)))[0].routed_experts is None


async def test_missing_or_misshapen_routes_are_refused() -> None:
    with pytest.raises(EngineError, match="start it with --enable-return-routed-experts"):
        ServedRoutes(SHAPE, is_needed=True).check_reported(False, url="http://x")
    ServedRoutes(SHAPE, is_needed=False).check_reported(False, url="http://x")
    refuses(lambda: ServedRoutes(SHAPE, is_needed=True).read_bytes(ask(0), 2, "@@@@"), ValueError, "Only base64")
    other = vllm_reply(npy(np.zeros((4, 5, 2), np.uint8)))
    await refuses_later(lambda: sample(VllmEngine, other), EngineError, "AlignmentError", "2 layers with experts")


@pytest.mark.parametrize("client", [VllmEngine, SglangEngine])
@pytest.mark.parametrize("needs", [False, True])
def test_server_on_a_cpu_is_not_asked_for_routes(
    needs: bool, client: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options = ServerOptions(kind="vllm")
    setup: Any = SimpleNamespace(
        options=options,
        routes=SHAPE,
        needs_routes=needs,
        places=None,
        max_context=64,
        media=None,
        adapter=None,
        obstacles=None,
    )

    def started() -> Any:
        return _launches(
            LaunchOptions(python="python"),
            setup,
            client,
            getattr(serve_commands, f"{client.name}_command"),
            lambda: ModelFolder(Path(), is_temporary=False),
        )[0]

    if needs:
        refuses(started, ConfigError, f"replay is on and {client.name} does not report the experts of tokens on a CPU")
        return
    spec = started()
    assert FLAG not in spec.command and not client.routes_env.keys() & spec.env.keys()
    assert "policy/router_missing" in caplog.text
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    spec = started()
    assert FLAG in spec.command and client.routes_env.items() <= spec.env.items()
