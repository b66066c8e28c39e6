"""Routes as vLLM 0.32 and SGLang 0.5.23 write them, read by their clients; the servers are not needed for it."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyturn.core.errors import AlignmentError, ConfigError, EngineError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.core.routing import RouteShape
from polyturn.engines import serve_commands
from polyturn.engines.options import LaunchOptions, ServerOptions
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.served import _launches
from polyturn.engines.served_routes import FLAG, ServedRoutes
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.vllm import VllmEngine
from support.refusals import refuses

# The first of three layers is dense: servers give it rows of zeros.
SHAPE = RouteShape(num_layers=2, top_k=2, num_experts=8, layers=(1, 2), num_hidden_layers=3)


def every_layer(count: int) -> Any:
    """Return [count, 3, 2] what a server captured of so many tokens."""
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


@pytest.mark.parametrize("routed_from", [0, 2, 3])
@pytest.mark.parametrize("starts_where_asked", [True, False])
def test_routes_of_both_servers_are_read(routed_from: int, starts_where_asked: bool) -> None:
    captured = every_layer(4)  # 3 tokens of the prompt and all but the last of 2 that were sampled
    sent = captured[routed_from:] if starts_where_asked else captured
    vllm = VllmEngine("http://x", ServedModel(vocab_size=16, routes=SHAPE))
    sglang = SglangEngine("http://x", ServedModel(vocab_size=16, routes=SHAPE))
    request = ask(routed_from)
    found = [
        vllm._read(request, vllm_reply(npy(sent.astype(np.uint8)))),
        sglang._read(request, sglang_reply(base64.b64encode(sent.astype(np.int32).tobytes()).decode())),
    ]
    for completion in found:
        assert completion.routed_experts.dtype == np.uint8
        assert np.array_equal(completion.routed_experts, captured[routed_from:, 1:])
    assert vllm.capabilities.routes
    assert sglang.capabilities.routes
    assert vllm._call(request, "w").body["sampling_params"]["routed_experts_prompt_start"] == routed_from
    asked = sglang._call(request, "w").body
    assert (asked["return_routed_experts"], asked["routed_experts_start_len"]) == (True, routed_from)


def test_answer_without_routes_has_none() -> None:
    plain = VllmEngine("http://x", ServedModel(vocab_size=16)), SglangEngine("http://x", ServedModel(vocab_size=16))
    for engine, reply in zip(plain, (vllm_reply(None), sglang_reply(None)), strict=True):
        assert "routed_experts" not in str(engine._call(ask(0), "w").body)
        assert engine._read(ask(0), reply).routed_experts is None
        assert not engine.capabilities.routes
    wanting = VllmEngine("http://x", ServedModel(vocab_size=16, routes=SHAPE))
    assert wanting._read(ask(0), vllm_reply(None)).routed_experts is None
    assert wanting._read(ask(0), vllm_reply(npy(every_layer(2)))).routed_experts is None, "fewer than were asked for"


def test_missing_or_misshapen_routes_are_refused() -> None:
    with pytest.raises(EngineError, match="start it with --enable-return-routed-experts"):
        ServedRoutes(SHAPE, is_needed=True).check_given(False, url="http://x")
    ServedRoutes(SHAPE, is_needed=False).check_given(False, url="http://x")
    refuses(lambda: ServedRoutes(SHAPE, is_needed=True).read_bytes(ask(0), 2, "@@@@"), ValueError, "Only base64")
    other = VllmEngine("http://x", ServedModel(vocab_size=16, routes=SHAPE))
    refuses(
        lambda: other._read(ask(0), vllm_reply(npy(np.zeros((4, 5, 2), np.uint8)))), AlignmentError, "2 layers with experts"
    )


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
            LaunchOptions(python="python"), setup, client, getattr(serve_commands, f"{client.name}_command"), Path()
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
