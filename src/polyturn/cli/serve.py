"""`polyturn serve`, and `swift rollout` for what is asked in ms-swift's arguments: one server, two languages."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "POLYTURN_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What concerns the server and not the episodes."""

    host: str = "127.0.0.1"
    port: int = 8000
    token_file: Path | None = None
    """File with the token; else the environment variable POLYTURN_TOKEN."""
    grace_s: float = 30.0
    deadline_s: float | None = None

    def token(self) -> str | None:
        """Return the token, if there is one."""
        if self.token_file is not None:
            return self.token_file.read_text().strip()
        return os.environ.get(TOKEN_VARIABLE)


def run(config: Path | None, overrides: Sequence[str], options: ServeOptions) -> None:
    """Serve the scheduler of a configuration until a signal asks to stop."""
    try:
        from polyturn.serving.server import bind, check_exposure, serve
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"{missing.name} is not installed; `pip install 'polyturn[serve]'` brings what a server needs"
        ) from None
    check_exposure(options.host, options.token())

    from polyturn import build
    from polyturn.cli.console import quiet_transformers
    from polyturn.config.load import load_config
    from polyturn.config.models import RunConfig
    from polyturn.serving.app import create_app
    from polyturn.serving.service import RolloutService

    quiet_transformers()
    loaded = load_config(RunConfig, config, overrides)
    base = Path() if config is None else config.parent
    parts = build.build_parts(build.Place(config=loaded.config, base=base.resolve()))

    async def serve_parts() -> None:
        service = RolloutService(
            parts.context, max_concurrent=loaded.config.rollout.max_concurrent, deadline_s=options.deadline_s
        )
        app = create_app(
            service,
            model=parts.model,
            token=options.token(),
            enable_multi_turn=loaded.config.rollout.scheduler is not None,
            use_gym_env=loaded.config.rollout.scheduler in ("gym", "gym_scheduler"),
        )
        await serve(service, app, bound=bind(options.host, options.port), grace_s=options.grace_s)

    asyncio.run(serve_parts())


def overrides_of(
    *, model: str | None, scheduler: str | None, max_turns: int | None, plugins: Sequence[str], engine: str | None
) -> list[str]:
    """Return the options of the command line as overrides of the configuration."""
    values: dict[str, Any] = {
        "model.path": model,
        "rollout.scheduler": scheduler,
        "rollout.limits.max_turns": max_turns,
        "plugins": list(plugins) or None,
        "engine.kind": engine,
    }
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]


_SWIFT_CONFIG = {
    "model": "model.path",
    "multi_turn_scheduler": "rollout.scheduler",
    "max_turns": "rollout.limits.max_turns",
    "external_plugins": "plugins",
    "max_new_tokens": "rollout.limits.max_tokens_per_turn",
    "max_length": "rollout.limits.max_context",
    "vllm_max_model_len": "rollout.limits.max_context",
    "temperature": "rollout.sampling.temperature",
    "top_p": "rollout.sampling.top_p",
    "top_k": "rollout.sampling.top_k",
    "seed": "seed",
}
_SWIFT_SERVER = ("host", "port")
_SWIFT_IGNORED = {
    "use_async_engine": "every engine here is asynchronous",
    "vllm_use_async_engine": "every engine here is asynchronous",
    "log_level": "the log is short",
    "verbose": "the log is short",
    "template": "the model's own chat template is used",
    "model_type": "it is read from the model's folder",
    "torch_dtype": "weights are served in float32; set engine.kind in a native config for another engine",
    "vllm_gpu_memory_utilization": "it is vLLM's",
    "vllm_enable_prefix_caching": "prefixes are always reused",
    "vllm_max_num_seqs": "it is vLLM's",
    "vllm_enforce_eager": "it is vLLM's",
}
_SWIFT_ONLY_ONE = ("vllm_tensor_parallel_size", "vllm_data_parallel_size", "vllm_pipeline_parallel_size")


def swift_rollout(arguments: Sequence[str]) -> None:
    """Do what `swift rollout` is asked to do, on the embedded engine."""
    overrides, options = read_swift(arguments)
    run(None, overrides, options)


def read_swift(arguments: Sequence[str]) -> tuple[list[str], ServeOptions]:
    """Return ms-swift's arguments as overrides and server options; what is ignored is logged with the reason.

    Raises:
        ConfigError: an argument is unknown, or asks for what there is not.
    """
    from polyturn.compat.swift.args.arguments import parse

    parsed = parse(arguments)
    given = {name: value for name, value in parsed.values.items() if name in parsed.origin}
    overrides = ["engine.kind=embedded"]
    server: dict[str, Any] = {}
    if given.get("multi_turn_scheduler") and False in (given.get("use_async_engine"), given.get("vllm_use_async_engine")):
        raise ConfigError("please set vllm_use_async_engine to True with multi-turn scheduler.")
    for name, value in given.items():
        if name in _SWIFT_CONFIG:
            value = [value] if name == "external_plugins" and isinstance(value, str) else value
            overrides.append(f"{_SWIFT_CONFIG[name]}={json.dumps(value)}")
        elif name in _SWIFT_SERVER:
            server[name] = value
        elif name in _SWIFT_IGNORED:
            logger.info("--%s is ignored: %s", name, _SWIFT_IGNORED[name])
        elif name in _SWIFT_ONLY_ONE and value == 1:
            continue
        else:
            known = [*_SWIFT_CONFIG, *_SWIFT_SERVER, *_SWIFT_IGNORED]
            raise ConfigError(f"`swift rollout --{name} {value}` is not available here.{did_you_mean(name, known)}")
    if "model" not in given:
        raise ConfigError("`swift rollout` needs --model")
    if given.get("multi_turn_scheduler") is None:
        overrides.append('rollout.scheduler="single_turn"')
    return overrides, ServeOptions(**server)
