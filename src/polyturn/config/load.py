"""Load a configuration: YAML, its `defaults:` files, dotted overrides and `${…}`, into a validated pydantic model.

    load_config(RunConfig, Path("run.yaml"), ["train.steps=5", "model.path=${oc.env:MODEL,tiny}"])
      ->  Loaded(config=RunConfig(...), resolved={"train": {"steps": 5, ...}, "model": {"path": "${oc.env:MODEL,tiny}"}})

Separate so that nothing else reads configuration files. Two promises: every problem is one sentence that names the key,
shows the value and says where it came from; and `resolved` can be written to disk, because a value that depends on an
environment variable stays an expression, also if it refers to it through another key.
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
from polyturn.config.unknown import unknown_keys, without_other_kinds
from polyturn.core.errors import ConfigError, did_you_mean, one_line
from polyturn.core.live import LiveObject, stands_for_object
from polyturn.core.nesting import MAX_DEPTH, is_deep
from polyturn.core.secrets import masked
from polyturn.infra.yaml_file import read_yaml
from polyturn.store.run_folders import RESOLVED_HEAD

__all__ = ["Loaded", "load_config", "load_values", "schema_table", "tell_repeated", "write_resolved"]

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=BaseModel)

_BASE_LINE = "# Relative paths in it start at "
"""The second line of a run's own configuration, where the run's paths start at a folder that is not the run's."""
_JOINED = re.compile(r"[A-Za-z_]\w*:(?!//).+")
"""A key that was written as `{top_p:0.9}`."""
MAX_NAME = 1000
"""Characters of a file's path, far below what systems take."""


class Loaded(NamedTuple, Generic[ModelT]):
    """A configuration that was read."""

    config: ModelT
    resolved: dict[str, Any]
    """Everything with defaults filled in and `${…}` resolved, except what depends on the environment."""
    written: frozenset[KeyPath]
    """The keys that a file, an override or a program set."""


def load_config(
    model: type[ModelT],
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    defaults: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    tells: bool = True,
) -> Loaded[ModelT]:
    """Read a configuration, or that of a run's folder.

    From weakest to strongest: the model's own defaults, `defaults`, the files that the YAML names under `defaults:`, the
    YAML itself, `values`, the overrides. Mappings merge, everything else replaces.

    Args:
        model: The pydantic model; unknown keys are errors in it and in the models inside it.
        path: The YAML file; None for overrides alone.
        overrides: `key.path=value`, the value read as YAML; `+key=value` is the same. List entries go by number. The path of
            a YAML file lays that file above what stands before it; relative paths in it still start at `path`'s folder.
        defaults: Values below the file.
        values: Values above it, which a program gives.
        tells: Warn of keys that were set without effect; False if the configuration is read again.

    Raises:
        ConfigError: a missing or damaged file, an unknown key, a wrong type, a `${…}` that leads nowhere: one sentence each.
    """
    sources = Sources()
    if defaults:
        sources.merge(defaults, "from the built-in defaults")
    if path is not None:
        for file, read in _read_chain(_file(path), ()):
            sources.merge(read, f"in {file}")
    if values:
        sources.merge(values, "given in Python")
    if tells:
        tell_repeated(overrides)
    for override in overrides:
        if override.endswith((".yaml", ".yml")) and "=" not in override:
            for file, read in _read_chain(Path(override), ()):
                sources.merge(read, f"in {file}")
        else:
            _override(model, sources, override)
    return _load(model, sources, tells=tells)


def tell_repeated(overrides: Sequence[str]) -> None:
    """Warn of keys that `key=value` sets twice in one command, as where a script appends to what it was given.

    Mappings are merged, so that of two of them neither is lost.
    """
    written: dict[str, list[str]] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if equals:
            written.setdefault(key.strip().lstrip("+"), []).append(text.strip())
    lost = [key for key, texts in written.items() if len(set(texts)) > 1 and not all(text.startswith("{") for text in texts)]
    if lost:
        logger.warning("overridden more than once: %s; the last value counts, leave the others out", ", ".join(lost))


def load_values(model: type[ModelT], values: Mapping[str, Any], *, origin: Mapping[KeyPath, str]) -> Loaded[ModelT]:
    """Read a configuration that a program made.

    Args:
        model: The pydantic model.
        values: The configuration as plain data.
        origin: Native key to the key it was made of and where that was written: {("train", "steps"): "trainer.steps"}.

    Raises:
        ConfigError: as `load_config` does.
    """
    sources = Sources()
    sources.merge(values, "")
    sources.translated = origin
    return _load(model, sources)


