"""Commands that need a model: train it, evaluate it, let it run episodes.

    polyturn train CONFIG     polyturn sft CONFIG     polyturn eval CONFIG     polyturn rollout CONFIG

Each takes a config and overrides of its keys.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyturn.cli.arguments import CheckpointOption, Command, ConfigArgument, Overrides, refuse_unused
from polyturn.cli.dialects import described, spelled_out
from polyturn.core.errors import ConfigError

if TYPE_CHECKING:
    from polyturn.config.models import RunConfig


class TrainCommand(Command):
    """The command `train`, which has a flag for each dialect that is installed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `--NAME` of a dialect as `--dialect NAME`."""
        return super().parse_args(ctx, list(spelled_out(args)))

    def get_help(self, ctx: Any) -> Any:
        """Say which flags there are."""
        for option in self.params:
            if option.name == "dialect":
                option.help = f"CONFIG and the overrides are written in the keys of another library: {described()}."  # type: ignore[attr-defined]
        return super().get_help(ctx)


def train(
    config: ConfigArgument,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Go on from the run's latest checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the first task and estimates; stop.")
    ] = False,
    ids: Annotated[
        bool, typer.Option("--ids", help="With --dry-run: show the ids of the first prompt's tokens too.")
    ] = False,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Train on this many processes of this machine (train.distributed.ranks).")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Train on a Ray cluster: its address, auto, or local.")
    ] = None,
    dialect: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="CONFIG and the overrides are written in the keys of another library."),
    ] = None,
) -> None:
    """Train: warm start if configured, evaluation, RL, evaluation."""
    names = sorted(set(dialect or ()))
    if ids and (names or not dry_run):
        raise ConfigError("--ids belongs to --dry-run of a native config; leave it out, or add --dry-run")
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(f'--{n}' for n in names)} are two dialects; a config is written in one of them")
    if (nproc is not None or ray is not None) and names:
        raise ConfigError("--nproc and --ray are for native configs; migrate this one first (polyturn config migrate)")
    if nproc is not None:
        overrides = [*(overrides or []), f"train.distributed.ranks={nproc}"]
    if ray is not None:
        overrides = [*(overrides or []), f"cluster.address={ray}"]
    if names:
        from polyturn.cli.dialects import train_in_dialect

        train_in_dialect(names[0], config, overrides or [], resume=resume, dry_run=dry_run)
        return
    _begin(config, overrides or [])
    from polyturn.cli import train as native

    native.run(config, overrides or [], resume=resume, dry_run=dry_run, with_ids=ids)


def plan(
    config: ConfigArgument,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, max=100_000, help="How many GPUs there are.")] = 8,
    gpu_memory: Annotated[float, typer.Option("--gpu-memory", min=0.1, max=100_000, help="GB of each.")] = 80.0,
    link: Annotated[
        float, typer.Option("--link", min=0.01, max=100_000, help="GB a second from the ranks to a server.")
    ] = 50.0,
) -> None:
    """Estimate the memory of each process of a run. Names a layout that fits, and the time of a weight sync over a link."""
    _check_config(config, overrides or [])
    from polyturn.cli import plan as command

    command.run(config, overrides or [], gpus=gpus, gpu_memory=gpu_memory, link=link)


def sft(config: ConfigArgument, overrides: Overrides = None, checkpoint: CheckpointOption = None) -> None:
    """Train on conversations, or on a run's best trajectories. It is the `warm_start` part of the config, alone."""
    _begin(config, overrides or [])
    from polyturn.cli import sft as command

    command.run(config, overrides or [], checkpoint=checkpoint)


def evaluate(
    context: typer.Context,
    config: ConfigArgument,
    overrides: Overrides = None,
    checkpoint: CheckpointOption = None,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of a model, in place of the config's; with --endpoint, its name there."),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="OpenAI-compatible server that is evaluated, e.g. http://host:8000/v1.")
    ] = None,
    key_env: Annotated[str, typer.Option(help="Environment variable with the endpoint's key.")] = "OPENAI_API_KEY",
    concurrency: Annotated[int, typer.Option(min=1, help="With --endpoint: requests at once, at most.")] = 32,
    request_timeout: Annotated[float, typer.Option(min=0.1, help="With --endpoint: seconds that one try may take.")] = 300.0,
    tries: Annotated[int, typer.Option(min=1, help="With --endpoint: tries of one request.")] = 6,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")] = False,
) -> None:
    """Evaluate a checkpoint, a model, or what an endpoint serves. The config's `evaluation` part says on what."""
    if endpoint is None:
        refuse_unused(context, {"config", "overrides", "checkpoint", "model", "as_json"}, here="without --endpoint")
    elif model is None or checkpoint is not None:
        raise ConfigError("--endpoint needs --model NAME, the model's name at the endpoint, and takes no --checkpoint")
    if not model:
        _begin(config, overrides or [])
    from polyturn.cli import evaluate as command

    if endpoint is None or model is None:
        command.run(config, overrides or [], checkpoint=checkpoint, model=model, as_json=as_json)
        return
    from polyturn.engines.chat_completions import Endpoint

    served = Endpoint(
        url=endpoint,
        model=model,
        key=os.environ.get(key_env),
        max_concurrent=concurrency,
        timeout_s=request_timeout,
        max_tries=tries,
    )
    command.run_endpoint(config, overrides or [], served, as_json=as_json)


def rollout(
    config: ConfigArgument,
    overrides: Overrides = None,
    checkpoint: CheckpointOption = None,
    tasks: Annotated[
        int, typer.Option("-n", "--tasks", min=1, help="How many training tasks to run, `train.group_size` times each.")
    ] = 8,
) -> None:
    """Run episodes on the training tasks, and record them."""
    _begin(config, overrides or [])
    from polyturn.api.folders import open_source
    from polyturn.api.rolling import roll_out
    from polyturn.cli.console import Output, command
    from polyturn.cli.show import trajectory_table

    source, resolved = open_source(config, overrides or [])
    folder, groups = roll_out(source, resolved, num_tasks=tasks, checkpoint=checkpoint)
    out = Output()
    out.table(trajectory_table([t for g in groups for t in g.trajectories]))
    out.fact("look at one", command("show", folder, groups[0].trajectories[0].id))


def _check_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Refuse a config that cannot be read before anything else is imported."""
    from polyturn.cli.dialects import load_native

    return load_native(path, overrides, tells=False).config


def _begin(path: Path, overrides: Sequence[str]) -> None:
    """Check a config, and say that its run begins."""
    from polyturn.api.ranks import tell_start

    tell_start(_check_config(path, overrides).name)
