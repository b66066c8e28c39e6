"""Runs whose config is written in verl's keys: `polyturn train --verl`, and what stands in for `verl.trainer.main_ppo`.

Nothing heavy is imported before the whole config is known to be right, so a mistake in it is answered at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from polyturn.cli.console import program
from polyturn.cli.run_as import find_like
from polyturn.compat.verl_config.compose import Composed, compose_file, compose_name
from polyturn.compat.verl_config.paths import absolute
from polyturn.compat.verl_config.translate import translate
from polyturn.config.load import load_values
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError

logger = logging.getLogger(__name__)


def run(path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool) -> None:
    """Train the run that a config in verl's keys describes."""
    command = [*program(), "train", "--verl", str(path), *overrides]
    train(compose_file(path, overrides), folder=path.parent, command=command, resume=resume, dry_run=dry_run)


def run_main_ppo(arguments: Sequence[str]) -> None:
    """Do what `python -m verl.trainer.main_ppo` is asked to do by its command line."""
    folder, name, overrides = parse_arguments(arguments)
    tree = compose_name(name, folder=folder, overrides=overrides)
    command = [*program(), "run-as", "verl", "--", "python", "-m", "verl.trainer.main_ppo", *arguments]
    train(tree, folder=folder, command=command, resume=False, dry_run=False)


def train(tree: Composed, *, folder: Path | None, command: Sequence[str], resume: bool, dry_run: bool) -> None:
    """Translate a composed tree, say once what is ignored and why, and train.

    Args:
        tree: The tree.
        folder: The folder of its config.
        command: The command that started it.
        resume: Go on from the latest checkpoint; without it the config's resume_mode decides.
        dry_run: Check everything, show it, and stop.
    """
    find_like("verl")
    translation = translate(tree)
    loaded = load_values(RunConfig, absolute(translation, folder=folder), origin=translation.origin)
    for notice in translation.notices():
        logger.info("%s", notice)

    from polyturn.build import Place
    from polyturn.cli import train as native
    from polyturn.cli.console import quiet_transformers

    quiet_transformers()
    place = Place(config=loaded.config, base=(folder or Path()).resolve())
    when: bool | Literal["auto"] = "auto" if translation.resumes and not resume else resume

    def again(name: str) -> list[str]:
        renamed = [] if name == loaded.config.name else [f"+polyturn.name={name}"]
        return [*command, *renamed, "trainer.resume_mode=auto"]

    native.train(place, loaded.resolved, again=again, resume=when, dry_run=dry_run)


def parse_arguments(arguments: Sequence[str]) -> tuple[Path | None, str, list[str]]:
    """Read a Hydra program's command line; return its folder of configs, the config's name and the overrides.

    Raises:
        ConfigError: an option that means something else than where the config is.
    """
    folder: Path | None = None
    name = "ppo_trainer"
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        head, equals, value = rest.pop(0).partition("=")
        if not head.startswith("-"):
            overrides.append(head + equals + value)
            continue
        if head not in ("--config-path", "-cp", "--config-dir", "-cd", "--config-name", "-cn"):
            raise ConfigError(
                f"the option {head!r} of verl.trainer.main_ppo is not available here; use --config-path, --config-name and "
                "key=value (polyturn train --verl CONFIG --dry-run shows the config)"
            )
        if not equals:
            if not rest:
                raise ConfigError(f"the option {head!r} needs a value")
            value = rest.pop(0)
        if head in ("--config-name", "-cn"):
            name = value
        else:
            folder = Path(value).expanduser()
    return folder, name, overrides
