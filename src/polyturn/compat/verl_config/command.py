"""Runs whose config is written in verl's keys: `polyturn train --verl`, and what stands in for `verl.trainer.main_ppo`.

Nothing heavy is imported before the whole config is known to be right, so a mistake in it is answered at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from polyturn.cli.console import program
from polyturn.cli.run_as import find_like
from polyturn.compat.verl_config.compose import BASE, Composed, base_folder, compose_file, compose_name
from polyturn.compat.verl_config.paths import absolute
from polyturn.compat.verl_config.translate import translate
from polyturn.config.load import load_values
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)


def run(path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool) -> None:
    """Train the run that a config in verl's keys describes."""
    find_like("verl")
    command = [*program(), "train", "--verl", str(path), *overrides]
    train(compose_file(path, overrides), folder=path.parent, command=command, resume=resume, dry_run=dry_run)


def run_main_ppo(arguments: Sequence[str], *, dry_run: bool = False) -> None:
    """Do what `python -m verl.trainer.main_ppo` is asked to do by its command line."""
    find_like("verl")
    arguments_read = parse_arguments(arguments)
    folder = None if arguments_read.folder is None else config_path(arguments_read.folder)
    tree = compose_name(arguments_read.name, folder=folder, overrides=arguments_read.overrides, more=arguments_read.more)
    command = [*program(), "run-as", "verl", "--", "python", "-m", "verl.trainer.main_ppo", *arguments]
    train(tree, folder=folder, command=command, resume=False, dry_run=dry_run)


def train(tree: Composed, *, folder: Path | None, command: Sequence[str], resume: bool, dry_run: bool) -> None:
    """Translate a composed tree, say once what is ignored and why, and train.

    Args:
        tree: The tree.
        folder: The folder of its config.
        command: The command that started it.
        resume: Go on from the latest checkpoint; without it the config's resume_mode decides.
        dry_run: Check everything, show it, and stop.
    """
    translation = translate(tree)
    loaded = load_values(RunConfig, absolute(translation, folder=folder), origin=translation.origin)
    for notice in translation.notices():
        logger.info("%s", notice)
    tell_unread_checkout()

    from polyturn.api.console import quiet_transformers
    from polyturn.build import ConfigSource
    from polyturn.cli import train as native

    quiet_transformers()
    source = ConfigSource(config=loaded.config, base=(folder or Path()).resolve())
    when: bool | Literal["auto"] = "auto" if translation.resumes and not resume else resume

    def again(name: str) -> list[str]:
        renamed = [] if name == loaded.config.name else [f"+polyturn.name={name}"]
        return [*command, *renamed, "trainer.resume_mode=auto"]

    native.train(source, loaded.resolved, again=again, resume=when, dry_run=dry_run)


def tell_unread_checkout() -> None:
    """Warn in a checkout of verl that a run here does without the checkout's modules, changed ones included."""
    if (tree := base_folder()) != BASE:
        logger.warning(
            "%s: modules of verl are not loaded from this checkout, so what was changed in them has no effect here; it "
            "belongs in files of your own (rewards, tools, interactions, agent loops, losses), which the config names",
            tree.parents[2],
        )


class HydraArguments(NamedTuple):
    """The command line of a Hydra program, parsed."""

    folder: Path | None
    """Of `--config-path`."""
    name: str
    overrides: list[str]
    more: list[Path]
    """Of `--config-dir`, searched behind it."""


def parse_arguments(arguments: Sequence[str]) -> HydraArguments:
    """Read a Hydra program's command line.

    Raises:
        ConfigError: an option that means something else than where the config is.
    """
    folder: Path | None = None
    name = "ppo_trainer"
    overrides: list[str] = []
    more: list[Path] = []
    rest = list(arguments)
    while rest:
        head, equals, value = rest.pop(0).partition("=")
        if not head.startswith("-"):
            overrides.append(head + equals + value)
            continue
        if head not in _OPTIONS:
            raise ConfigError(
                f"the option {head!r} of verl.trainer.main_ppo is not available here; use --config-path, --config-name and "
                f"key=value (polyturn train --verl CONFIG --dry-run shows the config).{did_you_mean(head, _OPTIONS)}"
            )
        if not equals:
            if not rest:
                raise ConfigError(f"the option {head!r} needs a value")
            value = rest.pop(0)
        if _OPTIONS[head] == "name":
            name = value
        elif _OPTIONS[head] == "folder":
            folder = Path(value).expanduser()
        else:
            more.append(Path(value).expanduser())
    for argument in more:
        if not argument.is_dir():
            raise ConfigError(f"--config-dir is {str(argument)!r}, which is not a folder; check the path")
    return HydraArguments(folder, name, overrides, more)


_OPTIONS = {
    "--config-path": "folder",
    "-cp": "folder",
    "--config-dir": "more",
    "-cd": "more",
    "--config-name": "name",
    "-cn": "name",
}


def config_path(path: Path) -> Path:
    """Return the folder that `--config-path` means: Hydra starts from that of the program, verl/trainer, then from here.

    Raises:
        ConfigError: there is no such folder.
    """
    own = base_folder()
    for folder in (own.parent / path, Path.cwd() / path) if not path.is_absolute() else (path,):
        if folder.is_dir():
            return folder.resolve() if folder.resolve() != own.resolve() else own
    if path == Path("config"):
        return own
    raise ConfigError(
        f"--config-path is {str(path)!r}, which is not a folder, neither below {own.parent} nor here; check the path"
    )
