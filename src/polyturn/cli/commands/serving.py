"""`polyturn serve`: a server of rollouts, of a model, of tools, of programs or of passages.

    polyturn serve [--openai | --sandbox | --search INDEX | --mcp TOOLS]

Beyond this machine each of them demands a token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyturn.cli.arguments import (
    AllowHosts,
    EmbedModelOption,
    EmbedOption,
    HostOption,
    Overrides,
    PortOption,
    RateLimitOption,
    refuse_unused,
)
from polyturn.core.errors import ConfigError

_PLACE = {"host", "port", "token_file", "rate_limit", "allow_host"}
_MODEL = {"overrides", "config", "model", "max_turns", "plugins", "engine", "grace"}
_USED = {
    "sandbox": {*_PLACE, "sandbox_python", "deadline", "grace"},
    "search": {*_PLACE, "topk", "embed", "embed_model", "deadline", "grace"},
    "stdio": {"mcp", "deadline"},
    "mcp": {*_PLACE, "idle", "deadline", "grace"},
    "openai": {*_PLACE, *_MODEL, "model_name", "record", "idle"},
}
"""The parameters that each kind of server reads, by the parameter that asks for it."""


ConfigOption = Annotated[Path | None, typer.Option(help="YAML file of a run to start from.")]
ModelOption = Annotated[str | None, typer.Option(help="Folder or hub id of the model, or the folder of a run.")]
SchedulerOption = Annotated[str | None, typer.Option(help="Scheduler: a registered name or file.py:Class.")]
TurnsOption = Annotated[int | None, typer.Option(min=1, help="Turns of an episode at most.")]
PluginsOption = Annotated[list[str] | None, typer.Option(help="Python file that registers plug-ins; may be repeated.")]
EngineOption = Annotated[str | None, typer.Option(help="embedded, vllm or sglang.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the token; else POLYTURN_TOKEN is read.")]
OpenaiFlag = Annotated[
    bool, typer.Option("--openai", help="Serve the model behind OpenAI's and Anthropic's APIs, for agents and evaluations.")
]
ModelNames = Annotated[
    list[str] | None, typer.Option(help="With --openai: a name of the model; may be repeated. '*' takes any name.")
]
RecordOption = Annotated[Path | None, typer.Option(help="With --openai: a run's folder for the episodes' trajectories.")]
IdleOption = Annotated[
    float, typer.Option(min=1, help="With --openai or --mcp: seconds after which an unused episode is ended.")
]
DeadlineOption = Annotated[float | None, typer.Option(help="Seconds an episode may take before it is replied as failed.")]
GraceOption = Annotated[float, typer.Option(min=0, help="Seconds that running episodes get to finish after SIGTERM.")]
SandboxFlag = Annotated[bool, typer.Option("--sandbox", help="Run programs instead, isolated, in SandboxFusion's protocol.")]
SandboxPython = Annotated[
    Path | None, typer.Option(help="With --sandbox: the interpreter whose packages programs may import.")
]
SearchOption = Annotated[
    Path | None, typer.Option(metavar="INDEX", help="Search the passages of an index instead, in Search-R1's protocol.")
]
TopkOption = Annotated[int, typer.Option(min=1, help="With --search: passages for a request that does not say.")]
McpOption = Annotated[
    Path | None, typer.Option(metavar="TOOLS", help="Serve the tools of a tool file, or of a Python file, by MCP instead.")
]
StdioFlag = Annotated[
    bool, typer.Option("--stdio", help="With --mcp: over standard input and output, as a client's own process.")
]


def serve(
    context: typer.Context,
    overrides: Overrides = None,
    config: ConfigOption = None,
    model: ModelOption = None,
    scheduler: SchedulerOption = None,
    max_turns: TurnsOption = None,
    plugins: PluginsOption = None,
    engine: EngineOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    token_file: TokenFile = None,
    openai: OpenaiFlag = False,
    model_name: ModelNames = None,
    record: RecordOption = None,
    idle: IdleOption = 600.0,
    deadline: DeadlineOption = None,
    grace: GraceOption = 30.0,
    sandbox: SandboxFlag = False,
    sandbox_python: SandboxPython = None,
    search: SearchOption = None,
    topk: TopkOption = 3,
    mcp: McpOption = None,
    stdio: StdioFlag = False,
    embed: EmbedOption = None,
    embed_model: EmbedModelOption = None,
    rate_limit: RateLimitOption = None,
    allow_host: AllowHosts = None,
) -> None:
    """Serve rollouts over HTTP, to a trainer elsewhere."""
    _refuse_unused_here(context)
    from polyturn.cli import serve as command
    from polyturn.cli import serve_openai, serve_services

    options = command.ServeOptions(
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
        raise ConfigError("no model to serve is named; give --model FOLDER, or the config of a run: --config run.yaml")
    flags = command.overrides_of(
        config=config, model=model, scheduler=scheduler, max_turns=max_turns, plugins=plugins or [], engine=engine
    )
    arguments = [*flags, *(overrides or [])]
    if openai:
        hosted = serve_openai.Hosted(model_names=tuple(model_name or ()), record=record, idle_s=idle)
        return serve_openai.run(config, arguments, options, hosted)
    command.run(config, arguments, options)


def _refuse_unused_here(context: typer.Context) -> None:
    """Refuse a parameter of `serve` that this kind of server does not read."""
    kind = next((name for name in _USED if context.params[name]), None)
    if kind == "stdio" and context.params["mcp"] is None:
        raise ConfigError("--stdio goes with --mcp TOOLS; every other server is spoken to over HTTP")
    if kind is None:
        refuse_unused(context, {*_PLACE, *_MODEL, "scheduler", "deadline"}, here="where rollouts are served")
    else:
        refuse_unused(context, {kind, *_USED[kind]}, here=f"with --{kind}")
