"""Runs with verl's keys: `polyturn train --verl`, and the replacement of `verl.trainer.main_ppo`.

Heavy imports happen only after the whole config has been checked, so that mistakes are reported at once.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from polyturn.cli.console import program
from polyturn.cli.run_as import find_like
from polyturn.compat.verl_config.compose import BASE, base_folder, compose_file, compose_name
from polyturn.compat.verl_config.table import table
from polyturn.compat.verl_config.translate import translate
from polyturn.config.load import load_values
from polyturn.config.models import RunConfig
from polyturn.config.translate.paths import absolute
from polyturn.config.translate.tree import Composed
from polyturn.core.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)


def run(path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool) -> None:
    """Train with a config in verl's keys."""
    find_like("verl")
    command = [*program(), "train", "--verl", str(path), *overrides]
    train(compose_file(path, overrides), folder=path.parent, command=command, resume=resume, dry_run=dry_run)


def run_main_ppo(arguments: Sequence[str], *, dry_run: bool = False) -> None:
    """Run the command line of `python -m verl.trainer.main_ppo`."""
    find_like("verl")
    arguments_read = parse_arguments(arguments)
    folder = None if arguments_read.folder is None else config_path(arguments_read.folder)
    tree = compose_name(arguments_read.name, folder=folder, overrides=arguments_read.overrides, more=arguments_read.more)
    command = [*program(), "run-as", "verl", "--", "python", "-m", "verl.trainer.main_ppo", *arguments]
    train(tree, folder=folder, command=command, resume=False, dry_run=dry_run)


def train(tree: Composed, *, folder: Path | None, command: Sequence[str], resume: bool, dry_run: bool) -> None:
    """Translate a composed tree, log the ignored keys with reasons, and train.

    Args:
        tree: The tree.
        folder: The folder of its config.
        command: The command that started the run.
        resume: Whether to continue from the latest checkpoint; if False, the config's resume_mode decides.
        dry_run: Whether to check and show everything without training.
    """
    translation = translate(tree)
    with advice_in_verls_keys():
        loaded = load_values(RunConfig, absolute(translation, folder=folder), origin=translation.origin)
    for notice in translation.notices():
        logger.info("%s", notice)
    tell_unread_checkout()

    from polyturn.api.console import quiet_transformers
    from polyturn.build import ConfigSource
    from polyturn.cli import train as native

    quiet_transformers()
    source = ConfigSource(config=loaded.config, base=(folder or Path()).resolve())
    resumes = any((fate.key, fate.value) == ("trainer.resume_mode", "auto") for fate in translation.fates)
    when: bool | Literal["auto"] = "auto" if resumes and not resume else resume

    def again(name: str) -> list[str]:
        renamed = [] if name == loaded.config.name else [f"+polyturn.name={name}"]
        return [*command, *renamed, "trainer.resume_mode=auto"]

    with advice_in_verls_keys():
        native.train(source, loaded.resolved, again=again, resume=when, dry_run=dry_run)


_DOTTED = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+\b")


@contextmanager
def advice_in_verls_keys() -> Iterator[None]:
    """Add to an error the verl spelling of the native keys that it names.

    Raises:
        ConfigError: the same error, with that sentence.
    """
    try:
        yield
    except ConfigError as problem:
        text, rules = str(problem), table()
        spelled: dict[str, str] = {}
        for key in _DOTTED.findall(text):
            if key.partition(".")[0] in RunConfig.model_fields and not rules.knows(key):
                own = [row.key for row in rules.exact.values() if row.to == (key,)]
                spelled[key] = " or ".join([*own[:1], f"+polyturn.{key}"])
        if not spelled:
            raise
        listed = ", ".join(f"{key} is {own}" for key, own in spelled.items())
        raise ConfigError(f"{text} (in this config: {listed})") from problem


def tell_unread_checkout() -> None:
    """Warn inside a checkout of verl that its modules, including changed ones, are not used."""
    if (tree := base_folder()) != BASE:
        logger.warning(
            "%s: modules of verl are not loaded from this checkout, so changes to them have no effect; move them to files "
            "of your own (rewards, tools, interactions, agent loops, losses), which the config names",
            tree.parents[2],
        )


class HydraArguments(NamedTuple):
    """A parsed command line of a Hydra program."""

    folder: Path | None
    """The folder of `--config-path`."""
    name: str
    overrides: list[str]
    more: list[Path]
    """Folders of `--config-dir`, searched after `folder`."""


def parse_arguments(arguments: Sequence[str]) -> HydraArguments:
    """Parse a Hydra program's command line.

    Raises:
        ConfigError: an option is unknown or lacks its value, or a folder does not exist.
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
            folder = Path(os.path.expanduser(value))
        else:
            more.append(Path(os.path.expanduser(value)))
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
    """Return the folder of `--config-path`, resolved against verl/trainer, else against the working directory.

    Raises:
        ConfigError: the folder does not exist.
    """
    own = base_folder()
    for folder in (own.parent / path, Path.cwd() / path) if not path.is_absolute() else (path,):
        if folder.is_dir():
            return folder.resolve() if folder.resolve() != own.resolve() else own
    if path == Path("config"):
        return own
    raise ConfigError(
        f"--config-path is {str(path)!r}, which is not a folder in {own.parent} or the working directory; check the path"
    )
