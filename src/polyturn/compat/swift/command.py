"""Commands that take ms-swift's arguments: `polyturn train --swift`, and a replacement for the program `swift`.

Heavy imports happen only after all arguments and plug-ins have been checked, so that mistakes are reported at once.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from polyturn.cli.console import program
from polyturn.cli.listening import ServeOptions
from polyturn.cli.run_as import find_like
from polyturn.cli.serve import serve_config
from polyturn.compat.swift.args.arguments import (
    DEFAULTS,
    MEGATRON_DEFAULTS,
    megatron_to_native,
    read,
    read_command,
    rollout_to_native,
    to_native,
)
from polyturn.config.load import Loaded, load_values
from polyturn.config.models import RunConfig
from polyturn.config.parts import Section, arguments_of
from polyturn.config.translate.paths import absolute
from polyturn.config.translate.translation import Translation
from polyturn.config.translate.tree import Composed
from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.infra.plugins import load_plugins

logger = logging.getLogger(__name__)


class _ServerKeys(Section):
    """The keys of `swift rollout` that a run does not have."""

    serve: ServeOptions = ServeOptions()


def run(path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool) -> None:
    """Train with the arguments of a YAML file."""
    command = [*program(), "train", "--swift", str(path), *overrides]

    def again(name: str) -> list[str]:
        return [*command, *([] if name == "" else [f"polyturn.name={name}"]), "--resume"]

    translation = _translate(read(path, overrides))
    train(translation, folder=path.parent, again=again, resume=resume, dry_run=dry_run)


def rlhf(arguments: Sequence[str], *, megatron: bool = False) -> None:
    """Run `swift rlhf` or `megatron rlhf`; the flags `--dry-run` and `--resume` are polyturn's."""
    own = [a for a in arguments if a in ("--dry-run", "--resume")]
    rest = [a for a in arguments if a not in own]

    def again(name: str) -> list[str]:
        kept = list(rest)
        if name:
            kept = [a for a, before in zip(rest, ["", *rest], strict=False) if "--polyturn.name" not in (a, before)]
            kept = [*(a for a in kept if not a.startswith("--polyturn.name=")), "--polyturn.name", name]
        return [*program(), "run-as", "swift", "--", "megatron" if megatron else "swift", "rlhf", *kept, "--resume"]

    file = [a for a in rest[:1] if not a.startswith("-")]
    for flag, value in itertools.pairwise(a for a in arguments if a not in file):
        if flag in own and not value.startswith("--"):
            raise ConfigError(
                f"{flag} takes no value, but is followed by {value!r}; remove the value, or write its own flag before it"
            )
    defaults = MEGATRON_DEFAULTS if megatron else DEFAULTS
    translation = _translate(read_command(rest, defaults), megatron=megatron)
    train(translation, folder=None, again=again, resume="--resume" in own, dry_run="--dry-run" in own)


def train(
    translation: Translation,
    *,
    folder: Path | None,
    again: Callable[[str], Sequence[str]],
    resume: bool,
    dry_run: bool,
) -> None:
    """Log the ignored arguments with reasons, and train.

    Args:
        translation: The translated arguments.
        folder: The folder of their file.
        again: Called with a run's name; returns the command that resumes it.
        resume: Whether to continue from the latest checkpoint.
        dry_run: Whether to check and show everything without training.
    """
    find_like("swift")
    base = (folder or Path()).resolve()
    loaded = load_values(RunConfig, absolute(translation, folder=folder), origin=translation.origin)
    check_plugins(loaded.config, base=base)
    for notice in translation.notices():
        logger.info("%s", notice)

    from polyturn.api.console import quiet_transformers
    from polyturn.build import ConfigSource
    from polyturn.cli import train as native

    quiet_transformers()

    def resume_command(name: str) -> Sequence[str]:
        return again("" if name == loaded.config.name else name)

    native.train(
        ConfigSource(config=loaded.config, base=base), loaded.resolved, again=resume_command, resume=resume, dry_run=dry_run
    )


def check_plugins(config: RunConfig, *, base: Path) -> None:
    """Load the plug-ins and check that the names used by the run are registered.

    Raises:
        ConfigError: a plug-in cannot be loaded, or a name is not registered.
    """
    from polyturn.compat.swift import loss_scale
    from polyturn.compat.swift.orm import orms
    from polyturn.compat.swift.reward_adapter import make
    from polyturn.compat.swift.schedulers import multi_turns

    load_plugins(config.plugins, base=base)
    function = config.reward.function
    named: Mapping[str, Any] = {} if function is None else arguments_of(function)
    for name in named.get("names", ()):
        orms.find(name)
    for name in str(config.algorithm.loss_scale).split("+"):
        if (entry := loss_scale.loss_scale_map.get(name.strip())) is not None:
            loss_scale.check_strategy(entry, name=name.strip())
    options = json.dumps(dict(named.get("options") or {}), sort_keys=True, default=str)
    make(tuple(named.get("names", ())), options)  # fails now if a function cannot be created or its judge cannot be reached
    scheduler = config.rollout.scheduler
    if isinstance(scheduler, str) and ":" not in scheduler:
        from polyturn.rollout.schedulers.registry import refuse_moved, schedulers

        if scheduler not in schedulers:
            if scheduler not in multi_turns:
                refuse_moved(scheduler)
            multi_turns.find(scheduler)