def _load(model: type[ModelT], sources: Sources, *, tells: bool = True) -> Loaded[ModelT]:
    # First, because all that follows walks the tree by recursion.
    if is_deep(sources.values):
        raise ConfigError(f"the configuration is nested deeper than {MAX_DEPTH} lists and mappings; write it flatter")
    written, raw_env = resolve(model, sources)
    # Before anything is judged: `off` arrives as false, and a null of another kind takes a key out.
    written = schema.with_choices(model, written)
    written = without_other_kinds(model, written)
    resolved = schema.with_instance_defaults(model, written)
    # All at once, so that a configuration is not corrected one start after another.
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
        f"{dotted(path)} is {value!r}{sources.of(path)}, an object that a Python program gave, which no file can hold; go "
        "on from that program: polyturn.train(…, resume=True), or run.resume()"
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
    for idle in idle_keys(config) if tells else ():
        message = sources.statement(idle.path, as_shown(value_at(resolved, idle.path), idle.path, raw_env))
        where = " or ".join(map(repr, idle.values)).replace("None", "null")
        read = f"; it is read where that is {where}" if where else ""
        now = as_shown(idle.now, idle.by, raw_env).replace("None", "null")
        logger.warning("%s, which has no effect while %s is %s%s", message, dotted(idle.by), now, read)
    return Loaded(config, writable(config, resolved, raw_env), frozenset(path for path, _ in leaves(written, ())))


def write_resolved(resolved: Mapping[str, Any], path: Path, *, base: Path | None = None) -> None:
    """Write `Loaded.resolved` as YAML; a crash leaves no half a file.

    It loads again to the same configuration, except that a secret which was written into it is not there; its relative paths
    start at `base`, as `base_of` says.
    """
    text = yaml.safe_dump(masked(resolved), sort_keys=False, allow_unicode=True, width=1000)
    temporary = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    where = "" if base is None else f"{_BASE_LINE}{base.resolve()}\n"
    temporary.write_text(RESOLVED_HEAD + where + text, encoding="utf-8")
    os.replace(temporary, path)


def _file(path: Path) -> Path:
    """Return the file of a configuration, also where the folder of a run is given for it."""
    return path / "config.yaml" if _is_of_run(path / "config.yaml") else path


def base_of(path: Path) -> Path:
    """Return the folder at which the relative paths of a configuration start: its own, or that of the run it came from."""
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
    """Yield the files below `path`, the weakest first, then `path` itself."""
    if path.resolve() in above:
        chain = " -> ".join(str(p) for p in (*above, path.resolve()))
        raise ConfigError(f"the 'defaults' of these files go round in a circle: {chain}; remove one of them")
    values = _read(path)
    below = values.pop("defaults", None) or []
    below = [below] if isinstance(below, str) else below
    if not isinstance(below, list) or not all(isinstance(b, str) for b in below):
        raise ConfigError(f"'defaults' in {path} must be a file name or a list of them, not {below!r}")
    for name in below:
        if len(name) > MAX_NAME or "\0" in name:
            raise ConfigError(f"'defaults' in {path} names {name!r:.80}…, which no file can be called")
        yield from _read_chain(path.parent / Path(name).expanduser(), (*above, path.resolve()))
    yield path, values


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")] if path.parent.is_dir() else []
        what = "is a folder, not a config file" if path.is_dir() else "does not exist"
        raise ConfigError(f"the config {str(path)!r} {what}.{did_you_mean(path.name, near) if near else ' Check the path.'}")
    return read_yaml(path)


def _named(model: type, path: KeyPath, at: Any) -> Any:
    """Return a section that was written as its name alone, `env: a:B`, with the key `name`; all else as it is."""
    if not isinstance(at, str | LiveObject):
        return at
    annotation: Any = model
    for step in path:
        annotation = schema.child(schema.meant(annotation, {}), step)
    sections = [member for member in schema.unwrap(annotation) if schema.is_model(member)]
    return {"name": at} if any("name" in schema.keys_of(section) for section in sections) else at


def _override(model: type, sources: Sources, override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip().removeprefix("+")
    if not equals or not key:
        lacks = "no '='" if not equals else "no key before '='"
        raise ConfigError(f"the override {override!r} has {lacks}; write it as key.path=value")
    try:
        # Read by OmegaConf, so that a value means on the command line what it means in a file.
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
            if not part.isdigit() or int(part) >= len(at):
                known = f"0 to {len(at) - 1}" if at else "nothing"
                raise ConfigError(f"the override {override!r}: {dotted(path)} is a list, {part!r} is not one of {known}")
            step: str | int = int(part)
        elif isinstance(at, dict):
            step = part
            if not is_last and at.get(step) is None:
                at[step] = {}
        else:
            raise ConfigError(f"the override {override!r}: {dotted(path)} is {at!r}, which has no keys to set")
        path = (*path, step)
        below = at.get(step) if isinstance(at, dict) else None
        if is_last and isinstance(value, dict) and isinstance(below := _named(model, path, below), dict):
            merge(below, value)
            at[step] = below
        elif is_last:
            at[step] = value
        else:
            at[step] = at = _named(model, path, at[step])
    for leaf, _ in leaves(value, path):
        sources.origin[leaf] = f"from the override {override!r}"
