"""The HTTP side of the rollout server: its paths, access rules and body limits.

    POST /infer/           {"infer_requests": […], "request_config": {…}, "timeout_s": 60}  ->  [output, …]
    POST /update_weights/  ?version=3, the body is a safetensors file                      ->  {"version": 3}

Bodies are JSON or safetensors, never pickle. Access is decided by the rules that all servers share (`auth.py`). An invalid
request gets an error status and a sentence in `detail`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response

from polyturn.core.errors import EngineError, PolyturnError, did_you_mean, one_line
from polyturn.serving.auth import ServerRules, guarded
from polyturn.serving.body import json_object
from polyturn.serving.rollout_service import RolloutService

_GROUP_PATHS = (
    "init_communicator", "update_named_param", "update_flattened_params", "process_weights_after_loading",
    "close_communicator",
)  # fmt: skip
"""Paths of trainers that broadcast weights through a process group, which this server refuses by name."""
_ENGINE_TYPES = {True: "AsyncLLMEngine", False: "LLMEngine"}


def create_app(
    service: RolloutService,
    *,
    model: Any,
    rules: ServerRules | None = None,
    enable_multi_turn: bool = True,
    use_gym_env: bool = False,
) -> FastAPI:
    """Return the FastAPI application of a rollout server.

    Args:
        service: Runs the episodes.
        model: The module whose parameters the engine serves; new weights must match its names and shapes.
        rules: Access rules of every request; a weights upload may be as large as the model.
        enable_multi_turn: Reported by /get_engine_type/.
        use_gym_env: Reported by /get_engine_type/.
    """
    app = FastAPI(title="polyturn rollout server", docs_url=None, redoc_url=None, openapi_url=None)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    max_weights = (1 << 16) + 2 * sum(4 * t.numel() for t in model.state_dict().values())
    rules = rules or ServerRules()
    guarded(app, dataclasses.replace(rules, body_limits={"/update_weights/": max_weights}))

    @app.exception_handler(PolyturnError)
    async def refused(request: Request, problem: PolyturnError) -> Response:
        return JSONResponse({"detail": one_line(problem)}, 502 if isinstance(problem, EngineError) else 422)

    _describe(app, shapes, enable_multi_turn=enable_multi_turn, use_gym_env=use_gym_env)

    @app.post("/infer/")
    async def infer(request: Request) -> Response:
        if service.is_stopping:
            raise HTTPException(503, "the server is stopping")
        requests, config, timeout_s = _parse_body(await json_object(request))
        outputs = await service.infer(requests, config, timeout_s=timeout_s)
        return Response(json.dumps(outputs, default=str), media_type="application/json")

    @app.post("/probe/")
    async def probe() -> dict[str, Any]:
        return await service.probe()

    async def nothing_to_do() -> dict[str, str]:
        return {"message": "there is nothing to do here"}

    for path in ("reset_encoder_cache", "reset_mm_cache"):
        app.post(f"/{path}/")(nothing_to_do)

    _take_weights(app, service, shapes)
    return app


def _describe(app: FastAPI, shapes: Mapping[str, tuple[int, ...]], *, enable_multi_turn: bool, use_gym_env: bool) -> None:
    """Add the paths that describe this server."""

    @app.get("/health/")
    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    @app.get("/get_world_size/")
    async def world_size() -> dict[str, int]:
        return {"world_size": 1}

    @app.get("/get_model_state_keys/")
    async def state_keys() -> dict[str, list[str]]:
        return {"keys": list(shapes)}

    @app.post("/get_engine_type/")
    async def engine_type() -> dict[str, Any]:
        return {
            "engine_type": _ENGINE_TYPES[True],
            "enable_multi_turn": enable_multi_turn,
            "use_gym_env": use_gym_env,
            "enable_lora": False,
        }


def _parse_body(body: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any] | None, float | None]:
    """Return the requests, the sampling settings and the timeout in seconds from a body.

    Raises:
        HTTPException: a value has the wrong type.
    """
    requests, config, timeout_s = body.get("infer_requests"), body.get("request_config"), body.get("timeout_s")
    if not isinstance(requests, list):
        raise HTTPException(422, "infer_requests must be a list of requests, each an object with `messages`")
    if config is not None and not isinstance(config, dict):
        raise HTTPException(422, "request_config must be an object or null")
    if timeout_s is not None and (
        isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0
    ):
        raise HTTPException(422, f"timeout_s is {timeout_s!r}; use a positive number of seconds, or null")
    return requests, config, timeout_s


def _take_weights(app: FastAPI, service: RolloutService, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Add the paths that receive weights."""
    one_update = asyncio.Lock()

    @app.post("/update_weights/")
    async def update_weights(request: Request, version: int) -> dict[str, Any]:
        weights = _loaded(await request.body(), shapes)
        async with one_update:
            await service.update_weights(weights, version=version)
        return {"version": version, "num_tensors": len(weights)}

    @app.post("/reset_prefix_cache/")
    async def reset_prefix_cache() -> dict[str, str]:
        async with one_update:
            await service.drop_prefixes()
        return {"message": "cached prefixes are dropped"}

    async def no_group() -> None:
        raise HTTPException(501, "this server joins no process group: send a safetensors file to /update_weights/?version=N")

    async def no_adapters() -> None:
        raise HTTPException(501, "this server takes whole weights, not adapters: merge them before the update")

    for path in _GROUP_PATHS:
        app.post(f"/{path}/")(no_group)
    for path in ("update_adapter_param", "update_adapter_flattened_param"):
        app.post(f"/{path}/")(no_adapters)


def _loaded(body: bytes, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the tensors of a safetensors file, checked against the model's names and shapes.

    Raises:
        HTTPException: the body is not a safetensors file, or a tensor does not fit the model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        weights: dict[str, Any] = load(body)
    except (SafetensorError, ValueError) as problem:
        raise HTTPException(422, f"the body is not a safetensors file: {one_line(problem)}") from problem
    for name, tensor in weights.items():
        if name not in shapes:
            raise HTTPException(422, f"the model has no parameter {name!r}.{did_you_mean(name, shapes)}")
        if tuple(tensor.shape) != shapes[name]:
            raise HTTPException(422, f"{name} has shape {tuple(tensor.shape)}; the model's has {shapes[name]}")
    return weights
