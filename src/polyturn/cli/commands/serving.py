"""Commands that wait for others: servers of rollouts, models, tools, programs and passages, and the desk of a human user.

    polyturn serve [--openai | --sandbox | --search INDEX | --mcp TOOLS]     polyturn answer DESK

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
    PageTokenFile,
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
"""What each kind of server reads of the command's parameters, by the parameter that asks for it."""


def serve(
    context: typer.Context,
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of a run to start from.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub id of the model, or the folder of a run.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="Scheduler: a registered name or file.py:Class.")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Turns of an episode at most.")] = None,
    plugins: Annotated[list[str] | None, typer.Option(help="Python file that registers plug-ins; may be repeated.")] = None,
    engine: Annotated[str | None, typer.Option(help="embedded, vllm or sglang.")] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token; else POLYTURN_TOKEN is read.")] = None,
    openai: Annotated[
        bool,
        typer.Option("--openai", help="Serve the model behind OpenAI's and Anthropic's APIs, for agents and evaluations."),
    ] = False,
    model_name: Annotated[
        list[str] | None, typer.Option(help="With --openai: a name of the model; may be repeated. '*' takes any name.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="With --openai: a run's folder for the episodes' trajectories.")
    ] = None,
    idle: Annotated[
        float,
        typer.Option(min=1, help="With --openai or --mcp: seconds after which an episode that nobody uses is ended."),
    ] = 600.0,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds an episode may take before it is replied as failed.")
    ] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that running episodes get to finish after SIGTERM.")] = 30.0,
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
    topk: Annotated[int, typer.Option(min=1, help="With --search: passages for a request that does not say.")] = 3,
    mcp: Annotated[
        Path | None,
        typer.Option(metavar="TOOLS", help="Serve the tools of a tool file, or of a Python file, by MCP instead."),
    ] = None,
    stdio: Annotated[
        bool, typer.Option("--stdio", help="With --mcp: over standard input and output, as a client's own process.")
    ] = False,
    embed: EmbedOption = None,
    embed_model: EmbedModelOption = None,
    rate_limit: RateLimitOption = None,
    allow_host: AllowHosts = None,
) -> None:
    """Serve rollouts over HTTP, to a trainer elsewhere."""
    kind = next((name for name in _USED if context.params[name]), None)
    if kind == "stdio" and mcp is None:
        raise ConfigError("--stdio goes with --mcp TOOLS; every other server is spoken to over HTTP")
    if kind is None:
        refuse_unused(context, {*_PLACE, *_MODEL, "scheduler", "deadline"}, here="where rollouts are served")
    else:
        refuse_unused(context, {kind, *_USED[kind]}, here=f"with --{kind}")
    from polyturn.cli import serve as command

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
        from polyturn.cli import serve_sandbox

        serve_sandbox.run(options, python=sandbox_python)
        return
    if search is not None:
        from polyturn.cli import serve_search

        serve_search.run(options, search, topk=topk, embed=embed, model=embed_model)
        return
    if mcp is not None:
        from polyturn.cli import serve_mcp

        serve_mcp.run(mcp, options, stdio=stdio, idle_s=idle)
        return
    if config is None and model is None and not any(o.startswith("model.") for o in overrides or ()):
        raise ConfigError("nothing says which model is served; name it with --model FOLDER, or a run with --config run.yaml")
    flags = command.overrides_of(
        config=config, model=model, scheduler=scheduler, max_turns=max_turns, plugins=plugins or [], engine=engine
    )
    given = [*flags, *(overrides or [])]
    if openai:
        from polyturn.cli import serve_openai

        hosted = serve_openai.Hosted(model_names=tuple(model_name or ()), record=record, idle_s=idle)
        serve_openai.run(config, given, options, hosted)
        return
    command.run(config, given, options)


def answer(
    desk: Annotated[Path, typer.Argument(help="The folder that `desk` of a human user names.")],
    terminal: Annotated[bool, typer.Option("--terminal", help="Answer here instead of on a page.")] = False,
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    token_file: PageTokenFile = None,
    rate_limit: RateLimitOption = None,
    allow_host: AllowHosts = None,
) -> None:
    """Answer conversations as their user. They are those of a run whose interaction is a human user at a desk."""
    from polyturn.cli import answer as command
    from polyturn.cli.serve import ServeOptions

    if terminal:
        command.run_terminal(desk)
        return
    options = ServeOptions(
        host=host,
        port=port,
        first_port=7870,
        token_file=token_file,
        rate_limit=rate_limit,
        allowed_hosts=tuple(allow_host or ()),
    )
    command.run(desk, options)