def rollout(arguments: Sequence[str]) -> None:
    """Run `swift rollout`."""
    find_like("swift")
    loaded, options = read_swift(arguments)
    serve_config(loaded, base=Path(), options=options)


def read_swift(arguments: Sequence[str]) -> tuple[Loaded[RunConfig], ServeOptions]:
    """Return ms-swift's arguments as a configuration and server options; log ignored arguments with reasons.

    Raises:
        ConfigError: an argument is unknown or unsupported.
    """
    translation = rollout_to_native(arguments)
    _log_ignored_variables()
    for notice in translation.notices():
        logger.info("%s", notice)
    native = absolute(translation, folder=None)
    server = {"serve": native.pop("serve")} if "serve" in native else {}
    loaded = load_values(RunConfig, native, origin=translation.origin)
    return loaded, load_values(_ServerKeys, server, origin=translation.origin).config.serve


def _log_ignored_variables() -> None:
    for name in (n for n in _IMAGE_VARIABLES if os.environ.get(n)):
        logger.info("%s is %s, which has no effect: %s", name, os.environ[name], _IMAGE_VARIABLES[name])


def _translate(tree: Composed, *, megatron: bool = False) -> Translation:
    """Translate the arguments of `rlhf`. Batch sizes are per process for `swift`, and global for Megatron.

    Raises:
        ConfigError: NPROC_PER_NODE or NNODES is not a number.
    """
    variables = {name: os.environ[name] for name in ("NPROC_PER_NODE", "NNODES") if os.environ.get(name)}
    for name, value in variables.items():
        if not value.isdigit() or int(value) < 1:
            raise ConfigError(f"{name} is {value!r}; use a number of {'nodes' if name == 'NNODES' else 'processes'}")
    processes = math.prod(map(int, variables.values()))
    if processes > 1:
        text = " and ".join(f"{name} is {value}" for name, value in variables.items())
        batch = "" if megatron else f" batch sizes are per process, so they are multiplied by {processes};"
        logger.info("%s:%s polyturn.train.distributed.ranks sets the number of training processes", text, batch)
    _log_ignored_variables()
    return megatron_to_native(tree) if megatron else to_native(tree, num_processes=processes)


_SIZE = "the processor sets the size of images; change it in the model's preprocessor_config.json"
_IMAGE_VARIABLES = {
    **dict.fromkeys(("MAX_PIXELS", "MIN_PIXELS", "IMAGE_MAX_TOKEN_NUM", "VIDEO_MAX_PIXELS", "FPS_MAX_FRAMES"), _SIZE),
    "ROOT_IMAGE_DIR": "paths of images are relative to the file that names them",
}
"""Environment variables of ms-swift about images and videos -> why they have no effect."""
_HELP = ("-h", "--help")
COMMANDS: Mapping[str, Callable[[Sequence[str]], None]] = {"rlhf": rlhf, "rollout": rollout}
MEGATRON_COMMANDS: Mapping[str, Callable[[Sequence[str]], None]] = {"rlhf": partial(rlhf, megatron=True)}


def main() -> None:
    """Run the program `swift` with ms-swift's command line, and end the process."""
    from polyturn.cli.end_process import end_process
    from polyturn.cli.main import guarded, prepare_process

    prepare_process()
    end_process(lambda: guarded(lambda: dispatch(sys.argv[1:])))


def dispatch(arguments: Sequence[str]) -> None:
    """Run a command of ms-swift's command line; a leading `megatron` selects the program of that name.

    Raises:
        ConfigError: the command is not available.
    """
    of, commands = ("megatron", MEGATRON_COMMANDS) if arguments[:1] == ["megatron"] else ("swift", COMMANDS)
    rest = arguments[1:] if of == "megatron" else arguments
    name = rest[0] if rest else ""
    if name in ("", *_HELP) or set(_HELP) & set(rest):
        written = " or ".join(f"`{of} {one}`" for one in commands)
        raise ConfigError(
            f"write {written} with ms-swift's arguments, or with a YAML file of them; the guide migrate/swift-args lists "
            "the native keys of each argument"
        )
    if name not in commands:
        raise ConfigError(
            f"`{of} {name}` is not available here.{did_you_mean(name, commands)} polyturn has only the "
            "commands of multi-turn reinforcement learning"
        )
    commands[name](rest[1:])
