"""Load a configuration: YAML, its `defaults:` files, dotted overrides and `${…}`, into a validated pydantic model.

    load_config(RunConfig, Path("run.yaml"), ["train.steps=5", "model.path=${oc.env:MODEL,tiny}"])
      ->  Loaded(config=RunConfig(...), resolved={"train": {"steps": 5, ...}, "model": {"path": "${oc.env:MODEL,tiny}"}})

All configuration files are read here. Every problem becomes one sentence with the key, the value and its source. `resolved`
can be written to disk: a value that depends on an environment variable, even through another key, stays an expression.
`sources.py` merges, `references.py` resolves `${…}`, `explain.py` writes the messages.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from polyturn.config import schema
from polyturn.config.explain import as_shown, explain
from polyturn.config.idle import idle_keys
from polyturn.config.references import resolve, value_at, writable
from polyturn.config.schema import KeyPath, dotted, schema_table
from polyturn.config.sources import Sources, leaves, merge
from polyturn.config.unknown import unknown_keys
from polyturn.core.errors import ConfigError, one_line
from polyturn.core.secrets import masked
from polyturn.infra.live import LiveObject, stands_for_object
from polyturn.infra.nesting import MAX_DEPTH, is_deep
from polyturn.infra.yaml_file import check_config_file, read_yaml
from polyturn.store.run_folders import RESOLVED_HEAD

__all__ = ["Loaded", "load_config", "load_values", "schema_table", "warn_of_repeated", "write_resolved"]

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=BaseModel)

_BASE_LINE = "# Relative paths in it start at "
"""Start of the second line of a run's saved configuration, if its relative paths do not start at the run's folder."""
_JOINED = re.compile(r"[A-Za-z_]\w*:(?!//).+")
"""A key written like `{top_p:0.9}`, without a space."""
_REMOVAL = re.compile(r"~[A-Za-z_]")
"""An override that removes a key in Hydra."""
MAX_NAME = 1000
"""Largest length of a file's path, in characters, far below systems' limits."""


class Loaded(NamedTuple, Generic[ModelT]):
    """A loaded configuration."""

    config: ModelT
    resolved: dict[str, Any]
    """The values with defaults. `${…}` is resolved, except in values that depend on the environment."""
    written: frozenset[KeyPath]
    """The keys set by files, overrides or a program."""


def load_config(
    model: type[ModelT],
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    defaults: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    warns: bool = True,
) -> Loaded[ModelT]:
    """Load a configuration file, or the config.yaml in a run's folder.

    From weakest to strongest: the model's defaults, `defaults`, the files under `defaults:` in the YAML, the YAML itself,
    `values`, the overrides. Mappings are merged, other values replaced.

    Args:
        model: The pydantic model; unknown keys are errors at all levels.
        path: The YAML file; None for overrides only.
        overrides: `key.path=value`, the value read as YAML; `+key=value` and `++key=value` are the same. List entries have
            numbers as keys. An override may also be a YAML file, which is merged at this point; its relative paths start at
            `path`'s folder.
        defaults: Values that the file overrides.
        values: Values from a program, which override the file.
        warns: Warn about repeated overrides and keys without effect. False if the configuration is loaded again later.

    Raises:
        ConfigError: a missing or damaged file, an unknown key, a wrong type, an unresolvable `${…}`; one sentence each.
    """
    sources = Sources()
    if defaults:
        sources.merge(defaults, "from the built-in defaults")
    if path is not None:
        for file, read in _read_chain(_file(path), ()):
            sources.merge(read, f"in {file}")
    if values:
        sources.merge(values, "given in Python")
    if warns:
        warn_of_repeated(overrides)
    for override in overrides:
        if override.endswith((".yaml", ".yml")) and "=" not in override:
            for file, read in _read_chain(Path(override), ()):
                sources.merge(read, f"in {file}")
        else:
            _override(model, sources, override)
    return _load(model, sources, warns=warns)


def warn_of_repeated(overrides: Sequence[str]) -> None:
    """Warn of keys that are set twice in one command, for example by a script that appends to its arguments.

    Two mappings for the same key are merged, so they cause no warning.
    """
    written: dict[str, list[str]] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if equals:
            written.setdefault(key.strip().lstrip("+"), []).append(text.strip())
    lost = [key for key, texts in written.items() if len(set(texts)) > 1 and not all(text.startswith("{") for text in texts)]
    if lost:
        logger.warning("overridden more than once: %s; the last value counts, remove the others", ", ".join(lost))


def load_values(model: type[ModelT], values: Mapping[str, Any], *, origin: Mapping[KeyPath, str]) -> Loaded[ModelT]:
    """Load a configuration made by a program, with errors as in `load_config`.

    `origin` maps keys to the keys they were translated from, with their source: {("train", "steps"): "trainer.steps"}.
    """
    sources = Sources()
    sources.merge(values, "")
    sources.translated = origin
    return _load(model, sources)


def _load(model: type[ModelT], sources: Sources, *, warns: bool = True) -> Loaded[ModelT]:
    # First, because the following steps are recursive.
    if is_deep(sources.values):
        raise ConfigError(f"the configuration is nested deeper than {MAX_DEPTH} lists and mappings; write it flatter")
    written, raw_env = resolve(model, sources)
    # Before validation: YAML reads `off` as false, and null removes a key of another kind.
    written = schema.mapped(model, schema.mapped(model, written, schema.as_word), schema.without_other_kinds)
    resolved = schema.mapped(model, written, schema.with_instance_defaults)
    # Report all problems at once.
    joined = [path for path, value in leaves(written, ()) if value is None and _JOINED.fullmatch(str(path[-1]))]
    problems = [
        f"{dotted(path)!r}{sources.of(path)} has no space after the colon, so YAML reads all of it as a key; write "
        f"{str(path[-1]).replace(':', ': ', 1)}"
        for path in joined
    ]
    problems += [
        f"unknown key {dotted(u.path)!r}, set to {as_shown(u.value, u.path, raw_env)}{sources.of(u.path)}.{u.hint}"
        for u in unknown_keys(model, written)
        if u.path not in joined
    ]
    problems += [
        f"{dotted(path)} is {value!r}{sources.of(path)}, an object from a Python program, which a file cannot contain; "
        "resume from that program: polyturn.train(…, resume=True), or run.resume()"
        for path, value in leaves(written, ())
        if stands_for_object(value)
    ]
    try:
        config = model.model_validate(resolved)
    except ValidationError as error:
        problems += explain(error, model, resolved, sources, raw_env)
    problems += [
        f"{sources.statement(path, as_shown(value_at(written, path), path, raw_env))}; {why}"
        for path, why in schema.no_numbers(model, written)
        if not any(dotted(path) in message for message in problems)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    for idle in idle_keys(config) if warns else ():
        message = sources.statement(idle.path, as_shown(value_at(resolved, idle.path), idle.path, raw_env))
        where = " or ".join(map(repr, idle.values)).replace("None", "null")
        read = f", only with {where}" if where else ""
        now = as_shown(idle.now, idle.by, raw_env).replace("None", "null")
        logger.warning("%s, which has no effect while %s is %s%s", message, dotted(idle.by), now, read)
    return Loaded(config, writable(config, resolved, raw_env), frozenset(path for path, _ in leaves(written, ())))


def write_resolved(resolved: Mapping[str, Any], path: Path, *, base: Path | None = None) -> None:
    """Write `Loaded.resolved` as YAML, atomically.

    The file loads to the same configuration, except for secrets, which are left out. Its relative paths refer to `base` (see
    `base_of`).
    """
    text = yaml.safe_dump(masked(resolved), sort_keys=False, allow_unicode=True, width=1000)
    temporary = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    where = "" if base is None else f"{_BASE_LINE}{base.resolve()}\n"
    temporary.write_text(RESOLVED_HEAD + where + text, encoding="utf-8")
    os.replace(temporary, path)


def _file(path: Path) -> Path:
    """Return the configuration file for a path, which may be a run's folder."""
    return path / "config.yaml" if _is_of_run(path / "config.yaml") else path


