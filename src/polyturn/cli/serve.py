"""`polyturn serve`: a server of rollouts, of a model, of tools, of programs or of passages.

    polyturn serve [--openai | --sandbox | --search INDEX | --mcp TOOLS]

Every server requires a token for access from other machines. Without one of these options the command serves rollouts to a
remote trainer; the other servers are in `serve_openai.py` and `serve_services.py`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyturn.cli.arguments import (
    AllowHosts,
    EmbedModelOption,
    EmbedOption,
    HostOption,
    Overrides,
    PortOption,
    RateLimitOption,
    declare,
    new_folder,
    refuse_unused,
)
from polyturn.cli.listening import ServeOptions, listen
from polyturn.core.errors import ConfigError
from polyturn.infra.loop import run_loop

if TYPE_CHECKING:
    from polyturn.config.load import Loaded
    from polyturn.config.models import RunConfig

logger = logging.getLogger(__name__)

_ADDRESS = {"host", "port", "token_file", "rate_limit", "allow_host"}
_MODEL = {"overrides", "config", "model", "max_turns", "plugins", "engine", "grace"}
_USED = {
    "sandbox": {*_ADDRESS, "sandbox_python", "deadline", "grace"},
    "search": {*_ADDRESS, "topk", "embed", "embed_model", "deadline", "grace"},
    "stdio": {"mcp", "deadline"},
    "mcp": {*_ADDRESS, "idle", "deadline", "grace"},
    "openai": {*_ADDRESS, *_MODEL, "model_name", "record", "idle"},
}
"""Parameter that selects a kind of server -> the parameters that it reads."""


@declare("serve")
def main(
    context: typer.Context,
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of a run to start from.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub id of the model, or the folder of a run.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="Scheduler: a registered name or file.py:Class.")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Largest number of turns per episode.")] = None,
    plugins: Annotated[list[str] | None, typer.Option(help="Python file that registers plug-ins; may be repeated.")] = None,
    engine: Annotated[str | None, typer.Option(help="embedded, vllm or sglang.")] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token; by default POLYTURN_TOKEN is read.")] = None,
    openai: Annotated[
        bool,
        typer.Option("--openai", help="Serve the model behind OpenAI's and Anthropic's APIs, for agents and evaluations."),
    ] = False,
    model_name: Annotated[
        list[str] | None,
        typer.Option(help="With --openai: a name of the model; may be repeated. '*' takes any name."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(callback=new_folder, help="With --openai: a run's folder for the episodes' trajectories."),
    ] = None,
    idle: Annotated[
        float, typer.Option(min=1, help="With --openai or --mcp: seconds of inactivity after which an episode ends.")
    ] = 600.0,
    deadline: Annotated[float | None, typer.Option(min=0.1, help="Seconds after which an episode counts as failed.")] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for running episodes to finish after SIGTERM.")] = 30.0,
    sandbox: Annotated[
        bool, typer.Option("--sandbox", help="Run programs instead, isolated, in SandboxFusion's protocol.")
    ] = False,
    sandbox_python: Annotated[
        Path | None, typer.Option(help="With --sandbox: the interpreter whose packages programs may import.")
    ] = None,
    search: Annotated[
        Path | None,
        typer.Option(metavar="INDEX", help="Search the passages of an index instead, in Search-R1's protocol."),
    ] = None,
    topk: Annotated[int, typer.Option(min=1, help="With --search: number of passages if a request does not set it.")] = 3,
    mcp: Annotated[
        Path | None,
        typer.Option(metavar="TOOLS", help="Serve the tools of a tool file, or of a Python file, by MCP instead."),
    ] = None,
    stdio: Annotated[
        bool, typer.Option("--stdio", help="With --mcp: use standard input and output, as a client's subprocess.")
    ] = False,
    embed: EmbedOption = None,
    embed_model: EmbedModelOption = None,
    rate_limit: RateLimitOption = None,
    allow_host: AllowHosts = None,
) -> None:
    """Serve rollouts over HTTP, to a trainer elsewhere."""
    _refuse_unused_here(context)
    from polyturn.cli import serve_openai, serve_services

    if not math.isfinite(grace):
        raise ConfigError(f"--grace is {grace}; give a finite number of seconds")
    options = ServeOptions(
        host=host,
        port=port,
        token_file=token_file,
        grace_s=grace,
        deadline_s=deadline,
        rate_limit=rate_limit,
        allowed_hosts=tuple(allow_host or ()),
    )
    if sandbox:
        return serve_services.serve_sandbox(options, python=sandbox_python)
    if search is not None:
        return serve_services.serve_search(options, search, topk=topk, embed=embed, model=embed_model)
    if mcp is not None:
        return serve_services.serve_mcp(options, mcp, stdio=stdio, idle_s=idle)
    if config is None and model is None and not any(o.startswith("model.") for o in overrides or ()):
        raise ConfigError("there is no model to serve; give --model FOLDER, or the config of a run: --config run.yaml")
    flags = overrides_of(
        config=config, model=model, scheduler=scheduler, max_turns=max_turns, plugins=plugins or [], engine=engine
    )
    arguments = [*flags, *(overrides or [])]
    if openai:
        hosted = serve_openai.Hosted(model_names=tuple(model_name or ()), record=record, idle_s=idle)
        return serve_openai.run(config, arguments, options, hosted)
    from polyturn.cli.dialects import load_native
    from polyturn.config.load import base_of

    serve_config(load_native(config, arguments), base=Path() if config is None else base_of(config), options=options)


def _refuse_unused_here(context: typer.Context) -> None:
    """Raise for a parameter that this kind of server does not read."""
    kind = next((name for name in _USED if context.params[name]), None)
    if kind == "stdio" and context.params["mcp"] is None:
        raise ConfigError("--stdio works only with --mcp TOOLS; all other servers use HTTP")
    if kind is None:
        refuse_unused(context, {*_ADDRESS, *_MODEL, "scheduler", "deadline"}, here="on a server of rollouts")
    else:
        refuse_unused(context, {kind, *_USED[kind]}, here=f"with --{kind}")


def overrides_of(
    *,
    model: str | None,
    scheduler: str | None,
    max_turns: int | None,
    plugins: Sequence[str],
    engine: str | None,
    config: Path | None = None,
) -> list[str]:
    """Return the options of the command line as overrides of the configuration."""
    values: dict[str, Any] = {
        "model.path": None if model is None else _model(model, config),
        "rollout.scheduler": scheduler,
        "rollout.limits.max_turns": max_turns,
        "plugins": list(plugins) or None,
        "engine.kind": engine,
    }
    own = [] if model is None else ["model.init=null", "model.tokenizer=null"]  # the config's belong to its model
    return [*(f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None), *own]


def _model(model: str, config: Path | None) -> str:
    """Return the folder or hub name of a model; for a run's or checkpoint's folder, the model in it.

    Raises:
        CheckpointError: there is no model in the folder.
    """
    if not Path(model).is_dir():
        return model
    from polyturn import build

    folder = build.model_folder(Path(model))
    assert folder is not None
    return str(folder if config is None else folder.resolve())  # paths in a config are relative to its folder


def serve_config(loaded: Loaded[RunConfig], *, base: Path, options: ServeOptions) -> None:
    """Serve rollouts of a configuration until a signal."""
    rules = options.rules()
    options.check_port()

    from polyturn import build
    from polyturn.api.console import quiet_transformers
    from polyturn.serving.app import create_app
    from polyturn.serving.rollout_service import RolloutService

    quiet_transformers()
    warn_of_min_concurrent(loaded.config)
    # Trainers send whole weights to this server, so its engines load the whole model, with the adapter merged.
    parts = build.build_parts(build.untrained(build.ConfigSource(config=loaded.config, base=base.resolve())))

    async def serve_parts() -> None:
        service = RolloutService(
            parts.context, max_concurrent=loaded.config.rollout.max_concurrent, deadline_s=options.deadline_s
        )
        app = create_app(
            service,
            model=parts.model,
            rules=rules,
            enable_multi_turn=loaded.config.rollout.scheduler is not None,
            use_gym_env=loaded.config.rollout.scheduler in ("gym", "gym_scheduler"),
        )
        try:
            await listen(app, options, rules, what="rollouts", stop=service.stop)
        finally:
            await service.stop(0.0)
            await service.context.close()

    run_loop(serve_parts())


def warn_of_min_concurrent(config: RunConfig) -> None:
    """Warn that a server does not read `rollout.min_concurrent`."""
    if config.rollout.min_concurrent is not None:
        logger.warning("rollout.min_concurrent has no effect: a server runs up to rollout.max_concurrent episodes")
