"""The HTTP side of the rollout server: its paths, access rules and body limits.

    POST /infer/           {"infer_requests": […], "request_config": {…}, "timeout_s": 60}  ->  [output, …]
    POST /update_weights/  ?version=3, the body is a safetensors file                      ->  {"version": 3}

Bodies are JSON or safetensors, never pickle. Access is decided by the rules that all servers share (`auth.py`). An invalid
request gets an error status and a sentence in `detail`. If the client of /infer/ disconnects, its episodes are cancelled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from polyturn.core.errors import EngineError, PolyturnError, did_you_mean, one_line
from polyturn.serving.auth import ServerRules, json_app
from polyturn.serving.body import Body, read_body, while_wanted
from polyturn.serving.rollout_service import RolloutService

_GROUP_PATHS = (
    "init_communicator", "update_named_param", "update_flattened_params", "process_weights_after_loading",
    "close_communicator",
)  # fmt: skip
"""Paths by which some trainers broadcast weights through a process group; this server refuses them with a sentence."""


class Requests(Body):
    """A request to `/infer/`."""

    infer_requests: list[Any] = Field(description="requests, each an object with `messages`")
    request_config: dict[str, Any] | None = None
    timeout_s: Annotated[float, Field(gt=0)] | None = Field(None, description="seconds")


def create_app(
    service: RolloutService,
    *,
    model: Any,
    rules: ServerRules | None = None,
    enable_multi_turn: bool = True,
    use_gym_env: bool = False,
) -> Starlette:
    """Return the application of a rollout server.

    Args:
        service: Runs the episodes.
        model: The module whose parameters the engine serves; new weights must match its names and shapes.
        rules: Access rules of every request; a weights upload may be as large as the model.
        enable_multi_turn: Reported by /get_engine_type/.
        use_gym_env: Reported by /get_engine_type/.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    max_weights = (1 << 16) + 2 * sum(4 * t.numel() for t in model.state_dict().values())
    one_update = asyncio.Lock()
    engine_type = {
        "engine_type": "AsyncLLMEngine",
        "enable_multi_turn": enable_multi_turn,
        "use_gym_env": use_gym_env,
        "enable_lora": False,
    }

    def constant(value: Any) -> Callable[[Request], Awaitable[Any]]:
        async def answer(request: Request) -> Any:
            return value

        return answer

    def refused(why: str) -> Callable[[Request], Awaitable[Any]]:
        async def answer(request: Request) -> Any:
            raise HTTPException(501, why)

        return answer

    async def infer(request: Request) -> Response:
        if service.is_stopping:
            raise HTTPException(503, "the server is stopping")
        body = await read_body(request, Requests)
        replies = service.infer(body.infer_requests, body.request_config, timeout_s=body.timeout_s)
        outputs = await while_wanted(request, replies)
        return Response(json.dumps(outputs, default=str), media_type="application/json")

    async def probe(request: Request) -> dict[str, Any]:
        return await service.probe()

    async def update_weights(request: Request) -> dict[str, Any]:
        version = request.query_params.get("version", "")
        if not re.fullmatch("[0-9]{1,18}", version):
            raise HTTPException(422, f"version is {version!r:.50}; send a whole number: /update_weights/?version=N")
        weights = _loaded(await request.body(), shapes)
        async with one_update:
            await service.update_weights(weights, version=int(version))
        return {"version": int(version), "num_tensors": len(weights)}

    async def reset_prefix_cache(request: Request) -> dict[str, str]:
        async with one_update:
            await service.drop_prefixes()
        return {"message": "cached prefixes are dropped"}

    nothing = constant({"message": "there is nothing to do here"})
    no_group = refused("this server joins no process group: send a safetensors file to /update_weights/?version=N")
    no_adapters = refused("this server takes whole weights, not adapters: merge them before the update")
    handlers = {
        "GET /health/": constant({"status": "ok"}),
        "GET /get_world_size/": constant({"world_size": 1}),
        "GET /get_model_state_keys/": constant({"keys": list(shapes)}),
        "POST /get_engine_type/": constant(engine_type),
        "POST /infer/": infer,
        "POST /probe/": probe,
        "POST /update_weights/": update_weights,
        "POST /reset_prefix_cache/": reset_prefix_cache,
        **{f"POST /{name}/": nothing for name in ("reset_encoder_cache", "reset_mm_cache")},
        **{f"POST /{name}/": no_group for name in _GROUP_PATHS},
        **{f"POST /{name}/": no_adapters for name in ("update_adapter_param", "update_adapter_flattened_param")},
    }
    app = json_app(handlers, dataclasses.replace(rules or ServerRules(), body_limits={"/update_weights/": max_weights}))
    app.add_exception_handler(PolyturnError, _answer_error)
    return app


async def _answer_error(request: Request, problem: Exception) -> Response:
    return JSONResponse({"detail": one_line(problem)}, 502 if isinstance(problem, EngineError) else 422)


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