def base_of(path: Path) -> Path:
    """Return the folder of a configuration's relative paths: its own folder, or for a run's saved configuration the folder
    that is recorded in it."""
    path = _file(path)
    if _is_of_run(path):
        with path.open(encoding="utf-8") as lines:
            _, second = next(lines), next(lines, "")
        if second.startswith(_BASE_LINE) and (base := Path(second.removeprefix(_BASE_LINE).rstrip("\n"))).is_dir():
            return base
    return path.parent.resolve()


def _is_of_run(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(RESOLVED_HEAD)) == RESOLVED_HEAD.encode()


# --- files and overrides ----------------------------------------------------------------------------------------------


def _read_chain(path: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the `defaults` files of `path`, weakest first, then `path`."""
    if path.resolve() in above:
        chain = " -> ".join(str(p) for p in (*above, path.resolve()))
        raise ConfigError(f"the 'defaults' of these files form a circle: {chain}; remove one of them")
    check_config_file(path)
    values = read_yaml(path)
    below = values.pop("defaults", None) or []
    below = [below] if isinstance(below, str) else below
    if not isinstance(below, list) or not all(isinstance(b, str) for b in below):
        raise ConfigError(f"'defaults' in {path} must be a file name or a list of them, not {below!r}")
    for name in below:
        if len(name) > MAX_NAME or "\0" in name:
            raise ConfigError(f"'defaults' in {path} names {name!r:.80}…, which is too long for a file name")
        yield from _read_chain(path.parent / os.path.expanduser(name), (*above, path.resolve()))
    yield path, values


def _named(model: type, path: KeyPath, at: Any) -> Any:
    """Expand a section written as a bare name, `env: a:B`, to {"name": "a:B"}; return other values unchanged."""
    if not isinstance(at, str | LiveObject):
        return at
    annotation: Any = model
    for step in path:
        annotation = schema.child(schema.meant(annotation, {}), step)
    sections = [member for member in schema.unwrap(annotation) if schema.is_model(member)]
    return {"name": at} if any("name" in schema.keys_of(section) for section in sections) else at


def _override(model: type, sources: Sources, override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip().lstrip("+")
    if _REMOVAL.match(key):
        raise ConfigError(f"the override {override!r}: '~' removes no key; write {key[1:]}=null to unset it")
    if not equals or not key:
        lacks = "no '='" if not equals else "no key before '='"
        raise ConfigError(f"the override {override!r} has {lacks}; write it as key.path=value")
    try:
        # Parsed by OmegaConf, so that values mean the same as in a file.
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        why = f"{one_line(error):.300}"
        raise ConfigError(f"the value in the override {override!r:.200} cannot be read ({why}); quote it") from error
    assert isinstance(parsed, dict)
    value = parsed["value"]
    path: KeyPath = ()
    at: Any = sources.values
    parts = key.split(".")
    for depth, part in enumerate(parts):
        is_last = depth == len(parts) - 1
        if isinstance(at, list):
            if not part.isdecimal() or int(part) >= len(at):
                entries = f"with the entries 0 to {len(at) - 1}" if at else "without entries"
                raise ConfigError(f"the override {override!r}: {dotted(path)} is a list {entries}; it has no {part!r}")
            step: str | int = int(part)
        elif isinstance(at, dict):
            step = part
            if not is_last and at.get(step) is None:
                at[step] = {}
        else:
            raise ConfigError(f"the override {override!r}: {dotted(path)} is {at!r}, which has no keys to set")
        path = (*path, step)
        below = at.get(step) if isinstance(at, dict) else at[step]
        if is_last and isinstance(value, dict) and isinstance(below := _named(model, path, below), dict):
            merge(below, value)
            at[step] = below
        elif is_last:
            at[step] = value
        else:
            at[step] = at = _named(model, path, at[step])
    for leaf, _ in leaves(value, path):
        sources.origin[leaf] = f"from the override {override!r}"
