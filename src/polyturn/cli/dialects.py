"""Configurations with the keys of another library: finds the dialects, and detects the dialect of a file.

polyturn train --other CONFIG     is     polyturn train --dialect other CONFIG
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.config.dialect import ConfigDialect, MigrateDialect
from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean
from polyturn.infra.plugins import load_each, load_offered, offered, wrong_kind

if TYPE_CHECKING:
    from polyturn.config.load import Loaded
    from polyturn.config.models import RunConfig

GROUP = "polyturn.config_dialects"


def find_dialect(name: str) -> ConfigDialect:
    """Return the dialect of this name.

    Raises:
        UnknownNameError: there is no such dialect.
        ConfigError: the package registers an object that is not a dialect.
    """
    if name not in offered(GROUP):
        raise UnknownNameError(f"--dialect: there is no {name!r}.{did_you_mean(name, offered(GROUP))}")
    dialect = load_offered(GROUP, name, where="--dialect")
    if not isinstance(dialect, ConfigDialect):
        raise wrong_kind(GROUP, name, dialect, where="--dialect", needs="a polyturn.config.dialect.ConfigDialect")
    return dialect


def spelled_out(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments with `--NAME` of a dialect replaced by `--dialect NAME`; arguments after `--` stay."""
    flags = {f"--{name}": name for name in offered(GROUP)}
    rest = iter(arguments)
    for one in rest:
        if one in flags:
            yield from ("--dialect", flags[one])
        else:
            yield one
        if one == "--":
            yield from rest


def described() -> str:
    """Return the flags of all dialects with their libraries, for the help text."""
    return ", ".join(f"--{name} ({one.title})" for name, one in load_each(GROUP, ConfigDialect))


def load_native(
    path: Path | None,
    overrides: Sequence[str],
    *,
    defaults: Mapping[str, Any] | None = None,
    warns: bool = True,
    flags: Sequence[str] = (),
) -> Loaded[RunConfig]:
    """Load a configuration with polyturn's keys, like `load_config`. The error for another library's file contains the
    command to run it, with the flags `flags` of `train`.

    Raises:
        ConfigError: the file cannot be loaded.
    """
    from polyturn.cli.console import command
    from polyturn.config.load import load_config
    from polyturn.config.models import RunConfig

    try:
        return load_config(RunConfig, path, overrides, defaults=defaults, warns=warns)
    except ConfigError as problem:
        if path is None or (name := dialect_of(path)) is None:
            raise
        dialect, flag = find_dialect(name), f"--{name}"
        raise ConfigError(
            f"{path} has the keys of {dialect.title}, not polyturn's; add {flag}: "
            f"{command('train', path, *overrides, flag, *flags)}"
            + (
                ""
                if dialect.migrate is None
                else f". For other commands, convert it to polyturn's keys: {command('config', 'migrate', path)}"
            )
        ) from problem


def begin(path: Path, overrides: Sequence[str]) -> None:
    """Check a configuration before slow imports, and log the start of the run."""
    from polyturn.api.console import tell_start

    tell_start(load_native(path, overrides, warns=False).config.name)


def train_in_dialect(name: str, path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool) -> None:
    """Train from a file in a dialect; raise with advice if the file has polyturn's keys.

    Raises:
        ConfigError: there is no such dialect, or the file cannot be used.
    """
    from polyturn.cli.console import command

    try:
        find_dialect(name).train(path, overrides, resume=resume, dry_run=dry_run)
    except ConfigError as problem:
        if dialect_of(path) is not None or not _is_native(path, overrides):
            raise
        raise ConfigError(
            f"{path} has polyturn's keys, not {find_dialect(name).title}'s; remove --{name}: "
            f"{command('train', path, *overrides, *flags_of(resume=resume, dry_run=dry_run))}"
        ) from problem


def flags_of(*, resume: bool, dry_run: bool) -> list[str]:
    """Return the flags of `train` for these parameters."""
    return [flag for flag, is_set in (("--resume", resume), ("--dry-run", dry_run)) if is_set]


def dialect_of(path: Path) -> str | None:
    """Return the name of the dialect that a file seems to use; None for polyturn's keys."""
    from polyturn.config.models import RunConfig
    from polyturn.infra.yaml_file import read_yaml

    try:
        keys = set(read_yaml(path)) if path.is_file() else set()
    except ConfigError:
        return None
    ours = {"defaults", *RunConfig.model_fields}
    for name, one in load_each(GROUP, ConfigDialect):
        keys_of_dialect = keys & (one.usual_keys | one.own_keys)
        if keys_of_dialect & one.own_keys or (len(keys_of_dialect) > 1 and keys_of_dialect - ours):
            return name
    return None


def to_migrate(path: Path) -> MigrateDialect:
    """Return the function that converts a file to polyturn's keys: the function of the file's dialect, or, if no dialect is
    detected, of the only dialect that can convert files.

    Raises:
        ConfigError: no dialect can convert it, or the file already has polyturn's keys.
    """
    from polyturn.cli.console import command

    able = {name: one.migrate for name, one in load_each(GROUP, ConfigDialect) if one.migrate is not None}
    name = dialect_of(path)
    if name is not None and name not in able:
        raise ConfigError(
            f"{path} has the keys of {find_dialect(name).title}, which cannot be converted; train from it directly: "
            f"{command('train', path, f'--{name}')}"
        )
    if name is None and _is_native(path):
        raise ConfigError(f"{path} already has polyturn's keys; use it directly: {command('train', path)}")
    if name is None and len(able) != 1:
        known = ", ".join(find_dialect(one).title for one in able) or "no library"
        raise ConfigError(f"{path} is not recognised as a configuration of {known}")
    return able[name or next(iter(able))]


def _is_native(path: Path, overrides: Sequence[str] = ()) -> bool:
    try:
        load_native(path, overrides, warns=False)
    except ConfigError:
        return False
    return True
